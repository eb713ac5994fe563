"""Tanh-GELU of x + bias and its gradients in plain PyTorch: what the Triton kernels compute, and what runs on a CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor


def _sum(x: Tensor, bias: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)) + bias


def forward(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias), x (N, C) and bias (C,), in x's dtype."""
    return F.gelu(_sum(x, bias), approximate="tanh").to(x.dtype)


def backward(dout: Tensor, x: Tensor, bias: Tensor, again: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dx (N, C) in x's dtype, and dbias (C,) in the bias's: dx summed over its rows; and what forward gave, if it is
    wanted `again`, or an empty tensor."""
    inputs = _sum(x, bias)
    dx = torch.ops.aten.gelu_backward(dout.to(inputs.dtype), inputs, approximate="tanh")
    return dx.to(x.dtype), dx.sum(0).to(bias.dtype), forward(x, bias) if again else x.new_empty(0)
