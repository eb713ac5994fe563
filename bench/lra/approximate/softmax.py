"""Softmax attention of small dense matrices, which the approximate attentions share."""

import torch
from torch import Tensor


def wide_type(x: Tensor) -> torch.dtype:
    """Return fp32, or fp64 if x is fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    """Return x in fp32, or in fp64 if it is fp64."""
    return x.to(wide_type(x))


LAST = -1e5
"""The score of a pair whose weight is 0 if the query has any other pair. A score of -inf would not allow it alone."""


def attend(q: Tensor, k: Tensor, v: Tensor, masked: Tensor | None = None) -> Tensor:
    """Return softmax(q k^T D**-0.5) v, (..., T, D) in v's dtype.

    q is (..., T, D), k and v are (..., S, D). `masked` is boolean and broadcasts to (..., T, S). It is true for the
    pairs that are left out. Every query needs a pair that is not left out.
    """
    scores = _scores(q, k, masked)
    return scores.softmax(-1, dtype=wide_type(scores)).to(v.dtype) @ v


def attend_with_logsumexp(
    q: Tensor, k: Tensor, v: Tensor, masked: Tensor | None, last: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return attend(q, k, v, masked) and the logsumexp of the scores, (..., T, 1) in fp32 or more.

    `last` is like `masked`, but a query attends to such a pair if the query has no other.
    """
    scores = wide(_scores(q, k, masked))
    if last is not None:
        scores = scores.masked_fill(last, LAST)
    logsumexp = scores.logsumexp(-1, keepdim=True)
    return (scores - logsumexp).exp().to(v.dtype) @ v, logsumexp


def _scores(q: Tensor, k: Tensor, masked: Tensor | None) -> Tensor:
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    return scores if masked is None else scores.masked_fill(masked, -torch.inf)
