"""Training steps of the tables: their cells, their measurement, and the papers' token budget.

The numbers come from bench.training: a compiled step of train.py on random tokens, or Hugging Face's model in bf16 with
eager attention and without compilation. Each of our attentions is first compared with the fp64 reference.
"""

from collections.abc import Iterator
from functools import partial

import torch

from bench.common.formatting import cost_text, speed_text
from bench.common.timing import Gpu
from bench.paper.settings import PaperSettings
from bench.training.steps import alternate, search
from bench.training.trainers import Trainer, TrainingCell, huggingface, ours

BUDGET = 400_000 * 512 * 1024  # tokens: FlashAttention (Dao et al., 2022), appendix E.2
GPUS = 8
ROUNDS = {"full": 9, "smoke": 1}  # samples of half a second; a short disturbance of the host does not move the median


def speed_cell(
    trainer: str, attention: str, model: str, context_length: int, batch_size: int, settings: PaperSettings
) -> dict:
    shape = {"model": model, "context_length": context_length, "batch_size": batch_size}
    compiled = trainer == "ours" and settings.size == "full"  # a smoke run is shorter than its compilation
    return {"measured": "speed", "trainer": trainer, "attention": attention, **shape, "compiled": compiled}


def measure(cell: dict, gpu: Gpu, settings: PaperSettings) -> Iterator[dict]:
    """Yield one row: tokens/s, TFLOP/s and memory of a trainer's step."""
    torch.backends.cuda.matmul.allow_tf32 = True  # as nanoGPT sets it
    trained = TrainingCell(cell["model"], cell["context_length"], (cell["batch_size"],))
    trainer = Trainer(cell["trainer"], cell["attention"], cell["compiled"])
    build = partial({"ours": ours, "huggingface": huggingface}[trainer.name], trained, trainer, gpu.device)
    rows, best = search(trained, trainer, build, gpu)
    alternate(trained, [best] if best else [], ROUNDS[settings.size], gpu)
    yield from rows


def days(tokens_per_second: float) -> float:
    """Return the days that the papers' budget takes on 8 devices of this speed with perfect scaling."""
    return BUDGET / (tokens_per_second * GPUS) / 86400


def label(row: dict) -> str:
    return "huggingface" if row["trainer"] == "huggingface" else row["attention"]


def by_label(rows: list[dict]) -> dict[tuple[str, int, str], dict]:
    """Return the rows of training speed by model, context length and label."""
    return {(r["model"], r["context_length"], label(r)): r for r in rows if r["measured"] == "speed"}


def speed_of(row: dict | None) -> float | None:
    return row["tokens_per_second"] if row and row["status"] == "ok" else None


def compared(speed: float | None, base: float | None, ours: bool, theirs: tuple | None) -> tuple[list[str], list[str]]:
    """Return the columns of days and of speed over `base`, and those of the paper's own numbers."""
    shown = [cost_text(days(speed), ours) if speed else "-", speed_text(speed / base, ours) if speed and base else "-"]
    return shown, [theirs[0], *(f"{x:.1f}" for x in theirs[1:])] if theirs else ["-"] * 4
