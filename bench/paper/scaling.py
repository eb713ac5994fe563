"""What parallelising over query tiles buys: time against length, heads and batch.

flash1 has a program for each head of each sequence, and flash2 one for each tile of queries of those. Where batch x
heads are fewer than a GPU's multiprocessors, flash1 leaves some idle, and its time does not fall with the work. How far
apart they are where both fill the GPU is what their kernels differ by, not their grids.
"""

from collections.abc import Iterator

import numpy as np
from matplotlib.figure import Figure

from bench.attention.charts import LOOKS
from bench.attention.program import measure as measure_attention
from bench.attention.shapes import Cell
from bench.common.timing import Gpu
from bench.paper.config import PaperConfig
from bench.paper.text import label_lengths, table, told_alone
from bench.paper.variants import attend

TITLE = "Scaling with length, heads and batch: flash1's grid and flash2's"
VARIANTS = "flash1", "flash2"
AXES = {"seq_len": "sequence length", "heads": "heads", "batch": "batch"}
HEAD_DIM = 64
# What stays, and the values of what grows.
SIZES = {
    "full": {
        "seq_len": ({"batch": 1, "heads": 16}, (512, 1024, 2048, 4096, 8192, 16384)),
        "heads": ({"batch": 1, "seq_len": 4096}, (1, 2, 4, 8, 16, 32, 64, 128, 256)),
        "batch": ({"heads": 12, "seq_len": 1024}, (1, 2, 4, 8, 16, 32, 64)),
    },
    "smoke": {
        "seq_len": ({"batch": 1, "heads": 1}, (32, 64, 128)),
        "heads": ({"batch": 1, "seq_len": 32}, (1, 2)),
        "batch": ({"heads": 1, "seq_len": 32}, (1, 2)),
    },
}
ROUNDS = {"full": 10, "smoke": 1}


def cells(config: PaperConfig) -> list[dict]:
    """A panel: what grows."""
    return [{"grows": axis} for axis in AXES]


def measure(cell: dict, gpu: Gpu, config: PaperConfig) -> Iterator[dict]:
    """A row for each value, attention and pass: both in turn, after a check against fp64."""
    fixed, values = SIZES[config.size][cell["grows"]]
    variants = {name: attend(name, config) for name in VARIANTS}
    for value in values:
        shape = Cell("scaling", **fixed, **{cell["grows"]: value}, head_dim=HEAD_DIM)
        yield from measure_attention(shape, variants, gpu, ROUNDS[config.size])


def curve(rows: list[dict], axis: str, variant: str, pass_: str) -> dict[int, float]:
    """Milliseconds by what grows."""
    kind = axis, variant, pass_
    chosen = (r for r in rows if r["status"] == "ok" and (r["grows"], r["variant"], r["pass"]) == kind)
    return {row[axis]: row["ms"] for row in sorted(chosen, key=lambda row: row[axis])}


def slope(points: dict[int, float]) -> float:
    """The exponent p of the x^p that is nearest to the points, by least squares of the logarithms."""
    return float(np.polyfit(np.log(list(points)), np.log(list(points.values())), 1)[0])


def slopes(points: dict[int, float]) -> tuple[str, str]:
    """The slope of all points and that of the last two; dashes for fewer."""
    last = dict(list(points.items())[-2:])
    return (f"{slope(points):.2f}", f"{slope(last):.2f}") if len(points) > 1 else ("-", "-")


def markdown(rows: list[dict]) -> str:
    """Forward milliseconds of both along each axis, and the slopes."""
    parts = []
    for axis, name in AXES.items():
        curves = {(v, p): curve(rows, axis, v, p) for p in ("forward", "backward") for v in VARIANTS}
        values = sorted({x for points in curves.values() for x in points})
        lines = [[f"{x:,}", *(f"{c[x]:.3f}" if x in c else "-" for c in curves.values())] for x in values]
        both = zip(*map(slopes, curves.values()), strict=True)
        lines += [[text, *found] for text, found in zip(("slope", "slope of the last two"), both, strict=True)]
        header = [name, *(f"`{v}` {p}" for v, p in curves)]
        about = f"Against {AXES[axis]}, with {fixed_text(rows, axis)} and heads of {HEAD_DIM}:"
        parts.append(f"{about}\n\n{table(header, lines)}")
    note = (
        "Milliseconds in bf16 with a causal mask, each first held to the fp64 reference. A slope is the exponent of "
        "the power of length, heads or batch that the milliseconds follow, by least squares of the logarithms: work "
        "alone would make it 2, 1 and 1. Against heads and batch it is less where there are fewer programs than the "
        "GPU runs at a time, and so of all than of the last two. `flash1` runs batch x heads programs, `flash2` as "
        "many a tile of queries: at many heads or sequences both fill the GPU, and what is left between them is the "
        f"kernels' own.{told_alone(rows)}"
    )
    return "\n\n".join([*parts, note])


def fixed_text(rows: list[dict], axis: str) -> str:
    """What stays while `axis` grows."""
    row = next((row for row in rows if row["grows"] == axis and "seq_len" in row), None)
    return ", ".join(f"{name} {row[key]:,}" for key, name in AXES.items() if key != axis) if row else "-"


def pictures(rows: list[dict], where: str) -> dict[str, Figure]:
    """Milliseconds against each axis, both logarithmic; forward as lines, backward dashed."""
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    for axes, (axis, name) in zip(figure.subplots(1, len(AXES)), AXES.items(), strict=True):
        label_lengths(axes, [row for row in rows if row["grows"] == axis], axis)
        axes.set_yscale("log")
        for variant in VARIANTS:
            for pass_, line in (("forward", "o-"), ("backward", "o--")):
                if points := curve(rows, axis, variant, pass_):
                    exponent = ", slope {}, at the end {}".format(*slopes(points)) if len(points) > 1 else ""
                    look = {"color": LOOKS[variant][1], "markersize": 4, "label": f"{variant} {pass_}{exponent}"}
                    axes.plot(list(points), list(points.values()), line, **look)
        axes.set(xlabel=name, ylabel="ms")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(fixed_text(rows, axis), fontsize="medium")
        if axes.lines:
            axes.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16))
    figure.suptitle(f"{where}, heads of {HEAD_DIM}")
    return {"": figure}
