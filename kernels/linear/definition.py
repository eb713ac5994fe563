"""A linear layer with what is added to its product, in plain PyTorch: what the kernel computes, and what a CPU runs."""

import torch
import torch.nn.functional as F
from torch import Tensor


def forward(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None) -> Tensor:
    """x weight^T + bias + residual, (N, C) in x's dtype.

    x (N, D), weight (C, D), residual (N, C) or None, in one dtype; bias (C,) in any. The product is rounded to it, and
    so is the sum, which is taken in fp32 or more.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    out = F.linear(x, weight).to(wide) + bias.to(wide)
    return (out if residual is None else out + residual.to(wide)).to(x.dtype)
