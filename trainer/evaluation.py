"""Loss and perplexity: over a run's fixed validation tokens, and over a whole token file."""

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from data.loader import IGNORED, document_options, gather, validation_batches
from data.tokenizers import Tokenizer, end_of_text
from data.tokens import TokenSet
from errors import UserError
from model.gpt2 import ModelConfig
from trainer.build import batch_options
from trainer.config import TrainConfig
from trainer.precision import Compute


def perplexity(loss: float) -> float:
    """Return exp(loss) for a loss in nats: infinite if that overflows, NaN for NaN."""
    return math.inf if loss >= 700 else math.exp(loss)


@torch.no_grad()
def validate(
    model: nn.Module,
    tokens: TokenSet,
    shape: ModelConfig,
    settings: TrainConfig,
    compute: Compute,
    *,
    document_mask: bool,
    is_stopped: Callable[[], bool],
) -> dict[str, float]:
    """Return val/loss (nats) and val/perplexity over train.eval_tokens validation tokens, always the same ones.

    Each process reads its part. Returns {} if `is_stopped`: the time after a stop signal is for saving.
    """
    model.eval()
    world, eot = compute.world, end_of_text(tokens.tokenizer)
    batches = validation_batches(
        tokens.val,
        max_tokens=settings.eval_tokens,
        name=str(tokens.dir / "val.bin"),
        **batch_options(settings, shape, compute),
    )
    total, count = torch.zeros(2, dtype=torch.float64, device=compute.device)
    for inputs, targets in batches:
        if is_stopped():
            return {}
        counted = (targets != IGNORED).sum()
        with compute.autocast():
            loss = model(inputs, targets, **document_options(inputs, eot, document_mask))
        total += torch.where(counted > 0, loss * counted, 0)  # the mean loss over no targets is NaN
        count += counted
    total, count = world.sum(torch.stack((total, count))).tolist()
    loss = total / count
    return {"val/loss": loss, "val/perplexity": perplexity(loss)}


def window_sizes(context_length: int | None, stride: int | None, longest: int) -> tuple[int, int]:
    """Return context and stride in tokens for a model of `longest` positions; None stands for the longest."""
    context = longest if context_length is None else context_length
    stride = context if stride is None else stride
    if context > longest:
        raise UserError(f"context_length={context} exceeds the model's {longest} positions; give at most {longest}")
    if stride > context:
        raise UserError(
            f"stride={stride} exceeds the context of {context} tokens and would leave tokens out; give at most "
            f"{context}"
        )
    return context, stride


def windows(count: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, scored): the inputs are tokens[start:stop], and the last `scored` targets count."""
    start = done = 0
    while done < count - 1:
        stop = min(start + context, count - 1)
        yield start, stop, stop - done
        start, done = start + stride, stop


@torch.no_grad()
def score(
    model: nn.Module,
    tokens: np.ndarray,
    tokenizer: Tokenizer,
    *,
    name: str,
    context: int,
    stride: int,
    batch: int,
    compute: Compute,
    document_mask: bool = False,
) -> dict[str, float]:
    """Return the model's metrics on `tokens` (n,), in `batch` windows at a time, with a progress bar on a terminal.

    White space separates words. Compare the perplexity per word with word-level models.
    """
    if len(tokens) < 2:
        raise UserError(f"{name} holds {len(tokens)} tokens, and an evaluation needs 2; prepare more text")
    if tokens.max() >= model.config.vocab_size:
        raise UserError(
            f"{name} holds token {tokens.max()}, but the model's vocabulary has {model.config.vocab_size} entries; "
            "prepare the data with the model's tokenizer"
        )
    words = count_words(tokens, tokenizer)
    model.eval()
    nats = torch.zeros((), dtype=torch.float64, device=compute.device)
    batches, console = [], Console(stderr=True)
    for length, places in itertools.groupby(windows(len(tokens), context, stride), lambda place: place[1] - place[0]):
        same = list(places)
        batches += [(length, same[i : i + batch]) for i in range(0, len(same), batch)]
    for length, places in track(
        batches, "evaluating", console=console, disable=not console.is_terminal, transient=True
    ):
        inputs, targets = gather(tokens, [start for start, *_ in places], length, model.config.vocab_size, name)
        for row, (*_, scored) in zip(targets, places, strict=True):
            row[: length - scored] = IGNORED
        inputs, targets = inputs.to(compute.device), targets.to(compute.device)
        options = document_options(inputs, tokenizer.eot, document_mask)
        with compute.autocast():
            nats += model(inputs, targets, **options).double() * (targets != IGNORED).sum()
    loss = nats.item() / (len(tokens) - 1)
    metrics = {"val/loss": loss, "val/perplexity": perplexity(loss), "tokens": len(tokens) - 1}
    return metrics | {"val/word_perplexity": perplexity(nats.item() / max(words, 1)), "words": words}


def count_words(tokens: np.ndarray, tokenizer: Tokenizer) -> int:
    """Return the number of words in the documents' texts."""
    bounds = [0, *(np.flatnonzero(tokens == tokenizer.eot) + 1).tolist(), len(tokens)]
    documents = (tokens[a:b][tokens[a:b] != tokenizer.eot] for a, b in itertools.pairwise(bounds))
    return sum(len(tokenizer.decode(document.tolist()).split()) for document in documents)
