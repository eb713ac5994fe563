"""Validation perplexity after some training steps on real tokens, to compare attentions with each other."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.common.timing import Gpu
from bench.paper.settings import PaperSettings
from bench.quality import fast_losses, plain, plain_losses
from bench.training.trainers import DTYPE, VOCABULARY, Trainer, TrainingCell, ours
from data.config import DataConfig
from data.loader import IGNORED, TrainLoader, validation_batches
from data.tokens import open_tokens
from trainer.evaluation import perplexity

SEED, OTHER_SEEDS = 1, (2, 3, 4)
VALIDATION_TOKENS = 360_448


def perplexity_cell(speed_cell: dict, settings: PaperSettings, seed: int = SEED) -> dict:
    """Return the cell that trains the model whose steps `speed_cell` times."""
    run = {"measured": "perplexity", "tokens": Path(settings.tokens).name, "steps": settings.steps, "seed": seed}
    return {**speed_cell, **run}


def measure(cell: dict, gpu: Gpu, settings: PaperSettings) -> Iterator[dict]:
    """Yield one row with the perplexity. All runs of a seed begin with the same weights and see the same tokens."""
    tokens = open_tokens(DataConfig(name="tokens", dir=settings.tokens, tokenizer="gpt2"))
    sizes = {key: cell[key] for key in ("batch_size", "context_length")} | {"vocab_size": VOCABULARY}
    device, steps = torch.device(gpu.device), cell["steps"]
    shape = TrainingCell(cell["model"], cell["context_length"], (cell["batch_size"],))
    trainer = Trainer("ours", "sdpa" if cell["trainer"] == "huggingface" else cell["attention"], cell["compiled"])
    with TrainLoader(tokens.train, seed=cell["seed"], device=device, name="train.bin", **sizes) as loader:
        torch.manual_seed(cell["seed"])
        job = ours(shape, trainer, gpu.device, loader, max_steps=steps)
        model, loss_of, losses = job.model, job.model, fast_losses(partial(job.step, cell["batch_size"]), steps)
        if cell["trainer"] == "huggingface":
            model = plain(job.model, "eager", gpu.device)
            loss_of, losses = partial(huggingface_loss, model), plain_losses(model, iter(loader), steps)
        deque(losses, maxlen=0)  # iterating trains the model
    model.eval()
    batches = validation_batches(tokens.val, max_tokens=VALIDATION_TOKENS, device=device, name="val.bin", **sizes)
    found = perplexity(mean_loss(loss_of, batches))
    if not math.isfinite(found):
        raise ArithmeticError(f"the perplexity after {steps} steps is {found}")
    yield {"perplexity": found, "status": "ok"}


def huggingface_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(input_ids=inputs).logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def mean_loss(loss_of: Callable[[Tensor, Tensor], Tensor], batches: Iterator[tuple[Tensor, Tensor]]) -> float:
    """Return the nats per token over all batches."""
    total, count = 0.0, 0
    for inputs, targets in batches:
        with torch.autocast(inputs.device.type, DTYPE):
            counted = (targets != IGNORED).sum().item()
            total += loss_of(inputs, targets).item() * counted
        count += counted
    return total / count
