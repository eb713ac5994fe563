"""The GPU's counters for each step of kernels/ladder, which Nsight Compute's ncu reads around each kernel."""

import itertools
from collections.abc import Iterator

from bench.attention.contenders import draw_inputs
from bench.attention.rows import SHAPE
from bench.attention.shapes import AttentionShape
from bench.common.formatting import table
from bench.common.timing import Gpu, recorded
from bench.paper.hbm_counters import Call, Metrics, profiled
from bench.paper.ladder_steps import STEPS, call_of, title_of
from bench.paper.launches import compile_together

TIME = "gpu__time_duration.sum"
WAVES = "launch__waves_per_multiprocessor"
PERCENT = {  # the mean over a step's kernels, weighted by their time
    "achieved": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "l1": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "memory_stalls": "smsp__warp_issue_stalled_long_scoreboard_per_warp_active.pct",
    "barrier_stalls": "smsp__warp_issue_stalled_barrier_per_warp_active.pct",
}
COUNTS = {  # the sum over a step's kernels
    "load_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "store_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "shared_loads": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared_stores": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "load_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "store_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "store_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
}
METRICS = TIME, WAVES, *PERCENT.values(), *COUNTS.values()
HEADER = ["achieved occupancy", "waves/SM", "tensor pipe", "L1", "L2", "DRAM", "sectors/load", "sectors/store"]
HEADER += ["conflicts of loads, M", "of stores, M", "shared efficiency", "stalls: memory", "stalls: barrier"]
NOTE = """\
One call of each step and of flash2, from ncu, with warm caches. If a step has several kernels, counts are added up, \
percentages are means weighted by time, and waves are of the longest kernel. Achieved occupancy: resident warps as a \
share of the most possible. Tensor pipe: share of the cycles of active multiprocessors. L1, L2, DRAM: share of the \
peak throughput, as Nsight Compute's "GPU Speed Of Light" shows it; L1 includes shared memory. Sectors of 32 bytes \
for each load or store instruction of a warp, without TMA. M: millions. Shared efficiency: accesses to \
shared memory by load and store instructions that are not bank conflicts, as a share of all of them; wgmma and TMA \
are left out. Stalls: share of the warps' time that waits for global or local memory (long scoreboard) or at a \
barrier. A dash: this ncu lacks the metric, or the step has no such access."""


def measure_counters(pass_: str, shapes: list[AttentionShape], gpu: Gpu, seconds: int) -> Iterator[dict]:
    """Yield a row for each shape, step and flash2. One ncu profiles all of them. Rows without counters say why."""
    rows, calls = [], []
    for shape, name in itertools.product(shapes, (*STEPS[pass_], "flash2")):
        row = {"variant": name, **{key: getattr(shape, key) for key in SHAPE}}
        rows.append(row | {"counters": None, "not_measured": None, "status": None, "message": None})
        calls.append((shape, name, pass_, None))
    found, reason = [], "there is no GPU"
    if gpu.device == "cuda":
        run_once(rows, calls, gpu)
        found, reason = profiled([c for r, c in zip(rows, calls, strict=True) if not r["status"]], METRICS, seconds)
    measured = iter(found)
    for row in rows:
        if row["status"] is None:
            row.update(counters=counters_of(next(measured)) if found else None, not_measured=reason, status="ok")
    yield from rows


def run_once(rows: list[dict], calls: list[Call], gpu: Gpu) -> None:
    """Run each call in this process. A call that raises would end ncu, so the row of such a call gets its status."""
    bound = []
    for shape, pairs in itertools.groupby(zip(rows, calls, strict=True), key=lambda pair: pair[1][0]):
        inputs = draw_inputs(shape, gpu.device)
        for row, (_, name, pass_, _) in pairs:
            with recorded([row], gpu):
                bound.append((row, call_of(name, pass_, shape, inputs)))
    compile_together(call for _, call in bound)
    for row, call in bound:
        with recorded([row], gpu):
            gpu.milliseconds(call, 1, 0)
    gpu.release()  # ncu's process needs the memory


def counters_of(kernels: list[Metrics]) -> dict[str, float | None]:
    """Combine the metrics of the kernels of a call to its counters. None stands for a metric that ncu does not know."""
    times = [kernel.get(TIME) for kernel in kernels]
    known = {metric for metric in METRICS if kernels and all(metric in kernel for kernel in kernels)}
    found = dict.fromkeys(("waves", *PERCENT, *COUNTS))
    if TIME in known:
        weights = [ns / sum(times) for ns in times]
        for key, metric in PERCENT.items():
            if metric in known:
                found[key] = sum(w * kernel[metric] for w, kernel in zip(weights, kernels, strict=True))
        if WAVES in known:
            found["waves"] = max(kernels, key=lambda kernel: kernel[TIME])[WAVES]
    return found | {key: sum(k[metric] for k in kernels) for key, metric in COUNTS.items() if metric in known}


def counter_parts(rows: list[dict]) -> list[str]:
    """Return a table of counters for each pass and shape, or the reason why the counters are missing."""
    rows = [row for row in rows if row["measured"] == "counters" and "variant" in row]
    parts = []
    for (pass_, head_dim), group in itertools.groupby(rows, key=lambda row: (row["pass"], row["head_dim"])):
        lines = [[title_of(row["variant"]), *texts_of(row["counters"])] for row in group if row["counters"]]
        if lines:
            shape = f"{rows[0]['batch']} x {rows[0]['heads']} causal heads of {head_dim}, {rows[0]['seq_len']:,} tokens"
            parts += [f"## Counters of the {pass_} pass, {shape}", table([pass_, *HEADER], lines)]
    parts += [NOTE] if parts else []
    reasons = dict.fromkeys(row["not_measured"] for row in rows if row["not_measured"])
    return [*parts, *([f"The GPU's counters were not read: {', '.join(reasons)}."] if reasons else [])]


def texts_of(found: dict[str, float | None]) -> list[str]:
    """Return the cells of HEADER."""
    accesses = total(found, "shared_loads", "shared_stores")
    conflicts = total(found, "load_conflicts", "store_conflicts")
    efficiency = ratio(None if conflicts is None or accesses is None else 100 * (accesses - conflicts), accesses)
    return [
        text(found["achieved"], "{:.1f}%"),
        text(found["waves"], "{:.1f}"),
        *(text(found[key], "{:.1f}%") for key in ("tensor", "l1", "l2", "dram")),
        *(text(ratio(found[f"{x}_sectors"], found[f"{x}_requests"]), "{:.1f}") for x in ("load", "store")),
        *(text(ratio(found[f"{x}_conflicts"], 1e6), "{:,.2f}") for x in ("load", "store")),
        text(efficiency, "{:.1f}%"),
        *(text(found[f"{x}_stalls"], "{:.1f}%") for x in ("memory", "barrier")),
    ]


def total(found: dict[str, float | None], *keys: str) -> float | None:
    """Return the sum of some counters, or None if one is unknown."""
    return None if any(found[key] is None for key in keys) else sum(found[key] for key in keys)


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return part / whole, or None if one is unknown or the whole is 0."""
    return part / whole if part is not None and whole else None


def text(x: float | None, form: str) -> str:
    return "-" if x is None else form.format(x)
