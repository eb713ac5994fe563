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


def forward(x: Tensor, weight: Tensor, bias: Tensor, keep_output: bool) -> tuple[Tensor, Tensor]:
    """What is saved for the gradient, and gelu(pre) for pre = x weight^T + bias; both (N, C) in x's dtype.

    x (N, D), weight (C, D), bias (C,). With keep_output the gradient needs GELU's slope at pre, without it pre itself.
    """
    pre = F.linear(x, weight, bias.to(x.dtype))
    return _slope(pre).to(x.dtype) if keep_output else pre, _gelu(pre)


def backward(dout: Tensor, weight: Tensor, saved: Tensor, keep_output: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dpre (N, C) in dout's dtype; dpre summed over its rows before it is rounded, (C,) in fp32 or more; and without
    keep_output gelu(pre) once more.

    dout (N, D) is the gradient of the output of the layer after GELU, whose weight (D, C) is; saved is forward's.
    """
    dpre = _wide(dout @ weight) * (_wide(saved) if keep_output else _slope(saved))
    return dpre.to(dout.dtype), dpre.sum(0), saved.new_empty(0) if keep_output else _gelu(saved)
