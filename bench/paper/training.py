"""What the tables of training steps share: their cells, how one is measured, and the papers' budget.

The figures are those of bench.training: a compiled step of train.py (Hugging Face's model as its users run it, in bf16
and not compiled) on random tokens. All attentions of a table get the same micro-batch. Before its steps are timed, an
attention is held to the fp64 reference at the model's shape; Hugging Face's own is transformers' eager attention.
"""

from collections.abc import Iterator
from functools import partial

import torch

from bench.attention.shapes import Cell as AttentionCell
from bench.common.timing import Gpu
from bench.paper.config import PaperConfig
from bench.paper.variants import check_variant
from bench.training.steps import alternate, search
from bench.training.trainers import Cell, Trainer, huggingface, ours

BUDGET = 400_000 * 512 * 1024  # tokens: FlashAttention (Dao et al., 2022), appendix E.2
GPUS = 8
ROUNDS = {"full": 9, "smoke": 1}  # of samples of half a second: a host that is disturbed now and then moves no median


def cell_of(
    trainer: str, attention: str, model: str, context_length: int, batch_size: int, config: PaperConfig
) -> dict:
    """A cell of training steps."""
    shape = {"model": model, "context_length": context_length, "batch_size": batch_size}
    compiled = trainer == "ours" and config.size == "full"  # compiling a smoke run takes longer than running it
    return {"measured": "speed", "trainer": trainer, "attention": attention, **shape, "compiled": compiled}


def measure(cell: dict, gpu: Gpu, config: PaperConfig) -> Iterator[dict]:
    """One row: tokens/s, TFLOP/s and memory of a trainer's step."""
    torch.backends.cuda.matmul.allow_tf32 = True  # as nanoGPT sets it
    trained = Cell(cell["model"], cell["context_length"], (cell["batch_size"],))
    trainer = Trainer(cell["trainer"], cell["attention"], cell["compiled"])
    if trainer.name == "ours":
        shape = trained.shape()
        sizes = {"batch": 1, "seq_len": cell["context_length"], "heads": shape.n_head, "head_dim": shape.head_dim}
        check_variant(trainer.attention, AttentionCell(trained.name, **sizes, packed=True), gpu, config)
        gpu.release()
    build = partial({"ours": ours, "huggingface": huggingface}[trainer.name], trained, trainer, gpu.device)
    rows, best = search(trained, trainer, build, gpu)
    alternate(trained, [best] if best else [], ROUNDS[config.size], gpu)
    yield from rows


def days(tokens_per_second: float) -> float:
    """What the paper's budget takes on GPUS such devices, each as fast as one alone."""
    return BUDGET / (tokens_per_second * GPUS) / 86400


def label(row: dict) -> str:
    """What the tables call a row: Hugging Face's model, or the attention of ours."""
    return "huggingface" if row["trainer"] == "huggingface" else row["attention"]


def by_label(rows: list[dict]) -> dict[tuple[str, int, str], dict]:
    """The rows of training steps by model, context length and label."""
    return {(r["model"], r["context_length"], label(r)): r for r in rows if r["measured"] == "speed"}


def speed_of(row: dict | None) -> float | None:
    """Tokens/s, if they were measured."""
    return row["tokens_per_second"] if row and row["status"] == "ok" else None
