"""LayerNorm (Ba et al., 2016) of a residual stream, as PyTorch operators.

The backward kernel also adds the stream's gradient and sums the gradients of weight and biases over the tokens.
torch.compile's own kernels read rows of more than 1024 columns twice and need several kernels for the sums.
"""

import torch
from torch import Tensor, library

from kernels.common.dtypes import accumulator
from kernels.common.registering import define, no_second_derivative, rows_of

_SAVED = "Tensor x, Tensor weight, Tensor mean, Tensor rstd"
_library = define(
    "layer_norm",
    "triton_kernels",
    forward="(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
    backward=f"(Tensor dout, Tensor dstream, {_SAVED}, bool with_sum) -> (Tensor, Tensor)",
)


@library.register_fake("layer_norm::forward")
def _(x, weight, bias, eps):
    mean = x.new_empty((x.shape[0], 1), dtype=accumulator(x.dtype))
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
        # FSDP2 warns of views that a module returns. Nothing else uses the base of this one.
        return x.view_as(x), torch.ops.aten._unsafe_view(out, x.shape)

    @staticmethod
    @no_second_derivative("normalise", "torch.nn.functional.layer_norm")
    def backward(ctx, dstream, dout):
        saved, (bias_dtype, added_bias_dtype) = ctx.saved_tensors, ctx.dtypes
        with_sum = added_bias_dtype is not None
        dx, sums = torch.ops.layer_norm.backward(rows_of(dout), rows_of(dstream), *saved, with_sum)
        dadded_bias = sums[2].to(added_bias_dtype) if with_sum else None
        return dx.view(dout.shape), sums[0].to(saved[1].dtype), sums[1].to(bias_dtype), None, dadded_bias


def normalise(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, added_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return x and its LayerNorm, both (..., C) in x's dtype. Use the returned x instead of x from then on.

    One kernel then computes LayerNorm's gradient and adds the gradient of the returned x. x (..., C), weight (C,) and
    bias (C,) have floating dtypes. The computation is in fp32, or fp64 for fp64 x, whether or not autocast is on.

    added_bias (C,) is a bias that x already contains and that got no gradient there (kernels.linear). Its gradient, the
    sum of x's gradient over the rows, is summed here in fp32.

    Raises:
        ValueError: weight, bias or added_bias is not (C,).
    """
    for name, parameter in (("weight", weight), ("bias", bias), ("added_bias", added_bias)):
        if parameter is not None and parameter.shape != x.shape[-1:]:
            raise ValueError(f"{name} is {tuple(parameter.shape)}; for x (..., {x.shape[-1]}), give ({x.shape[-1]},)")
    with torch.autocast(x.device.type, enabled=False):
        return _Normalise.apply(x, weight.contiguous(), bias.contiguous(), eps, added_bias)
