"""A linear layer with what is added to its product, in plain PyTorch: what the kernel computes, and what else runs."""

import torch.nn.functional as F
from torch import Tensor


def forward(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None) -> Tensor:
    """x weight^T + bias + residual, (N, C) in x's dtype.

    x (N, D), weight (C, D), residual (N, C) or None, in one dtype; bias (C,) in any. The layer's result is rounded to
    it, and then the sum with the residual. Not all at once: many sums of two numbers in 16 bits lie halfway between two
    others, and a bias too small to be seen would break all these ties its way: by a hundred times itself and more.
    """
    out = F.linear(x, weight, bias.to(x.dtype))
    return out if residual is None else out.add_(residual)
