"""FlashAttention-2 (Dao, 2023), figures 4 to 7: attention alone, speed against sequence length."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from matplotlib.figure import Figure

from bench.attention.charts import LOOKS, PANELS, TITLES, figure_of
from bench.attention.program import measure as measure_attention
from bench.attention.shapes import PASSES, paper_cells
from bench.common.timing import Gpu
from bench.paper.config import PaperConfig
from bench.paper.text import table, told_alone, whole_speed
from bench.paper.variants import attend, known

TITLE = "FlashAttention-2's figures 4 to 7: attention alone"
VARIANTS = "naive", "pytorch", "fused_softmax", "flash1", "sdpa_flash", "triton", "flash2"
ON_GPUS = "sdpa_efficient"  # xformers' kernel, as torch has it
HEAD_DIMS, MASKS = (64, 128), (False, True)
STANDS_FOR = {
    "naive": "PyTorch, naive is kernels/naive/definition.py, not compiled: an operation a kernel, S and dP in fp32",
    "pytorch": "PyTorch, 16 bits is the papers' PyTorch, where all is in 16 bits",
    "sdpa_efficient": "SDPA memory-efficient is xformers' kernel, as torch has it",
    "flash1": "flash1 stands for FlashAttention: a program for each head of each sequence, so that where these are few "
    "most of a large GPU is idle",
    "triton": "flash2, plain Triton stands for FlashAttention Triton",
    "sdpa_flash": "SDPA FlashAttention-2 is the authors' kernel, as torch has it",
}
SMOKE_LENGTHS = 32, 64
ROUNDS = {"full": 10, "smoke": 1}


def cells(config: PaperConfig) -> list[dict]:
    """A panel of a figure: a head size and a mask, at all lengths."""
    panels = itertools.product(HEAD_DIMS, MASKS) if config.size == "full" else [(64, True)]
    return [{"head_dim": head_dim, "causal": causal} for head_dim, causal in panels]


def measure(cell: dict, gpu: Gpu, config: PaperConfig) -> Iterator[dict]:
    """A row for each length, attention and pass: all in turn, after a check against fp64."""
    shapes = paper_cells(cell["head_dim"], cell["causal"])
    if config.size == "smoke":
        shapes = [replace(shapes[0], batch=1, seq_len=length, heads=2, kv_heads=2) for length in SMOKE_LENGTHS]
    names = [*VARIANTS, *([ON_GPUS] if gpu.device == "cuda" else []), *(["fa3"] if "fa3" in known(config) else [])]
    variants = {name: attend(name, config) for name in names}
    for shape in shapes:
        yield from measure_attention(shape, variants, gpu, ROUNDS[config.size])


def markdown(rows: list[dict]) -> str:
    """TFLOP/s of forward / backward / both, a line for each shape."""
    timed = [row for row in rows if "seq_len" in row]
    variants = [name for name in LOOKS if any(row["variant"] == name for row in timed)]
    texts: dict[tuple, dict] = {}
    for row in timed:
        shape = row["head_dim"], row["causal"], row["seq_len"], row["batch"], row["heads"]
        speed = whole_speed(row, "tflops", row["variant"] == "flash2")
        texts.setdefault(shape, {})[row["variant"], row["pass"]] = speed
    lines = []
    for (head_dim, causal, seq_len, batch, heads), of_shape in sorted(texts.items()):
        speeds = (" / ".join(of_shape.get((name, pass_), "-") for pass_ in PASSES) for name in variants)
        mask = "causal" if causal else "none"
        lines.append([mask, str(head_dim), f"{seq_len:,}", f"{batch} x {heads}", *speeds])
    header = ["mask", "head size", "sequence", "batch x heads", *(LOOKS[name][0] for name in variants)]
    return (
        f"{table(header, lines)}\n\nTFLOP/s of forward / backward / both in bf16, by the papers' count: 4 B H T^2 D "
        "forward, 2.5 times that backward, halved where causal. Each was first held to the fp64 reference. "
        f"{'; '.join(text for name, text in STANDS_FOR.items() if name in variants)}.{told_alone(timed)}"
    )


def pictures(rows: list[dict], where: str) -> dict[str, Figure]:
    """The papers' bar charts, one for each pass."""
    shown = [row for row in rows if "seq_len" in row and (row["head_dim"], row["causal"]) in PANELS]
    return {
        f"-{pass_}": figure_of([row for row in shown if row["pass"] == pass_], f"{title}, bf16, {where}")
        for pass_, title in TITLES.items()
    }
