"""LayerNorm (Ba et al., 2016) whose backward pass takes in the gradient of the residual stream, as PyTorch operators.

Forward is left to the compiler, which joins it with the addition before it at the speed of memory. Of the backward pass
it makes a kernel for the rows, and several for the sums over tokens; here one kernel does both and adds the gradients
of the stream, and a small one adds what its programs have summed.
"""

import torch
from torch import Tensor, library
from torch.autograd.function import once_differentiable

from kernels.operators import implement

_library = library.Library("layer_norm", "DEF")
_library.define(
    "backward(Tensor dout, Tensor dstream, Tensor x, Tensor weight, Tensor mean, Tensor rstd)"
    " -> (Tensor, Tensor, Tensor)"
)
implement(_library, "layer_norm", ("backward",), gpu_module="triton_kernel")


@library.register_fake("layer_norm::backward")
def _(dout, dstream, x, weight, mean, rstd):
    sums = mean.new_empty(x.shape[1])
    return torch.empty_like(x), sums, torch.empty_like(sums)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        wide = torch.promote_types(x.dtype, torch.float32)
        affine = weight.to(wide), bias.to(wide)
        out, mean, rstd = torch.native_layer_norm(x.to(wide), x.shape[1:], *affine, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = bias.dtype
        return x.view_as(x), out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dstream, dout):
        x, weight, mean, rstd = ctx.saved_tensors
        gradients = dout.contiguous(), dstream.contiguous()
        dx, dweight, dbias = torch.ops.layer_norm.backward(*gradients, x, weight.contiguous(), mean, rstd)
        return dx, dweight.to(weight.dtype), dbias.to(ctx.bias_dtype), None


def normalise(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x as it is, and layer_norm(x) weight + bias over its last dimension, both (..., C) in x's dtype.

    The first is to be used in x's place from then on: its gradient and LayerNorm's are added in one kernel. x (..., C),
    weight and bias (C,), in floating dtypes; computed in fp32, or fp64 for such x, autocast or not.
    """
    with torch.autocast(x.device.type, enabled=False):
        stream, out = _Normalise.apply(x.contiguous().flatten(0, -2), weight, bias, eps)
    return stream.view(x.shape), out.view(x.shape)
