"""Draw tokens from a GPT-2, one at a time, with a key/value cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from errors import UserError
from model.gpt2 import GPT2, KeyValueCache


def restrict(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Return logits (V) with -inf for all but the top_k likeliest and the fewest likeliest that reach top_p."""
    if top_k is not None and top_k < len(logits):
        kept = logits.topk(top_k)  # by index, so that ties do not keep more than top_k
        logits = torch.full_like(logits, float("-inf")).scatter(0, kept.indices, kept.values)
    if top_p is not None and top_p < 1:  # rounded sums pass 1 before the last token
        ordered, order = logits.sort(descending=True)
        likelihood = ordered.softmax(-1)
        before = likelihood.cumsum(-1) - likelihood  # probability of all tokens before this one
        outside = order[1:][before[1:] >= top_p]  # the first token always stays
        logits = logits.index_fill(0, outside, float("-inf"))
    return logits


def draw(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator) -> int:
    """Return a token drawn from logits (V). At temperature 0, return the likeliest token."""
    if temperature == 0:
        return int(logits.argmax())
    logits = logits.float()
    # Subtract the maximum first, so that a tiny temperature cannot make the likeliest logit infinite.
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
    """Yield up to max_tokens tokens that follow `prompt` (at least one token), ending before `stop`.

    Each token costs a forward pass of one position, which uses the cached keys and values. If the context is full, its
    second half becomes the new beginning and is read again. The model may have more tokens than the tokenizer: only the
    first `vocab_size` tokens are drawn. `generator` is a CPU generator. The caller sets autocast.

    Raises:
        UserError: the logits are not finite, because the weights diverged or fp16 overflowed.
    """
    device, context = model.wte.weight.device, model.config.context_length
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else model.wte.weight.dtype
    cache = KeyValueCache(model.config, 1, device, dtype)
    text, unread = list(prompt), list(prompt[-context:])
    for _ in range(max_tokens):
        logits = model(torch.tensor([unread], device=device), cache=cache)[0, -1, :vocab_size]
        if not logits.isfinite().all():
            raise UserError("the model's logits are not finite; give another checkpoint, or set precision=fp32")
        token = draw(logits, temperature, top_k, top_p, generator)
        if token == stop:
            return
        yield token
        text.append(token)
        unread = [token]
        if cache.length == context:
            cache.length = 0
            unread = text[-max(1, context // 2) :]
