"""Validation perplexity after some training steps on real tokens, to compare attentions with each other."""

import math
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.common.timing import Gpu
from bench.paper.settings import PaperSettings
from bench.quality import fast_losses, open_gpt2_tokens, plain, plain_losses
from bench.training.trainers import VOCABULARY, Trainer, TrainingCell, ours
from data.loader import TrainLoader
from trainer.evaluation import validate

SEED, OTHER_SEEDS = 1, (2, 3, 4)
VALIDATION_TOKENS = 360_448


def perplexity_cell(speed_cell: dict, settings: PaperSettings, seed: int = SEED) -> dict:
    """Return the cell that trains the model whose steps `speed_cell` times."""
    run = {"measured": "perplexity", "tokens": Path(settings.tokens).name, "steps": settings.steps, "seed": seed}
    return {**speed_cell, **run}


class HuggingFaceLoss(nn.Module):
    """Hugging Face's model with the interface of ours: it returns the mean loss."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(input_ids=inputs).logits.float().flatten(0, 1), targets.flatten())


def measure(cell: dict, gpu: Gpu, settings: PaperSettings) -> Iterator[dict]:
    """Yield one row with the perplexity. All runs of a seed begin with the same weights and see the same tokens."""
    tokens = open_gpt2_tokens(settings.tokens, cell["context_length"])
    sizes = {key: cell[key] for key in ("batch_size", "context_length")} | {"vocab_size": VOCABULARY}
    device, steps = torch.device(gpu.device), cell["steps"]
    shape = TrainingCell(cell["model"], cell["context_length"], (cell["batch_size"],))
    trainer = Trainer("ours", "sdpa" if cell["trainer"] == "huggingface" else cell["attention"], cell["compiled"])
    with TrainLoader(tokens.train, seed=cell["seed"], device=device, name="train.bin", **sizes) as loader:
        torch.manual_seed(cell["seed"])
        job = ours(shape, trainer, gpu.device, loader, max_steps=steps)
        model, losses = job.model, fast_losses(partial(job.step, cell["batch_size"]), steps)
        if cell["trainer"] == "huggingface":
            peer = plain(job.model, "eager", gpu.device)
            model, losses = HuggingFaceLoss(peer), plain_losses(peer, iter(loader), steps)
        deque(losses, maxlen=0)  # iterating trains the model
    run = job.config.train
    run.batch_size, run.eval_tokens = cell["batch_size"], VALIDATION_TOKENS
    never = {"document_mask": False, "is_stopped": lambda: False}
    found = validate(model, tokens, job.config.model, run, job.compute, **never)["val/perplexity"]
    if not math.isfinite(found):
        raise ArithmeticError(f"the perplexity after {steps} steps is {found}")
    yield {"perplexity": found, "status": "ok"}
