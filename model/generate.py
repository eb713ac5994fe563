"""Drawing tokens from a GPT-2, one at a time, with a key/value cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from model.gpt2 import GPT2, KeyValueCache


def restrict(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """logits (V) with all but the top_k likeliest, and all but the likeliest that together reach top_p, at -inf."""
    if top_k is not None and top_k < len(logits):
        kept = logits.topk(top_k)  # by index: of tied tokens no more than top_k stay
        logits = torch.full_like(logits, float("-inf")).scatter(0, kept.indices, kept.values)
    if top_p is not None and top_p < 1:  # the sum of all rounds past 1
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # probability of all likelier tokens
        logits = logits.index_fill(0, order[before >= top_p], float("-inf"))
    return logits


def draw(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator) -> int:
    """A token of logits (V); at temperature 0 the likeliest."""
    if temperature == 0:
        return int(logits.argmax())
    logits = logits.float()  # from the likeliest one's down, which no temperature makes infinite
    scaled = (logits - logits.max()) / max(temperature, torch.finfo(logits.dtype).tiny)
    probabilities = restrict(scaled, top_k, top_p).softmax(-1)
    return int(torch.multinomial(probabilities.cpu(), 1, generator=generator))


@torch.inference_mode()
def generate(
    model: GPT2,
    prompt: list[int],
    *,
    max_tokens: int,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator,
    stop: int | None = None,
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Yields up to max_tokens tokens that follow `prompt` (at least one token), ending before `stop`.

    Each token costs one forward pass of one position against the cached keys and values. Where the context is full, its
    second half is read again as the new beginning. Where it is given only tokens below `vocab_size` are drawn: a
    model may know more than its tokenizer. `generator` is a CPU generator. The caller sets autocast.
    """
    device, context = model.wte.weight.device, model.config.context_length
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else model.wte.weight.dtype
    cache = KeyValueCache(model.config, 1, device, dtype)
    text, unread = list(prompt), list(prompt[-context:])
    for _ in range(max_tokens):
        logits = model(torch.tensor([unread], device=device), cache=cache)[0, -1, :vocab_size]
        token = draw(logits, temperature, top_k, top_p, generator)
        if token == stop:
            return
        yield token
        text.append(token)
        unread = [token]
        if cache.length == context:
            cache.length = 0
            unread = text[-max(1, context // 2) :]
