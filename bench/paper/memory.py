"""Peak memory of attention against sequence length: what grows as n, and what as n^2."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from bench.attention.charts import LOOKS
from bench.attention.contenders import bind, draw
from bench.attention.rows import empty_row
from bench.attention.shapes import Cell
from bench.common.timing import Gpu, recorded
from bench.paper.config import PaperConfig
from bench.paper.text import label_lengths, length_text, table
from bench.paper.variants import attend

TITLE = "Peak memory of attention against sequence length"
VARIANTS = "naive", "fused_softmax", "sdpa_flash", "flash1", "flash2", "block_sparse", "local"
SIZES = {"full": (16, (512, 1024, 2048, 4096, 8192, 16384)), "smoke": (2, (32, 64, 128))}  # heads, lengths
HEAD_DIM = 64


def cells(config: PaperConfig) -> list[dict]:
    """An attention at all lengths."""
    return [{"variant": name} for name in VARIANTS]


def measure(cell: dict, gpu: Gpu, config: PaperConfig) -> Iterator[dict]:
    """A row for each length: the most that forward and backward hold beyond their inputs."""
    heads, lengths = SIZES[config.size]
    attention = attend(cell["variant"], config)
    for length in lengths:
        shape = Cell("memory", 1, length, heads, HEAD_DIM)
        row = empty_row(shape, cell["variant"], "both")
        with recorded([row], gpu):
            call = bind(cell["variant"], attention, shape, draw(shape, gpu.device)).call("both")
            call()  # what is made once, such as workspaces, is there
            gpu.wake()  # autograd's thread takes this up once it has let go of that call's gradients
            gpu.release()  # and what only the garbage collector frees, as after compiling
            before = gpu.allocated()
            row.update(peak_mib=(gpu.peak(call) - before) / 2**20, status="ok")
        yield row
        gpu.release()


class Fit(NamedTuple):
    """coefficient n^power, in bytes of n tokens, and by how much of what was measured it is off at most."""

    coefficient: float
    off: float


def fit(lengths: list[int], sizes: list[float], power: int) -> Fit:
    """The coefficient that is nearest to `sizes` at `lengths`, by least squares of the relative errors."""
    relative = np.array(lengths, float) ** power / np.array(sizes, float)
    coefficient = relative.sum() / (relative**2).sum()
    return Fit(float(coefficient), float(np.abs(coefficient * relative - 1).max()))


def fits(rows: list[dict], variant: str) -> tuple[Fit, Fit] | None:
    """The linear one and the quadratic; None of fewer than two lengths."""
    measured = points(rows, variant)
    lengths, sizes = [n for n, _ in measured], [2**20 * mib for _, mib in measured]
    return (fit(lengths, sizes, 1), fit(lengths, sizes, 2)) if len(measured) > 1 else None


def points(rows: list[dict], variant: str) -> list[tuple[int, float]]:
    """(length, MiB) of what was measured."""
    return sorted((r["seq_len"], r["peak_mib"]) for r in rows if r["variant"] == variant and r["status"] == "ok")


def markdown(rows: list[dict]) -> str:
    """MiB at every length, and the fits."""
    lengths = sorted({row["seq_len"] for row in rows if "seq_len" in row})
    by_shape = {(row["variant"], row.get("seq_len")): row for row in rows}
    lines = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        of_lengths = (by_shape.get((name, length)) for length in lengths)
        sizes = [
            r["status"].upper() if r and r["status"] != "ok" else f"{r['peak_mib']:,.1f}" if r else "-"
            for r in of_lengths
        ]
        lines.append([f"`{name}`", *sizes, *fit_columns(fits(rows, name))])
    header = ["attention", *map(length_text, lengths), "a n: KiB/token", "off", "b n^2: byte/token^2", "off"]
    heads = next((f"{row['heads']} heads of {row['head_dim']}" for row in rows if "heads" in row), "")
    return (
        f"{table(header, lines)}\n\nMiB that forward and backward of one causal sequence of {heads} in bf16 hold at "
        "most, output and gradients included, inputs not. A line a n and a parabola b n^2 are fitted to them, each by "
        "least squares of the relative errors, and are off by so much at most. `block_sparse` also holds sums in fp32 "
        "of blocks of keys that many queries see, the longer the more of them."
    )


def fit_columns(found: tuple[Fit, Fit] | None) -> list[str]:
    """Both coefficients, and how far off each is."""
    if found is None:
        return ["-"] * 4
    linear, quadratic = found
    texts = f"{linear.coefficient / 1024:.2f}", f"{quadratic.coefficient:.2f}"
    return [texts[0], f"{linear.off:.1%}", texts[1], f"{quadratic.off:.1%}"]


def pictures(rows: list[dict], where: str) -> dict[str, Figure]:
    """What was measured as dots, the nearer of the fits as lines."""
    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set_yscale("log", base=2)
    for i, name in enumerate(dict.fromkeys(row["variant"] for row in rows)):
        colour = LOOKS[name][1]
        if measured := points(rows, name):
            axes.plot(*zip(*measured, strict=True), "o", color=colour, label=name, markersize=11 - i)  # may coincide
        if found := fits(rows, name):
            power = min((1, 2), key=lambda power: found[power - 1].off)
            n = np.geomspace(measured[0][0], measured[-1][0], 100)
            axes.plot(n, found[power - 1].coefficient * n**power / 2**20, "-", color=colour, lw=1)
    label_lengths(axes, rows)
    axes.set(xlabel="sequence length", ylabel="MiB beyond the inputs", title=f"Forward and backward, {where}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return {"": figure}
