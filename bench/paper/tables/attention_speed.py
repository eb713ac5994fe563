"""FlashAttention-2 (Dao, 2023), figures 4 to 7: attention alone, speed against sequence length."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from bench.attention.charts import PANELS, TITLES, figure_of
from bench.attention.contenders import installed_libraries
from bench.attention.measurement import measure_shape
from bench.attention.shapes import PASSES, paper_shapes
from bench.common.formatting import table, whole_speed
from bench.common.looks import looks_of
from bench.common.timing import Gpu
from bench.paper.attentions import attention_named
from bench.paper.settings import PaperSettings

TITLE = "FlashAttention-2's figures 4 to 7: attention alone"
VARIANTS = "naive", "pytorch", "fused_softmax", "flash1", "sdpa_flash", "triton", "flash2"
ON_GPUS = "sdpa_efficient", *(name for name in installed_libraries() if name != "fa2")  # sdpa_flash is fa2's kernel
# The names of the columns in the papers' figures.
STANDS_FOR = {
    "naive": "PyTorch, naive: kernels/naive/definition.py, not compiled, S and dP in fp32",
    "pytorch": "PyTorch, 16 bits: the papers' PyTorch",
    "sdpa_efficient": "SDPA memory-efficient: xformers' kernel in torch",
    "sdpa_flash": "SDPA FlashAttention-2: the authors' kernel in torch",
    "flash1": "flash1: FlashAttention",
    "triton": "flash2, plain Triton: FlashAttention Triton",
}
ROUNDS = {"full": 10, "smoke": 1}
OURS = "flash1", "flash2", "triton"


def cells(settings: PaperSettings) -> list[dict]:
    """Return the panels of a figure: a head size and a mask, at all lengths."""
    panels = itertools.product((64, 128), (False, True)) if settings.size == "full" else [(64, True)]
    return [{"head_dim": head_dim, "causal": causal} for head_dim, causal in panels]


def measure(cell: dict, gpu: Gpu, settings: PaperSettings) -> Iterator[dict]:
    """Yield a row for each length, attention and pass, measured in turn after a check against fp64."""
    shapes = paper_shapes(cell["head_dim"], cell["causal"])
    if settings.size == "smoke":
        shapes = [replace(shapes[0], batch=1, seq_len=32, heads=1, kv_heads=1)]
    names = [*VARIANTS, *ON_GPUS] if gpu.device == "cuda" else VARIANTS
    attentions = {name: attention_named(name) for name in names}
    for shape in shapes:
        yield from measure_shape(shape, attentions, gpu, ROUNDS[settings.size])


def speed_lines(rows: list[dict], variants: Iterable[str], passes: Sequence[str]) -> list[list[str]]:
    """Return lines of mask, head size, length, batch x heads, and each variant's TFLOP/s, pass / pass."""
    texts: dict[tuple, dict] = {}
    for row in rows:
        shape = row["head_dim"], row["causal"], row["seq_len"], row["batch"], row["heads"]
        speed = whole_speed(row, "tflops", row["variant"] in OURS)
        texts.setdefault(shape, {})[row["variant"], row["pass"]] = speed
    lines = []
    for (head_dim, causal, seq_len, batch, heads), of_shape in sorted(texts.items()):
        speeds = (" / ".join(of_shape.get((name, pass_), "-") for pass_ in passes) for name in variants)
        shape = "causal" if causal else "none", str(head_dim), f"{seq_len:,}", f"{batch} x {heads}"
        lines.append([*shape, *speeds])
    return lines


def markdown(rows: list[dict]) -> str:
    """Return TFLOP/s of forward / backward / both, a line for each shape."""
    timed = [row for row in rows if "seq_len" in row]
    variants = looks_of(row["variant"] for row in timed)
    header = ["mask", "head size", "sequence", "batch x heads", *(look.label for look in variants.values())]
    names = "; ".join(text for name, text in STANDS_FOR.items() if name in variants)
    return (
        f"{table(header, speed_lines(timed, variants, PASSES))}\n\nTFLOP/s of forward / backward / both in bf16 by the "
        "papers' count: 4 B H T^2 D forward, 2.5 times that backward, half if causal. "
        f"{names}. An attention without memory beside the others is timed alone."
    )


def pictures(rows: list[dict], device: str) -> dict[str, Figure]:
    """Draw the passes that were measured."""
    shown = [row for row in rows if "seq_len" in row and (row["head_dim"], row["causal"]) in PANELS]
    by_pass = {pass_: [row for row in shown if row["pass"] == pass_] for pass_ in TITLES}
    return {f"-{pass_}": figure_of(of, f"{TITLES[pass_]}, bf16, {device}") for pass_, of in by_pass.items() if of}
