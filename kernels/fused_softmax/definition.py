"""Scale, mask, softmax and dropout in plain PyTorch: the definition of the fused kernels, and the CPU's path.

B batch, H heads, T query length, S key length.
"""

import torch
from torch import Tensor

from kernels.common.dropout import keep_mask
from kernels.naive.definition import visible


def _hidden(shape: torch.Size, documents: Tensor | None, causal: bool, device: torch.device) -> Tensor | None:
    """Return (T, S) or (B, 1, T, S) boolean, True for keys that a query does not see; None if all see all."""
    hidden = ~visible(*shape[2:], device) if causal else None
    if documents is None:
        return hidden
    j = torch.arange(shape[3], device=device)
    first, end = (bound[:, None, :, None] for bound in documents.unbind(1))
    elsewhere = (j < first) | (j >= end)
    return elsewhere if hidden is None else elsewhere | hidden


def _keep(shape: torch.Size, numbers: Tensor, dropout_p: float) -> Tensor:
    """Return dropout's factors of all probabilities (B, H, T, S): 0 or 1 / (1 - dropout_p)."""
    return keep_mask(numbers, shape[2], range(shape[2]), range(shape[3]), dropout_p) / (1 - dropout_p)


def forward(
    scores: Tensor, numbers: Tensor | None, documents: Tensor | None, causal: bool, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Return softmax(scores scale) of scores (B, H, T, S), and the same after dropout (empty if dropout_p is 0).

    The softmax is computed in fp32 (fp64 for fp64 scores) and rounded to the scores' dtype. A query that sees no key
    gets zeros. numbers, documents and causal are as in flash2.
    """
    accurate = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    hidden = _hidden(scores.shape, documents, causal, scores.device)
    if hidden is not None:
        accurate = accurate.masked_fill(hidden, float("-inf"))
    probabilities = accurate.softmax(-1)
    if hidden is not None:
        probabilities = probabilities.masked_fill(hidden, 0)  # the softmax of a query without keys is 0/0
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
    """Return dS = scale P o (dP - rowsum(P o dP)), the scores' gradient, from the gradient after dropout."""
    accumulator = torch.promote_types(dkept.dtype, torch.float32)
    P, dP = probabilities.to(accumulator), dkept.to(accumulator)
    if dropout_p:
        dP = dP * _keep(dP.shape, numbers, dropout_p)
    return (scale * P * (dP - (P * dP).sum(-1, keepdim=True))).to(dkept.dtype)
