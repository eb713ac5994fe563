"""A linear layer with tanh-GELU and its gradient in plain PyTorch: what the kernels compute, and what a CPU runs."""

import torch
import torch.nn.functional as F
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _biased(product: Tensor, bias: Tensor) -> Tensor:
    """The sum, in fp32 or more."""
    wide = _wide(product)
    return wide + bias.to(wide.dtype)


def _slope(pre: Tensor) -> Tensor:
    """GELU's derivative in pre's precision."""
    return torch.ops.aten.gelu_backward(torch.ones_like(pre), pre, approximate="tanh")


def _gelu(pre: Tensor) -> Tensor:
    """GELU in pre's precision."""
    return F.gelu(pre, approximate="tanh")


def forward(x: Tensor, weight: Tensor, bias: Tensor, keep_output: bool) -> tuple[Tensor, Tensor]:
    """What is saved for the gradient, and gelu(pre) for pre = x weight^T + bias; both (N, C) in x's dtype.

    x (N, D), weight (C, D), bias (C,). With keep_output the gradient needs GELU's slope at pre, without it the product
    x weight^T. That is rounded to x's dtype; pre, the sum with the bias in fp32 or more, is not.
    """
    product = F.linear(x, weight)
    pre = _biased(product, bias)
    return _slope(pre).to(x.dtype) if keep_output else product, _gelu(pre).to(x.dtype)


def backward(
    dout: Tensor, weight: Tensor, bias: Tensor, saved: Tensor, keep_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dpre (N, C) in dout's dtype; dpre summed over its rows before it is rounded, (C,) in fp32 or more; and without
    keep_output gelu(pre) once more.

    dout (N, D) is the gradient of the output of the layer after GELU, whose weight (D, C) is; bias and saved are
    forward's.
    """
    dpre = _wide(dout @ weight) * (_wide(saved) if keep_output else _slope(_biased(saved, bias)))
    recomputed = saved.new_empty(0) if keep_output else _gelu(_biased(saved, bias)).to(saved.dtype)
    return dpre.to(dout.dtype), dpre.sum(0), recomputed
