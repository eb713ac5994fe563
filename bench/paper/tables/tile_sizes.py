"""Time and resources of flash2's plain Triton forward kernel for each tile of B_r queries by B_c keys."""

import statistics
from collections.abc import Iterator
from functools import partial

from matplotlib.figure import Figure, SubFigure
from triton.runtime.errors import OutOfResources

from bench.attention.accuracy import Truth, judge, truth_of
from bench.attention.contenders import Inputs, draw_inputs
from bench.attention.shapes import AttentionShape
from bench.common.drawing import SMALL, WIDTH, styled
from bench.common.formatting import rounded, table
from bench.common.looks import LOOKS
from bench.common.timing import Gpu, recorded, sampler_of
from bench.paper.attentions import tiled
from bench.paper.byte_counts import share_of, tile_traffic
from bench.paper.hbm_counters import counted
from bench.paper.launches import launches
from bench.paper.occupancy import limiting
from bench.paper.settings import PaperSettings
from kernels.common.launching import arch_of
from kernels.flash2.tiles import TileConfig

TITLE = "The tile sizes of flash2's plain Triton forward kernel"
SIZES = {"full": (16, 32, 64, 128, 256), "smoke": (16, 32)}
SHAPES = {
    "full": AttentionShape("blocks", batch=4, seq_len=4096, heads=32, head_dim=64),
    "smoke": AttentionShape("blocks", batch=1, seq_len=32, heads=1, head_dim=16),
}
STAGES = 2
SAMPLES = {"full": 7, "smoke": 1}
COUNTERS = {
    "achieved": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "l1": "l1tex__t_bytes.sum",
    "l2": "lts__t_bytes.sum",
    "shared_loads": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared_stores": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
}


def cells(settings: PaperSettings) -> list[dict]:
    return [{"B_r": size} for size in SIZES[settings.size]]


def measure(cell: dict, gpu: Gpu, settings: PaperSettings) -> Iterator[dict]:
    """Yield a row for each B_c. Status oom: the tile needs more shared memory than a block can have."""
    shape = SHAPES[settings.size]
    data = draw_inputs(shape, gpu.device)
    truth = truth_of(shape, data)
    words = f"{shape.batch} x {shape.heads} heads of {shape.head_dim}, {shape.seq_len:,} tokens"
    rows, measured = [], []
    for size in SIZES[settings.size]:
        tile = TileConfig(cell["B_r"], size, warps=4 if cell["B_r"] <= 64 else 8, stages=STAGES)
        row = {"B_c": size, "warps": tile.warps, "stages": STAGES, "shape": words, "status": None, "message": None}
        with recorded([row], gpu):
            try:
                row |= measure_tile(tile, shape, data, truth, gpu, SAMPLES[settings.size])
                measured.append((row, tile))
            except OutOfResources as error:
                row.update(status="oom", message=str(error))
        rows.append(row)
    calls = [(shape, "triton", "forward", tile) for _, tile in measured]
    found, reason = counted(calls, list(COUNTERS.values()), settings.timeout_s // 2)
    for i, (row, _) in enumerate(measured):
        counters = {key: found[i][metric] for key, metric in COUNTERS.items()} if found else None
        row |= {"counters": counters, "not_measured": reason}
    yield from rows


def measure_tile(tile: TileConfig, shape: AttentionShape, data: Inputs, truth: Truth, gpu: Gpu, samples: int) -> dict:
    """Return time and resources of the kernel with this tile. Raise WrongResult if its error is too large."""
    call = partial(tiled(tile), *data[:3], causal=shape.causal, scale=shape.head_dim**-0.5)
    with launches() as launched:
        error = judge("flash2", {"out": call()}, shape, truth)
    sampler, _ = sampler_of(call, gpu)
    ms = statistics.median(sampler.sample(gpu) for _ in range(samples))
    row = {"ms": ms, "tflops": shape.flops("forward") / ms / 1e9, "error": error, "status": "ok"}
    row["computed"] = computed_bytes(tile, shape, arch_of(data.q.device))
    for launch in launched:  # one; none in Triton's interpreter
        found, held = launch.resources()
        row |= found | {"resident_blocks": held.programs, "limits": held.by_cause}
    return row


def computed_bytes(tile: TileConfig, shape: AttentionShape, arch: str) -> dict[str, int]:
    """Return tile_traffic of all heads. On sm_90, Triton multiplies with wgmma if four warps have 64 queries."""
    n, heads = shape.seq_len, shape.batch * shape.heads
    share = share_of("flash2", n, tile.queries, tile.keys) if shape.causal else 1.0
    wgmma = arch == "sm_90" and tile.queries >= 64
    return {key: heads * count for key, count in tile_traffic(n, shape.head_dim, tile, share, wgmma).items()}


def markdown(rows: list[dict]) -> str:
    """Return a line for each tile, the fastest in bold, and the throughput of the memories."""
    best = min((row["ms"] for row in rows if row["status"] == "ok"), default=None)
    lines = []
    ordered = sorted((row for row in rows if "B_c" in row), key=lambda row: (row["B_r"], row["B_c"]))
    for row in ordered:
        time = f"{row['ms']:.3f}" if row["status"] == "ok" else "does not fit" if row["status"] == "oom" else "FAILED"
        found = [str(row.get(key, "-")) for key in ("registers", "spills", "shared_bytes", "resident_blocks")]
        tflops = rounded(row["tflops"], 1) if row["status"] == "ok" else "-"
        marked = f"**{time}**" if row.get("ms") == best else time
        lines.append([str(row["B_r"]), str(row["B_c"]), str(row["warps"]), marked, tflops, *found, *limits_text(row)])
    header = ["B_r", "B_c", "warps", "ms", "TFLOP/s", "registers/thread", "spills", "shared bytes/block", "blocks/SM"]
    header += ["limits: registers, shared memory, warps", "limited by", "occupancy", "waves"]
    shape = next((f"{row['shape']}, " for row in rows if row.get("shape")), "")
    note = (
        f"The plain Triton kernel of kernels/flash2, forward, causal, {shape}bf16, {STAGES} stages of loads. A tile "
        "does not fit if it needs more shared memory than a block can have. Limits: the blocks that each resource "
        "allows on a multiprocessor (SM). Occupancy: theoretical, resident warps as a share of the most possible. "
        "Waves: how often the grid fills the GPU."
    )
    return "\n\n".join([table(header, lines, left=0), note, *throughput([row for row in ordered if "computed" in row])])


def limits_text(row: dict) -> list[str]:
    """Return the limits by cause, the lowest of them, the theoretical occupancy and the waves, or dashes."""
    if "limits" not in row:
        return ["-"] * 4
    by_cause = ", ".join(str(row["limits"][cause]) for cause in ("registers", "shared memory", "warps"))
    return [by_cause, limiting(row["limits"]), f"{row['occupancy']:.1%}", f"{row['waves']:.1f}"]


def throughput(rows: list[dict]) -> list[str]:
    """Return a table of GB/s of caches and shared memory: by counters, or else computed; nothing without rows."""
    if not rows:
        return []
    counters = all(row["counters"] for row in rows)
    lines = []
    for row in rows:
        moved = by_counters(row["counters"]) if counters else by_formula(row["computed"])
        achieved = f"{row['counters']['achieved']:.1f}%" if counters else "-"
        speeds = [rounded(count / row["ms"] / 1e6, 0) for count in moved]
        lines.append([str(row["B_r"]), str(row["B_c"]), achieved, *speeds])
    source = "" if counters else " (computed)"
    names = "L1", "L2", "shared memory, loads", "shared memory, stores"
    header = ["B_r", "B_c", "achieved occupancy", *(f"{name}, GB/s{source}" for name in names)]
    reasons = ", ".join(dict.fromkeys(row["not_measured"] for row in rows if row["not_measured"]))
    how = (
        "By the GPU's counters. L1 leaves out what TMA copies: the loads of Q, K and V on Hopper. Shared memory counts "
        "128 bytes for each access of a warp by load and store instructions, which leaves out what wgmma and TMA move."
        if counters
        else f"Computed from the bytes that the algorithm moves (tile_traffic in bench/paper/byte_counts.py) and the "
        f"measured time. The counters were not read: {reasons}."
    )
    return [table(header, lines, left=0), how]


def by_counters(found: dict[str, float]) -> list[float]:
    return [found["l1"], found["l2"], 128 * found["shared_loads"], 128 * found["shared_stores"]]


def by_formula(found: dict[str, int]) -> list[int]:
    return [found["cached"], found["cached"], found["shared_loaded"], found["shared_stored"]]


@styled
def pictures(rows: list[dict], device: str) -> dict[str, Figure]:
    """Draw the heatmap of times, each tile with its resources, and the times along both sizes of the fastest tile."""
    of_tile = {(row["B_r"], row["B_c"]): row for row in rows if "B_c" in row}
    heights, widths = (sorted({tile[i] for tile in of_tile}) for i in (0, 1))
    figure = Figure(figsize=(WIDTH, 1.2 * len(heights) + 4.6), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1.2 * len(heights) + 1.4, 3.2))
    draw_heatmap(above, of_tile, heights, widths, device)
    done = {tile: row["ms"] for tile, row in of_tile.items() if row["status"] == "ok"}
    if done:
        best = min(done, key=done.get)
        for axes, i, size, other in zip(below.subplots(1, 2), (0, 1), ("B_r", "B_c"), ("B_c", "B_r"), strict=True):
            points = {tile[i]: ms for tile, ms in sorted(done.items()) if tile[1 - i] == best[1 - i]}
            axes.plot(list(points), list(points.values()), "o-", color=LOOKS["triton"].colour)
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(points), map(str, points))
            axes.set_ylim(bottom=0)
            axes.set(xlabel=f"{size}, with {other} = {best[1 - i]}", ylabel="ms")
            axes.grid(axis="y")
    return {"": figure}


def draw_heatmap(figure: SubFigure, of_tile: dict, heights: list[int], widths: list[int], device: str) -> None:
    times = [[of_tile.get((m, n), {}).get("ms") or float("nan") for n in widths] for m in heights]
    axes = figure.subplots()
    if of_tile:
        image = axes.imshow(times, cmap="viridis_r", norm="log", aspect="auto")
        bar = figure.colorbar(image, label="ms", format="{x:g}")
        bar.ax.yaxis.set_minor_formatter("{x:g}")
        bar.ax.tick_params(which="both", labelsize=SMALL)
    for i, m in enumerate(heights):
        for j, n in enumerate(widths):
            box = {"fc": "white", "ec": "none", "alpha": 0.8, "pad": 3}
            axes.text(j, i, tile_text(of_tile.get((m, n))), ha="center", va="center", fontsize=SMALL, bbox=box)
    axes.set_xticks(range(len(widths)), widths)
    axes.set_yticks(range(len(heights)), heights)
    axes.set(xlabel="B_c, keys of a tile", ylabel="B_r, queries of a tile", title=f"flash2, plain Triton, {device}")


def tile_text(row: dict | None) -> str:
    if row is None or row["status"] != "ok":
        return "" if row is None else {"oom": "does not fit"}.get(row["status"], row["status"])
    lines = [f"{row['ms']:.3f} ms"]
    if "registers" in row:
        lines += [f"{row['registers']} registers", f"{row['spills']} spills"]
        lines.append(f"{row['shared_bytes'] / 1024:.0f} KiB, {row['resident_blocks']} per SM")
    return "\n".join(lines)
