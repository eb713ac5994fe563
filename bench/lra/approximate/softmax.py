"""Softmax attention of small dense matrices, which the approximate attentions share."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """Return x in fp32, or in fp64 if it is fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return softmax(q k^T D**-0.5) v (..., T, D) in v's dtype, and the scores' logsumexp (..., T, 1) in fp32 or more.

    q is (..., T, D), k and v are (..., S, D). `hidden` is boolean and broadcasts to (..., T, S). It is true for the
    pairs that are left out, and every query needs one pair that is not.
    """
    scores = wide((q * q.shape[-1] ** -0.5) @ k.mT)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    logsumexp = scores.logsumexp(-1, keepdim=True)
    return (scores - logsumexp).exp().to(v.dtype) @ v, logsumexp
