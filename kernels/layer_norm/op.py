"""LayerNorm (Ba et al., 2016) of a residual stream that goes on beside it, as PyTorch operators.

In the backward pass a kernel takes in the gradient of the stream, adds LayerNorm's, and sums those of weight and biases
over tokens on the way. The compiler's own kernels read rows of more than 1024 columns twice, and need several for the
sums.
"""

import torch
from torch import Tensor, library
from torch.autograd.function import once_differentiable

from kernels.common.registering import implement, rows_of

_library = library.Library("layer_norm", "DEF")
_library.define("forward(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)")
_library.define(
    "backward(Tensor dout, Tensor dstream, Tensor x, Tensor weight, Tensor mean, Tensor rstd, bool with_sum)"
    " -> (Tensor, Tensor)"
)
implement(_library, "layer_norm", ("forward", "backward"), gpu_module="triton_kernels")


@library.register_fake("layer_norm::forward")
def _(x, weight, bias, eps):
    mean = x.new_empty((x.shape[0], 1), dtype=torch.promote_types(x.dtype, torch.float32))
    return torch.empty_like(x), mean, torch.empty_like(mean)


@library.register_fake("layer_norm::backward")
def _(dout, dstream, x, weight, mean, rstd, with_sum):
    return torch.empty_like(x), mean.new_empty((3 if with_sum else 2, x.shape[1]))


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, added_bias):
        rows = rows_of(x)
        out, mean, rstd = torch.ops.layer_norm.forward(rows, weight, bias, eps)
        ctx.save_for_backward(rows, weight, mean, rstd)
        ctx.dtypes = bias.dtype, added_bias.dtype if ctx.needs_input_grad[4] else None
        # FSDP2 warns of views where a module returns them. Of this one nobody holds the base.
        return x.view_as(x), torch.ops.aten._unsafe_view(out, x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dstream, dout):
        saved, (bias_dtype, added_bias_dtype) = ctx.saved_tensors, ctx.dtypes
        with_sum = added_bias_dtype is not None
        dx, sums = torch.ops.layer_norm.backward(rows_of(dout), rows_of(dstream), *saved, with_sum)
        dadded_bias = sums[2].to(added_bias_dtype) if with_sum else None
        return dx.view(dout.shape), sums[0].to(saved[1].dtype), sums[1].to(bias_dtype), None, dadded_bias


def normalise(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, added_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x, to be used in its place from then on, and its layer_norm, both (..., C) in x's dtype.

    The first is there for its gradient, to which LayerNorm's is added in one kernel. x (..., C), weight and bias (C,),
    in floating dtypes; computed in fp32, or fp64 for such x, autocast or not.

    added_bias, (C,), is one that is in x already and has no gradient of there (kernels.linear): it gets the sum of x's
    gradient over the rows from here, in fp32 before that is rounded, which saves reading it.

    Raises:
        ValueError: added_bias is not (C,).
    """
    if added_bias is not None and added_bias.shape != x.shape[-1:]:
        raise ValueError(f"an added_bias of shape {tuple(added_bias.shape)} is none of {x.shape[-1]} columns")
    with torch.autocast(x.device.type, enabled=False):
        return _Normalise.apply(x, weight.contiguous(), bias.contiguous(), eps, added_bias)
