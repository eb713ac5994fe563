"""Scale, mask, softmax and dropout in plain PyTorch: the definition of the fused kernels, and the CPU's path.

B batch, H heads, T query length, S key length.
"""

import torch
from torch import Tensor

from kernels.common.dropout import keep_mask
from kernels.common.dtypes import accumulator
from kernels.common.tiling import NEG_INF, Visibility


def _keep(shape: torch.Size, numbers: Tensor, dropout_p: float) -> Tensor:
    """Return dropout's factors of all probabilities (B, H, T, S): 0 or 1 / (1 - dropout_p)."""
    return keep_mask(numbers, shape[2], range(shape[2]), range(shape[3]), dropout_p) / (1 - dropout_p)


def forward(scores: Tensor, *options) -> tuple[Tensor, Tensor]:
    """Return softmax(scores scale) of scores (B, H, T, S), and the same after dropout (empty if dropout_p is 0).

    The softmax is computed in fp32 (fp64 for fp64 scores) and rounded to the scores' dtype. A query that sees no key
    gets zeros. flash2's Options explains the options.
    """
    numbers, documents, causal, scale, dropout_p = options
    whole = range(scores.shape[2]), range(scores.shape[3])
    visibility = Visibility(*scores.shape[2:], scores.device, documents, causal)
    accurate = scores.to(accumulator(scores.dtype)) * scale
    probabilities = visibility.hide(accurate, *whole, NEG_INF).softmax(-1)
    probabilities = visibility.hide(probabilities, *whole, 0)  # the softmax of a query without keys is 0/0
    kept = scores.new_empty(0)
    if dropout_p:
        kept = (probabilities * _keep(scores.shape, numbers, dropout_p)).to(scores.dtype)
    return probabilities.to(scores.dtype), kept


def backward(dkept: Tensor, probabilities: Tensor, *options) -> Tensor:
    """Return dS = scale P o (dP - rowsum(P o dP)), the scores' gradient, from the gradient after dropout."""
    numbers, _, _, scale, dropout_p = options
    P, dP = (x.to(accumulator(x.dtype)) for x in (probabilities, dkept))
    if dropout_p:
        dP = dP * _keep(dP.shape, numbers, dropout_p)
    return (scale * P * (dP - (P * dP).sum(-1, keepdim=True))).to(dkept.dtype)
