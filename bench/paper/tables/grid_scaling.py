"""Time against length, heads and batch: the gain of a grid over query tiles.

flash1 launches one program per head and sequence, flash2 one per tile of queries. If batch x heads is smaller than the
number of multiprocessors, flash1 leaves some idle, and its time does not fall with the work. If both grids fill the
GPU, only the kernels differ.

The last axis adds 12 heads at a time without a mask, so that all programs do the same work. Time then rises in steps:
one for each wave, the programs that the GPU runs at once.
"""

from collections.abc import Iterator

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.attention.accuracy import check, truth_of
from bench.attention.contenders import bind, draw_inputs
from bench.attention.measurement import measure_shape
from bench.attention.rows import empty_row
from bench.attention.shapes import AttentionShape
from bench.common.drawing import SMALL, WIDTH, styled
from bench.common.formatting import length_text, table
from bench.common.looks import LOOKS
from bench.common.timing import Gpu, median_milliseconds
from bench.paper.attentions import attention_named
from bench.paper.settings import PaperSettings
from model.attention import Attention

TITLE = "Scaling with length, heads and batch: flash1's grid and flash2's"
VARIANTS = "flash1", "flash2"
AXES = {"seq_len": "sequence length", "heads": "heads", "batch": "batch"}
WAVES = "heads by 12"
HEAD_DIM = 64
# The fixed sizes, and the values of the size that grows.
SIZES = {
    "full": {
        "seq_len": ({"batch": 1, "heads": 16}, (512, 1024, 2048, 4096, 8192, 16384)),
        "heads": ({"batch": 1, "seq_len": 4096}, (1, 2, 4, 8, 16, 32, 64, 128, 256)),
        "batch": ({"heads": 12, "seq_len": 1024}, (1, 2, 4, 8, 16, 32, 64)),
    },
    "smoke": {
        "seq_len": ({"batch": 1, "heads": 1}, (32, 64)),
        "heads": ({"batch": 1, "seq_len": 32}, (1, 2)),
        "batch": ({"heads": 1, "seq_len": 32}, (1, 2)),
    },
}
STAIRCASE = {
    "full": ({"batch": 1, "seq_len": 512}, range(12, 529, 12)),
    "smoke": ({"batch": 1, "seq_len": 32}, range(1, 3)),
}
ROUNDS, FEW_ROUNDS = {"full": 10, "smoke": 1}, {"full": 3, "smoke": 1}


def cells(settings: PaperSettings) -> list[dict]:
    return [{"grows": axis} for axis in (*AXES, WAVES)]


def measure(cell: dict, gpu: Gpu, settings: PaperSettings) -> Iterator[dict]:
    """Yield a row for each value, attention and pass, measured in turn after a check against fp64."""
    attentions = {name: attention_named(name) for name in VARIANTS}
    if cell["grows"] == WAVES:
        yield from measure_waves(attentions, gpu, settings)
        return
    fixed, values = SIZES[settings.size][cell["grows"]]
    for value in values:
        shape = AttentionShape("scaling", **fixed, **{cell["grows"]: value}, head_dim=HEAD_DIM)
        yield from measure_shape(shape, attentions, gpu, ROUNDS[settings.size])


def measure_waves(attentions: dict[str, Attention], gpu: Gpu, settings: PaperSettings) -> Iterator[dict]:
    """Yield a row of the forward pass for each number of heads and attention, from few samples."""
    fixed, values = STAIRCASE[settings.size]
    multiprocessors = torch.cuda.get_device_properties().multi_processor_count if gpu.device == "cuda" else None
    for heads in values:
        shape = AttentionShape("scaling", **fixed, heads=heads, head_dim=HEAD_DIM, causal=False)
        inputs = draw_inputs(shape, gpu.device)
        truth = truth_of(shape, inputs)
        contenders = [bind(name, attend, shape, inputs) for name, attend in attentions.items()]
        for contender in contenders:
            check(contender, shape, truth)
        times = median_milliseconds([contender.forward for contender in contenders], gpu, FEW_ROUNDS[settings.size])
        for contender, ms in zip(contenders, times, strict=True):
            row = empty_row(shape, contender.variant, "forward") | {"ms": ms, "error": contender.error, "status": "ok"}
            yield row | {"tflops": shape.flops("forward") / ms / 1e9, "multiprocessors": multiprocessors}


def curve(rows: list[dict], axis: str, variant: str, pass_: str) -> dict[int, float]:
    """Return the milliseconds by the value of the size that grows."""
    kind = axis, variant, pass_
    chosen = (r for r in rows if r["status"] == "ok" and (r["grows"], r["variant"], r["pass"]) == kind)
    key = "heads" if axis == WAVES else axis
    return {row[key]: row["ms"] for row in sorted(chosen, key=lambda row: row[key])}


def slope(points: dict[int, float]) -> float:
    """Return the exponent p of the best fit x^p, by least squares of the logarithms."""
    return float(np.polyfit(np.log(list(points)), np.log(list(points.values())), 1)[0])


def slopes(points: dict[int, float]) -> tuple[str, str]:
    """Return the slope of all points and of the last two, or dashes for fewer than two points."""
    last = dict(list(points.items())[-2:])
    return (f"{slope(points):.2f}", f"{slope(last):.2f}") if len(points) > 1 else ("-", "-")


def markdown(rows: list[dict]) -> str:
    """Return the milliseconds of both attentions along each axis, and the slopes."""
    parts = []
    for axis, name in AXES.items():
        curves = {(v, p): curve(rows, axis, v, p) for p in ("forward", "backward") for v in VARIANTS}
        values = sorted({x for points in curves.values() for x in points})
        lines = [[f"{x:,}", *(f"{c[x]:.3f}" if x in c else "-" for c in curves.values())] for x in values]
        both = zip(*map(slopes, curves.values()), strict=True)
        lines += [[text, *found] for text, found in zip(("slope", "slope of the last two"), both, strict=True)]
        header = [name, *(f"`{v}` {p}" for v, p in curves)]
        about = f"Against {name}, with {fixed_text(rows, axis)} and heads of {HEAD_DIM}:"
        parts.append(f"{about}\n\n{table(header, lines)}")
    note = (
        "Milliseconds in bf16 with a causal mask. A slope is the exponent of the power that the milliseconds follow; "
        "the work alone grows with exponents 2, 1 and 1."
    )
    return "\n\n".join([*parts, note, *waves_markdown(rows)])


def waves_markdown(rows: list[dict]) -> list[str]:
    """Return the milliseconds of both attentions by heads in fine steps, or nothing without such rows."""
    curves = [curve(rows, WAVES, variant, "forward") for variant in VARIANTS]
    heads = sorted({x for points in curves for x in points})
    if not heads:
        return []
    lines = [[f"{x:,}", *(f"{points[x]:.4f}" if x in points else "-" for points in curves)] for x in heads]
    about = f"Forward against heads in steps of 12, no mask, with {fixed_text(rows, WAVES)}; milliseconds:"
    return [about, table(["heads", *(f"`{variant}`" for variant in VARIANTS)], lines, left=0)]


def fixed_text(rows: list[dict], axis: str) -> str:
    """Return the sizes that are fixed while `axis` grows."""
    row, grown = next((row for row in rows if row["grows"] == axis and "seq_len" in row), None), (axis, axis.split()[0])
    return ", ".join(f"{name} {row[key]:,}" for key, name in AXES.items() if key not in grown) if row else "-"


@styled
def pictures(rows: list[dict], device: str) -> dict[str, Figure]:
    """Draw milliseconds against each axis, both logarithmic: forward as lines, backward dashed."""
    waves = any(row["grows"] == WAVES and row["status"] == "ok" for row in rows)
    figure = Figure(figsize=(WIDTH, 8.8 if waves else 4.6), layout="constrained")
    places = [[*AXES], [WAVES] * len(AXES)] if waves else [[*AXES]]
    panels = figure.subplot_mosaic(places)
    for axis, name in AXES.items():
        draw_axis(panels[axis], rows, axis, name)
    panels["seq_len"].set_ylabel("ms")
    if waves:
        draw_waves(panels[WAVES], rows)
    lines = {line.get_label(): line for axes in figure.axes for line in axes.lines if line.get_label()[0] != "_"}
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=4)
    figure.suptitle(f"Time of flash1 and flash2, heads of {HEAD_DIM}, {device}")
    return {"": figure}


def draw_axis(axes: Axes, rows: list[dict], axis: str, name: str) -> None:
    """Draw the milliseconds of both attentions and passes while `axis` grows."""
    values = sorted({row[axis] for row in rows if row["grows"] == axis and axis in row})
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, map(length_text, values))
    axes.set_yscale("log")
    for variant in VARIANTS:
        for pass_, line in (("forward", "o-"), ("backward", "o--")):
            if points := curve(rows, axis, variant, pass_):
                look = {"color": LOOKS[variant].colour, "markersize": 5, "label": f"{variant} {pass_}"}
                axes.plot(list(points), list(points.values()), line, **look)
    axes.set_xlabel(name)
    axes.grid(axis="y")
    axes.set_title(fixed_text(rows, axis), fontsize=SMALL, fontweight="normal")


def draw_waves(axes: Axes, rows: list[dict]) -> None:
    """Draw the staircase of waves, with ticks at multiples of the number of multiprocessors."""
    for variant in VARIANTS:
        points = curve(rows, WAVES, variant, "forward")
        look = {"color": LOOKS[variant].colour, "markersize": 4, "label": f"{variant} forward"}
        axes.plot(list(points), list(points.values()), "o-", **look)
    most = max(row["heads"] for row in rows if row["grows"] == WAVES and row["status"] == "ok")
    if count := next((row["multiprocessors"] for row in rows if row.get("multiprocessors")), None):
        axes.set_xticks(range(0, most + 1, count))
        axes.grid(axis="x")
    axes.set_ylim(bottom=0)
    axes.set(xlabel="heads; a line for each multiple of the multiprocessors" if count else "heads", ylabel="ms")
    axes.set_title(f"Waves: no mask, {fixed_text(rows, WAVES)}", fontsize=SMALL, fontweight="normal")
