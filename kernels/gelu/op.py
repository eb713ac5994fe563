"""gelu(x + bias) as PyTorch operators: Triton kernels on CUDA and ROCm, the PyTorch definition on CPU."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.operators import implement

_library = torch.library.Library("gelu", "DEF")
_library.define("forward(Tensor x, Tensor bias) -> Tensor")
_library.define("backward(Tensor dout, Tensor x, Tensor bias) -> (Tensor, Tensor)")


implement(_library, "gelu", ("forward", "backward"), gpu_module="triton_kernels")


@torch.library.register_fake("gelu::forward")
def _(x, bias):
    return torch.empty_like(x)


@torch.library.register_fake("gelu::backward")
def _(dout, x, bias):
    return torch.empty_like(x), torch.empty_like(bias)


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        ctx.save_for_backward(x, bias)
        return torch.ops.gelu.forward(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        return torch.ops.gelu.backward(dout.contiguous(), *ctx.saved_tensors)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias), its tanh form, in x's dtype; x (..., C) and bias (C,) in a floating dtype each.

    The bias is added in fp32 and its gradient summed in fp32, beside the gradient of x, in one pass.
    """
    return _BiasGelu.apply(x.contiguous().flatten(0, -2), bias).view(x.shape)
