"""Softmax attention of small dense matrices, which the approximate attentions share."""

import torch
from torch import Tensor


def wide_type(x: Tensor) -> torch.dtype:
    """Return fp32, or fp64 if x is fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    """Return x in fp32, or in fp64 if it is fp64."""
    return x.to(wide_type(x))


def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Return softmax(q k^T D**-0.5) v, (..., T, D) in v's dtype.

    q is (..., T, D), k and v are (..., S, D). `hidden` is boolean and broadcasts to (..., T, S). It is true for the
    pairs that are left out, and every query needs one pair that is not.
    """
    scores = _scores(q, k, hidden)
    return scores.softmax(-1, dtype=wide_type(scores)).to(v.dtype) @ v


def attend_with_logsumexp(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return attend(q, k, v, hidden) and the logsumexp of the scores, (..., T, 1) in fp32 or more."""
    scores = wide(_scores(q, k, hidden))
    logsumexp = scores.logsumexp(-1, keepdim=True)
    return (scores - logsumexp).exp().to(v.dtype) @ v, logsumexp


def _scores(q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor:
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
