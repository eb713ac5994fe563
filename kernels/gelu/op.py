"""gelu(x + bias) as PyTorch operators: Triton kernels on CUDA and ROCm, the PyTorch definition on CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.operators import implement

_library = torch.library.Library("gelu", "DEF")
_library.define("forward(Tensor x, Tensor bias) -> Tensor")
_library.define("backward(Tensor dout, Tensor x, Tensor bias, bool again) -> (Tensor, Tensor, Tensor)")


implement(_library, "gelu", ("forward", "backward"), gpu_module="triton_kernels")


@torch.library.register_fake("gelu::forward")
def _(x, bias):
    return torch.empty_like(x)


@torch.library.register_fake("gelu::backward")
def _(dout, x, bias, again):
    return torch.empty_like(x), torch.empty_like(bias), torch.empty_like(x) if again else x.new_empty(0)


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        ctx.save_for_backward(x, bias)
        return torch.ops.gelu.forward(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        return torch.ops.gelu.backward(dout.contiguous(), *ctx.saved_tensors, False)[:2]


class _BiasGeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, weight, out_bias):
        ctx.save_for_backward(x, bias, weight)
        return F.linear(torch.ops.gelu.forward(x, bias), weight, out_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        x, bias, weight = ctx.saved_tensors
        dx, dbias, activated = torch.ops.gelu.backward(dout @ weight, x, bias, True)
        return dx, dbias, dout.T @ activated, dout.sum(0)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias), its tanh form, in x's dtype; x (..., C) and bias (C,) in a floating dtype each.

    The bias is added in fp32 and its gradient summed in fp32, beside the gradient of x, in one pass.
    """
    return _BiasGelu.apply(x.contiguous().flatten(0, -2), bias).view(x.shape)


def bias_gelu_linear(x: Tensor, bias: Tensor, weight: Tensor, out_bias: Tensor) -> Tensor:
    """gelu(x + bias) weight^T + out_bias, without keeping what GELU gives for the backward pass, which makes it again.

    x (..., C), bias (C,), weight (D, C) and out_bias (D,); the product and its gradients are computed in x's dtype.
    """
    weight, out_bias = (parameter.to(x.dtype) for parameter in (weight, out_bias))
    return _BiasGeluLinear.apply(x.contiguous().flatten(0, -2), bias, weight, out_bias).view(*x.shape[:-1], -1)
