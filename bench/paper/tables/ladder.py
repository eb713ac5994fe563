"""The steps of kernels/ladder: time, speed and resources of each step, beside this project's and other kernels.

All steps of a pass are compared with fp64 and then timed in turn. Steps slower than SLOW_MS are timed in turn with each
other, with fewer samples. Where ncu may read the GPU's counters, it then profiles each step. Last, a GPT-2 trains with
the backward pass of each step.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType

import torch
from matplotlib.figure import Figure
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction

from bench.attention.accuracy import NAMES, Truth, judge, truth_of
from bench.attention.contenders import draw_inputs, installed_libraries
from bench.attention.measurement import Series, alternate
from bench.attention.rows import empty_row
from bench.attention.shapes import DTYPES, AttentionShape
from bench.common.drawing import SMALL, WIDTH, styled
from bench.common.formatting import at_least, cost_text, rounded, speed_text, table, value_text, whole_speed
from bench.common.looks import LOOKS
from bench.common.timing import LEAST_SPIN_MS, Gpu, Sampler, recorded, sampler_of
from bench.paper.ladder_counters import counter_parts, measure_counters
from bench.paper.ladder_steps import STEPS, call_of, step_named, title_of
from bench.paper.launches import compile_together, launches
from bench.paper.settings import PaperSettings
from bench.training import steps as training
from bench.training.trainers import Trainer, TrainingCell, ours
from kernels import ladder
from trainer.flops import peak_flops

TITLE = "A ladder of attention kernels, from standard attention to specialised warps"
RESULTS = {"forward": NAMES[:1], "backward": NAMES[1:]}
PANELS = [(64, True), (128, True), (64, False), (128, False)]  # head size, causal
SIZES = {
    "full": {"batch": 4, "seq_len": 4096, "heads": 32},
    # Triton's interpreter multiplies matrices in fp16, but not in bf16.
    "smoke": {"batch": 1, "seq_len": 128, "heads": 1, "dtype": "float16"},
}
RIVALS = "triton", "flash2", "sdpa_flash"
ON_GPUS = "sdpa_cudnn", *(["fa3"] if "fa3" in installed_libraries() else [])
THEIRS = "sdpa_flash", "sdpa_cudnn", "fa3"
ROUNDS = {"full": 9, "smoke": 1}
SLOW_MS, SLOW_ROUNDS = 40, 2
TRAINED = {"full": ("gpt2", 1024, 128), "smoke": ("gpt2-nano", 16, 2)}  # micro-batch: 32 would measure Python
FUNCTIONS = "split", "atomics", "tma_adds", "specialised_warps"  # of kernels/ladder/training.py, in order of BACKWARD
TRAINING_ROUNDS = {"full": 3, "smoke": 1}
TRAINING = {"measured": "training"}
COUNTED_BATCH = {"full": 2, "smoke": 1}  # ncu repeats each kernel; K and V of a batch of 1 would fit into L2
TOO_SLOW = "Triton's interpreter takes minutes for a training step"


def cells(settings: PaperSettings) -> list[dict]:
    """Return the passes, then their counters, then the training steps: first what matters most if time is short."""
    return [*({"measured": what, "pass": pass_} for what in ("kernel", "counters") for pass_ in STEPS), TRAINING]


def measure(cell: dict, gpu: Gpu, settings: PaperSettings) -> Iterator[dict]:
    """Yield a row for each step and each other kernel. Status unsupported: the step does not run without a GPU."""
    panels = PANELS if settings.size == "full" else PANELS[:1]
    if cell == TRAINING:
        yield from measure_training(gpu, settings)
    elif cell["measured"] == "counters":
        sizes = SIZES[settings.size] | {"batch": COUNTED_BATCH[settings.size]}
        shapes = [AttentionShape("ladder", **sizes, head_dim=head_dim) for head_dim, causal in panels if causal]
        yield from measure_counters(cell["pass"], shapes, gpu, settings.timeout_s // 2)
    else:
        shapes = [AttentionShape("ladder", **SIZES[settings.size], head_dim=d, causal=causal) for d, causal in panels]
        bound = [(shape, *bind_all(shape, cell["pass"], gpu)) for shape in shapes]
        if gpu.device == "cuda":  # the kernels of all panels together, because one panel does not use all CPU cores
            compile_together(call for *_, calls in bound for name, call in calls.items() if name not in THEIRS)
        for panel in bound:
            yield from timed(*panel, gpu, ROUNDS[settings.size])


def bind_all(shape: AttentionShape, pass_: str, gpu: Gpu) -> tuple[Truth, dict[str, dict], dict[str, Callable]]:
    """Return the truth, and a row and a call for each step and each other kernel. A row with a status has no call."""
    inputs, rows, calls = draw_inputs(shape, gpu.device), {}, {}
    for name in (*STEPS[pass_], *RIVALS, *(ON_GPUS if gpu.device == "cuda" else ())):
        rows[name] = row = empty_row(shape, name, pass_)
        with recorded([row], gpu):
            if name in STEPS[pass_] and gpu.device == "cpu" and (missing := missing_in_interpreter(step_named(name))):
                row.update(status="unsupported", message=f"Triton's interpreter has no {missing}")
            else:
                calls[name] = call_of(name, pass_, shape, inputs)
    return truth_of(shape, inputs), rows, calls


def timed(
    shape: AttentionShape, truth: Truth, rows: dict[str, dict], calls: dict[str, Callable], gpu: Gpu, rounds: int
) -> Iterator[dict]:
    """Check each call, time all of them in turn, and yield the rows."""
    series = {False: [], True: []}  # by whether a call is slow
    for name, call in calls.items():
        with recorded([rows[name]], gpu):
            rows[name]["kernels"] = checked(rows[name], call, shape, truth)
            is_slow = gpu.milliseconds(call, 1, LEAST_SPIN_MS) > SLOW_MS
            sampler = Sampler(call, 1, LEAST_SPIN_MS) if is_slow else sampler_of(call, gpu)[0]
            series[is_slow].append(Series(rows[name], sampler))
    alternate(series[False], shape, gpu, rounds)
    alternate(series[True], shape, gpu, SLOW_ROUNDS)
    peak = peak_flops(torch.cuda.get_device_name(), DTYPES[shape.dtype]) if gpu.device == "cuda" else None
    for row in rows.values():
        row["peak_share"] = 1e12 * row["tflops"] / peak if peak and row["tflops"] else None
        yield row


def missing_in_interpreter(step: ModuleType) -> str | None:
    """Return what a step uses that Triton's interpreter does not have, or None."""
    if any(isinstance(x, GluonJITFunction) for x in vars(step).values()):
        return "Gluon"
    return "reduction by TMA" if "TensorDescriptor" in vars(step) else None


def checked(row: dict, call: Callable[[], object], shape: AttentionShape, truth: Truth) -> list[dict]:
    """Run a pass, store its error in the row, and return the resources of the Triton kernels that it launched."""
    with launches() as launched, nan_in_new_memory(row["variant"] in ladder.FORWARD + ladder.BACKWARD):
        found = call()
    results = (found,) if isinstance(found, Tensor) else found
    row["error"] = judge(row["variant"], dict(zip(RESULTS[row["pass"]], results, strict=True)), shape, truth)
    kernels = []
    for launch in launched:  # none in Triton's interpreter
        found, held = launch.resources()
        named = {"kernel": launch.name, "warps": launch.compiled.metadata.num_warps}
        kernels.append(named | found | {"resident": held.programs, "limit": held.cause})
    return kernels


@contextmanager
def nan_in_new_memory(wanted: bool) -> Iterator[None]:
    """Make torch.empty return NaN, so that elements that a kernel does not write are seen.

    Otherwise the memory can hold the correct result of the step before.
    """
    torch.use_deterministic_algorithms(wanted, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def measure_training(gpu: Gpu, settings: PaperSettings) -> Iterator[dict]:
    """Yield tokens/s of a model that trains with flash2, and with flash2's forward and each step's backward pass."""
    torch.backends.cuda.matmul.allow_tf32 = True  # as nanoGPT sets it
    model, context_length, batch = TRAINED[settings.size]
    cell, rows, finalists = TrainingCell(model, context_length, (batch,)), [], []
    functions = [f"custom:kernels.ladder.training:{function}" for function in FUNCTIONS]
    for name, attention in [("flash2", "flash2"), *zip(ladder.BACKWARD, functions, strict=True)]:
        trainer = Trainer("ours", attention, compiled=False)  # torch.compile would take half of the table's time
        if name != "flash2" and gpu.device == "cpu":
            row = training.empty_row(cell, trainer, batch) | {"status": "unsupported", "message": TOO_SLOW}
        else:
            (row,), best = training.search(cell, trainer, partial(ours, cell, trainer, gpu.device), gpu)
            finalists += [best] if best else []
        row["variant"] = name
        rows.append(row)
    training.alternate(cell, finalists, TRAINING_ROUNDS[settings.size], gpu)
    yield from rows


def panels_of(rows: list[dict], pass_: str) -> dict[tuple[int, bool], dict[str, dict]]:
    """Return the rows of a pass by head size and mask, then by variant: the steps first and in order."""
    rows = [row for row in rows if row["measured"] == "kernel" and row["pass"] == pass_ and "variant" in row]
    panels = {}
    for panel in PANELS:
        found = {row["variant"]: row for row in rows if (row["head_dim"], row["causal"]) == panel}
        order = dict.fromkeys([*STEPS[pass_], *RIVALS, *ON_GPUS, *found])
        if found:
            panels[panel] = {name: found[name] for name in order if name in found}
    return panels


def gains(of_variant: dict[str, dict], pass_: str) -> dict[str, float]:
    """Return how many times faster each step is than the step before it, if both were measured."""
    times = [(name, of_variant.get(name, {}).get("ms")) for name in STEPS[pass_]]
    return {name: before / ms for (_, before), (name, ms) in itertools.pairwise(times) if before and ms}


def overview(rows: list[dict]) -> str:
    """Return a table for each pass with TFLOP/s of each head size and mask, and a table of the training steps."""
    parts = []
    for pass_ in STEPS:
        panels = panels_of(rows, pass_)
        if not panels:
            continue
        gain, lines = gains(next(iter(panels.values())), pass_), []
        for name in dict.fromkeys(name for found in panels.values() for name in found):
            speeds = [whole_speed(found.get(name), "tflops", name not in THEIRS) for found in panels.values()]
            lines.append([title_of(name), *speeds, at_least(gain[name]) if name in gain else "-"])
        header = [f"{pass_}, TFLOP/s", *(f"{size} {mask_text(causal)}" for size, causal in panels), "x step before"]
        parts.append(table(header, lines))
    return "\n\n".join([*parts, *training_parts(rows)])


def training_parts(rows: list[dict]) -> list[str]:
    """Return the table of training steps, if it was measured."""
    trained = [row for row in rows if row["measured"] == "training" and "variant" in row]
    if not trained:
        return []
    keys = {"tokens_per_second": partial(speed_text, ours=True, decimals=0)}
    keys["peak_gib"] = partial(cost_text, ours=True, decimals=1)
    lines = [[title_of(r["variant"]), *(value_text(r, key, text) for key, text in keys.items())] for r in trained]
    model, context = trained[0]["model"], trained[0]["context_length"]
    about = f"train.py trains `{model}` at {context:,} tokens with `train.compile=false`, flash2's forward pass and"
    return [f"{about} the backward pass of a step:", table(["backward pass", "tokens/s", "peak GiB"], lines)]


def mask_text(causal: bool) -> str:
    return "causal" if causal else "full"


def resources_text(row: dict) -> list[str]:
    """Return registers, spills, KiB of shared memory, warps, resident programs with their limit, occupancy and waves.

    Numbers of several kernels are joined in the order of their launches.
    """
    kernels = row.get("kernels") or []
    texts = [
        (
            str(x["registers"]),
            str(x["spills"]),
            f"{x['shared_bytes'] / 1024:.1f}",
            str(x["warps"]),
            f"{x['resident']} ({x['limit']})",
            f"{x['occupancy']:.0%}",
            f"{x['waves']:.1f}",
        )
        for x in kernels
    ]
    return [" / ".join(column) for column in zip(*texts, strict=True)] if texts else ["-"] * 7


def markdown(rows: list[dict]) -> str:
    """Return the overview, and a table with times and resources for each pass, head size and mask."""
    parts = [overview(rows)]
    header = ["ms", "TFLOP/s", "x step before", "of peak", "registers", "spills", "shared KiB", "warps"]
    header += ["programs/SM (limit)", "occupancy", "waves"]
    for pass_ in STEPS:
        for (head_dim, causal), found in panels_of(rows, pass_).items():
            gain, lines = gains(found, pass_), []
            for name, row in found.items():
                ms = value_text(row, "ms", partial(cost_text, ours=name not in THEIRS, decimals=3))
                speed = value_text(row, "tflops", partial(speed_text, ours=name not in THEIRS, decimals=1))
                share = f"{row['peak_share']:.1%}" if row.get("peak_share") else "-"
                ratio = at_least(gain[name]) if name in gain else "-"
                lines.append([title_of(name), ms, speed, ratio, share, *resources_text(row)])
            parts.append(f"## {pass_.capitalize()}, heads of {head_dim}, {mask_text(causal)}")
            parts.append(table([pass_, *header], lines))
    shape = next(
        (
            f"{r['batch']} x {r['heads']} heads, {r['seq_len']:,} tokens"
            for r in rows
            if r["measured"] == "kernel" and "seq_len" in r
        ),
        "-",
    )
    notes = [
        f"{shape}, bf16. TFLOP/s by the papers' count: 4 B H T^2 D forward, 2.5 times that backward, half if causal.",
        "Peak: dense bf16 on the tensor cores. Registers of a thread at launch; spills as the driver reports them.",
        "Occupancy is the theoretical one. Waves: programs of the grid over the programs that are resident at once.",
        f"A pass slower than {SLOW_MS} ms has {SLOW_ROUNDS} samples.",
    ]
    unsupported = dict.fromkeys(row["message"] for row in rows if row["status"] == "unsupported")
    notes += [f"Unsupported: {reason}, so the step needs a GPU." for reason in unsupported]
    return "\n\n".join([*parts, " ".join(notes), *counter_parts(rows)])


@styled
def pictures(rows: list[dict], device: str) -> dict[str, Figure]:
    """Draw TFLOP/s of each step as bars, and the other kernels as lines, for each pass."""
    figures = {}
    for pass_ in STEPS:
        panels = panels_of(rows, pass_)
        if not panels:
            continue
        down, across = -(-len(panels) // 2), min(len(panels), 2)
        figure = Figure(figsize=(WIDTH, 1.6 + 3.2 * down), layout="constrained")
        places = figure.subplots(down, across, squeeze=False).flat
        for axes, ((head_dim, causal), found) in zip(places, panels.items(), strict=True):
            draw_panel(axes, found, pass_)
            axes.set_title(f"head size {head_dim}, {mask_text(causal)}", loc="left")
        lines = {line.get_label(): line for axes in figure.axes for line in axes.lines}
        figure.legend(lines.values(), lines, loc="outside lower center", ncols=3, fontsize=SMALL)
        figure.suptitle(f"{pass_.capitalize()} pass of each step, bf16, {device}")
        figures[f"-{pass_}"] = figure
    return figures


def draw_panel(axes, found: dict[str, dict], pass_: str) -> None:
    """Draw the speeds of one head size and mask on a logarithmic axis."""
    steps = [name for name in found if name in STEPS[pass_]]
    bars = axes.bar(range(len(steps)), [found[name]["tflops"] or 0 for name in steps], color="#d62728", alpha=0.75)
    axes.bar_label(bars, [rounded(found[x]["tflops"], 0) if found[x]["tflops"] else "" for x in steps], fontsize=SMALL)
    for name in (name for name in found if name in LOOKS and found[name]["tflops"]):
        axes.axhline(found[name]["tflops"], color=LOOKS[name].colour, label=LOOKS[name].label, lw=1.5)
    axes.set_yscale("log")
    axes.set_xticks(range(len(steps)), [title_of(name)[:2] for name in steps])
    axes.set(xlabel="step", ylabel="TFLOP/s")
    axes.margins(y=0.15)
    axes.grid(axis="y")
