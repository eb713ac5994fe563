"""Peak memory of attention against sequence length: linear in n, or quadratic."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from bench.attention.contenders import bind, draw_inputs
from bench.attention.rows import empty_row
from bench.attention.shapes import AttentionShape
from bench.common.formatting import length_text, rounded, table, value_text
from bench.common.timing import Gpu, recorded
from bench.paper.attentions import attention_named
from bench.paper.settings import PaperSettings

TITLE = "Peak memory of attention against sequence length"
VARIANTS = "naive", "fused_softmax", "sdpa_flash", "flash1", "flash2", "block_sparse", "local"
SIZES = {"full": (16, (512, 1024, 2048, 4096, 8192, 16384)), "smoke": (1, (32, 64))}  # heads, lengths
HEAD_DIM = 64


def cells(settings: PaperSettings) -> list[dict]:
    return [{"variant": name} for name in VARIANTS]


def measure(cell: dict, gpu: Gpu, settings: PaperSettings) -> Iterator[dict]:
    """Yield a row for each length: the peak memory of forward and backward beyond their inputs."""
    heads, lengths = SIZES[settings.size]
    attention = attention_named(cell["variant"])
    for length in lengths:
        shape = AttentionShape("memory", 1, length, heads, HEAD_DIM)
        row = empty_row(shape, cell["variant"], "both")
        with recorded([row], gpu):
            call = bind(cell["variant"], attention, shape, draw_inputs(shape, gpu.device)).call("both")
            row.update(peak_mib=gpu.added_peak(call) / 2**20, status="ok")
        yield row
        gpu.release()


def fit(lengths: list[int], sizes: list[float], power: int) -> tuple[float, float]:
    """Fit coefficient * n^power to sizes at lengths by least squares of the relative errors.

    Return the coefficient in bytes per token^power, and the largest relative error.
    """
    relative = np.array(lengths, float) ** power / np.array(sizes, float)
    coefficient = relative.sum() / (relative**2).sum()
    return float(coefficient), float(np.abs(coefficient * relative - 1).max())


def markdown(rows: list[dict]) -> str:
    lengths = sorted({row["seq_len"] for row in rows if "seq_len" in row})
    by_shape = {(row["variant"], row.get("seq_len")): row for row in rows}
    lines = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        sizes = [
            value_text(by_shape.get((name, length)), "peak_mib", partial(rounded, decimals=1)) for length in lengths
        ]
        fitted = ["-"] * 4
        measured = [row for row in rows if row["variant"] == name and row["status"] == "ok"]
        if len(measured) > 1:
            peaks = [row["seq_len"] for row in measured], [2**20 * row["peak_mib"] for row in measured]
            (linear, linear_error), (quadratic, quadratic_error) = fit(*peaks, power=1), fit(*peaks, power=2)
            fitted = [rounded(linear / 1024), f"{linear_error:.1%}", rounded(quadratic), f"{quadratic_error:.1%}"]
        lines.append([f"`{name}`", *sizes, *fitted])
    header = ["attention", *map(length_text, lengths), "a n: KiB/token", "error", "b n^2: byte/token^2", "error"]
    heads = next((f"{row['heads']} heads of {row['head_dim']}" for row in rows if "heads" in row), "")
    return (
        f"{table(header, lines)}\n\nPeak MiB of forward and backward of one causal sequence of {heads} in bf16, with "
        "the output and the gradients but without the inputs. Both fits minimise the squared relative errors; error is "
        "the largest."
    )
