"""Scale, mask, softmax and dropout in plain PyTorch: what the fused kernels compute, and what runs on a CPU.

B batch, H heads, T query length, S key length.
"""

import torch
from torch import Tensor

from kernels.common.dropout import keep_mask
from kernels.naive.definition import visible


def _hidden(shape: torch.Size, documents: Tensor | None, causal: bool, device: torch.device) -> Tensor | None:
    """(T, S) or (B, 1, T, S) boolean: True where a query does not see a key; None where all see all."""
    hidden = ~visible(*shape[2:], device) if causal else None
    if documents is None:
        return hidden
    j = torch.arange(shape[3], device=device)
    first, end = (bound[:, None, :, None] for bound in documents.unbind(1))
    elsewhere = (j < first) | (j >= end)
    return elsewhere if hidden is None else elsewhere | hidden


def _keep(shape: torch.Size, numbers: Tensor, dropout_p: float) -> Tensor:
    """What dropout leaves of a whole matrix of probabilities, as the factors 0 and 1 / (1 - dropout_p)."""
    return keep_mask(numbers, shape[2], range(shape[2]), range(shape[3]), dropout_p) / (1 - dropout_p)


def forward(
    scores: Tensor, numbers: Tensor | None, documents: Tensor | None, causal: bool, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """softmax(scores scale) of scores (B, H, T, S), computed in fp32 and rounded to their dtype, and what dropout
    leaves of it, which is empty where dropout_p is 0. A query that sees no key gets zeros; the rest is as in flash2."""
    accurate = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    hidden = _hidden(scores.shape, documents, causal, scores.device)
    if hidden is not None:
        accurate = accurate.masked_fill(hidden, float("-inf"))
    probabilities = accurate.softmax(-1)
    if hidden is not None:
        probabilities = probabilities.masked_fill(hidden, 0)  # a query without a key is 0/0 in the softmax
    kept = scores.new_empty(0)
    if dropout_p:
        kept = (probabilities * _keep(scores.shape, numbers, dropout_p)).to(scores.dtype)
    return probabilities.to(scores.dtype), kept


def backward(
    dkept: Tensor,
    probabilities: Tensor,
    numbers: Tensor | None,
    documents: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """The gradient of the scores, dS = scale P o (dP - rowsum(P o dP)), from that of what dropout left."""
    accumulator = torch.promote_types(dkept.dtype, torch.float32)
    P, dP = probabilities.to(accumulator), dkept.to(accumulator)
    if dropout_p:
        dP = dP * _keep(dP.shape, numbers, dropout_p)
    return (scale * P * (dP - (P * dP).sum(-1, keepdim=True))).to(dkept.dtype)
