"""Loss and perplexity over the whole of a token file, by windows that slide over it."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from data.loader import IGNORED, document_options, gather
from data.tokenizers import Tokenizer
from errors import UserError
from trainer.precision import Compute


def perplexity(loss: float) -> float:
    """exp of a loss in nats; infinite where that overflows, and NaN of NaN."""
    return math.inf if loss >= 700 else math.exp(loss)


@dataclass
class EvaluationConfig:
    """How eval_only=true goes over the validation tokens."""

    context_length: int | None = None
    """Tokens of a window; null is the model's."""
    stride: int | None = None
    """Tokens from one window to the next, of which the last so many are scored; null is the context: no overlap."""

    def __post_init__(self):
        for key in ("context_length", "stride"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                raise UserError(f"evaluation.{key}={getattr(self, key)} must be at least 1")

    def sizes(self, longest: int) -> tuple[int, int]:
        """Context and stride for a model of `longest` positions.

        Raises:
            UserError: a context that is longer, or a stride that would leave tokens out.
        """
        context = longest if self.context_length is None else self.context_length
        stride = context if self.stride is None else self.stride
        if context > longest:
            raise UserError(f"evaluation.context_length={context} is longer than the model's {longest}; set it lower")
        if stride > context:
            raise UserError(
                f"evaluation.stride={stride} would leave tokens out, being longer than the context of {context}; set "
                "evaluation.stride lower"
            )
        return context, stride


@dataclass
class Score:
    """What a model makes of a token file: every token but the first is predicted once."""

    nats: float
    tokens: int
    words: int
    """Words of the text, separated by white space; none of them an end of text."""

    @property
    def loss(self) -> float:
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Per token."""
        return perplexity(self.loss)

    @property
    def word_perplexity(self) -> float:
        """Per word, ends of text being paid for: what figures of word-level models are compared with."""
        return perplexity(self.nats / max(self.words, 1))


def windows(count: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, scored): inputs from start to stop, of whose targets, one further on, the last `scored` count."""
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
) -> Score:
    """The model's score on `tokens`, one dimension, `batch` windows at a time; a terminal is shown how far it is.

    Raises:
        UserError: fewer than two tokens, or one that the model does not know; DataError as data.loader.gather.
    """
    if len(tokens) < 2 or tokens.max() >= model.config.vocab_size:
        raise UserError(
            f"these {len(tokens)} validation tokens, up to {tokens.max()}, are none for a model of "
            f"{model.config.vocab_size}; choose the data of its tokenizer"
        )
    words = count_words(tokens, tokenizer)
    model.eval()
    nats = torch.zeros((), dtype=torch.float64, device=compute.device)
    pending: list[tuple[int, int, int]] = []
    places, console = list(windows(len(tokens), context, stride)), Console(stderr=True)
    shown = {"console": console, "disable": not console.is_terminal, "transient": True}
    for i, place in enumerate(track(places, "evaluating", **shown)):
        pending.append(place)
        alike = i + 1 < len(places) and places[i + 1][1] - places[i + 1][0] == place[1] - place[0]
        if len(pending) == batch or not alike:
            inputs, targets = (x.to(compute.device) for x in _gather(tokens, pending, model.config.vocab_size, name))
            options = document_options(inputs, tokenizer.eot, document_mask)
            with compute.autocast():
                nats += model(inputs, targets, **options).double() * (targets != IGNORED).sum()
            pending = []
    return Score(nats.item(), len(tokens) - 1, words)


def _gather(
    tokens: np.ndarray, places: list[tuple[int, int, int]], vocab_size: int, name: str
) -> tuple[Tensor, Tensor]:
    start, stop, _ = places[0]  # all are as long
    inputs, targets = gather(tokens, [start for start, *_ in places], stop - start, vocab_size, name)
    for row, (start, stop, scored) in zip(targets, places, strict=True):
        row[: stop - start - scored] = IGNORED
    return inputs, targets


def count_words(tokens: np.ndarray, tokenizer: Tokenizer) -> int:
    """Words of the documents' texts."""
    bounds = [0, *(np.flatnonzero(tokens == tokenizer.eot) + 1).tolist(), len(tokens)]
    texts = (
        tokenizer.decode(tokens[a:b][tokens[a:b] != tokenizer.eot].tolist()) for a, b in itertools.pairwise(bounds)
    )
    return sum(len(text.split()) for text in texts)
