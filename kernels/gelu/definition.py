"""A linear layer with tanh-GELU and its gradients in plain PyTorch: what the kernels compute, and what a CPU runs."""

import torch
import torch.nn.functional as F
from torch import Tensor


def _sum(pre: Tensor, bias: Tensor) -> Tensor:
    return pre.to(torch.promote_types(pre.dtype, torch.float32)) + bias


def _gelu(pre: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(_sum(pre, bias), approximate="tanh").to(pre.dtype)


def forward(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """pre = x weight^T and out = gelu(pre + bias), both (N, C) in x's dtype; x (N, D), weight (C, D) and bias (C,)."""
    pre = F.linear(x, weight)
    return pre, _gelu(pre, bias)


def backward(dout: Tensor, weight: Tensor, pre: Tensor, bias: Tensor, again: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of a layer after GELU, whose weight (D, C) is and whose output's gradient is dout (N, D): dpre (N, C) in pre's
    dtype; dbias (C,) in the bias's, dpre summed over its rows; and GELU's output, if wanted `again`, or nothing."""
    inputs = _sum(pre, bias)
    dpre = torch.ops.aten.gelu_backward((dout @ weight).to(inputs.dtype), inputs, approximate="tanh")
    return dpre.to(pre.dtype), dpre.sum(0).to(bias.dtype), _gelu(pre, bias) if again else pre.new_empty(0)
