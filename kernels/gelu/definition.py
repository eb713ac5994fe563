"""A linear layer with tanh-GELU and its gradient in plain PyTorch: the kernels' definition, and the CPU's path.

N tokens, D inputs, C outputs of the layer.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.dtypes import accumulator


def _wide(x: Tensor) -> Tensor:
    return x.to(accumulator(x.dtype))


def _biased(product: Tensor, bias: Tensor) -> Tensor:
    wide = _wide(product)
    return wide + bias.to(wide.dtype)


def _gelu(pre: Tensor) -> Tensor:
    return F.gelu(pre, approximate="tanh")


def _slope(pre: Tensor) -> Tensor:
    """Return GELU's derivative."""
    return torch.ops.aten.gelu_backward(torch.ones_like(pre), pre, approximate="tanh")


def forward(x: Tensor, weight: Tensor, bias: Tensor, keep_output: bool) -> tuple[Tensor, Tensor]:
    """Return the tensor saved for the gradient, and gelu(pre) for pre = x weight^T + bias; both (N, C) in x's dtype.

    x (N, D), weight (C, D), bias (C,). The saved tensor is GELU's slope at pre with keep_output, or else x weight^T.
    x weight^T is rounded to x's dtype; pre, its sum with the bias, stays in fp32 or more.
    """
    product = F.linear(x, weight)
    pre = _biased(product, bias)
    return _slope(pre).to(x.dtype) if keep_output else product, _gelu(pre).to(x.dtype)


def backward(
    dout: Tensor, weight: Tensor, bias: Tensor, saved: Tensor, keep_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dpre, its sum over the rows, and the recomputed gelu(pre) (empty with keep_output).

    dout (N, D) is the output gradient of the layer after GELU, and weight (D, C) that layer's weight. `forward` took
    bias and returned saved. dpre is (N, C) in dout's dtype. Its sum (C,) adds unrounded terms in fp32 or more.
    """
    dpre = _wide(dout @ weight) * (_wide(saved) if keep_output else _slope(_biased(saved, bias)))
    recomputed = saved.new_empty(0) if keep_output else _gelu(_biased(saved, bias)).to(saved.dtype)
    return dpre.to(dout.dtype), dpre.sum(0), recomputed
