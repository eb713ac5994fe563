"""A linear layer with tanh-GELU and its gradient in plain PyTorch: what the kernels compute, and what a CPU runs."""

import torch
import torch.nn.functional as F
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _slope(pre: Tensor) -> Tensor:
    """GELU's derivative, in fp32 or more."""
    wide = _wide(pre)
    return torch.ops.aten.gelu_backward(torch.ones_like(wide), wide, approximate="tanh")


def _gelu(pre: Tensor) -> Tensor:
    return F.gelu(_wide(pre), approximate="tanh").to(pre.dtype)


def forward(x: Tensor, weight: Tensor, bias: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """What the gradient needs, and gelu(pre) for pre = x weight^T + bias; both (N, C) in x's dtype.

    x (N, D), weight (C, D), bias (C,). If the result is to be kept, the gradient needs GELU's slope at pre, else pre.
    """
    pre = F.linear(x, weight, bias.to(x.dtype))
    return _slope(pre).to(x.dtype) if keep else pre, _gelu(pre)


def backward(dout: Tensor, weight: Tensor, kept: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of a layer after GELU, whose weight (D, C) is and whose output's gradient is dout (N, D), with what forward kept.

    dpre (N, C) in dout's dtype; dpre summed over its rows before it is rounded, (C,) in fp32 or more; and GELU's result
    again, unless that was to be kept.
    """
    dpre = _wide(dout @ weight) * (_wide(kept) if keep else _slope(kept))
    return dpre.to(dout.dtype), dpre.sum(0), kept.new_empty(0) if keep else _gelu(kept)
