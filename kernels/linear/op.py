"""A linear layer with a residual as PyTorch operators.

The weight's gradient is computed in the weight's own dtype: cuBLAS writes the fp32 sums of the tensor cores. torch's
autocast rounds the gradient of an fp32 weight to 16 bits, and another kernel widens it again.

N tokens, D inputs, C outputs.
"""

import torch
from torch import Tensor, library

from kernels.common.dtypes import accumulator
from kernels.common.registering import define, no_second_derivative, rows_of

_library = define("linear", forward="(Tensor x, Tensor weight, Tensor bias, Tensor? residual) -> Tensor")
_library.define("weight_gradient(Tensor dout, Tensor x, ScalarType dtype) -> Tensor")


@library.register_fake("linear::forward")
def _(x, weight, bias, residual):
    return x.new_empty((x.shape[0], weight.shape[0]))


def _weight_gradient(dout: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return dout^T x, (C, D) in `dtype`, for dout (N, C) and x (N, D) of one dtype, without a rounding in between.

    This is an operator because torch 2.9's compiler does not know products with a result wider than their operands.
    """
    if not (x.dtype.itemsize == 2 and dtype == torch.float32):
        return (dout.T @ x).to(dtype)
    if x.device.type == "cpu":
        return dout.T.float() @ x.float()
    return torch.mm(dout.T, x, out_dtype=dtype)


for _device in ("cpu", "cuda"):
    _library.impl("weight_gradient", torch.autocast(_device, enabled=False)(_weight_gradient), _device.upper())


@library.register_fake("linear::weight_gradient")
def _(dout, x, dtype):
    return x.new_empty((dout.shape[1], x.shape[1]), dtype=dtype)


def bias_gradient(dout: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of dout (N, C) over its rows, (C,), computed in fp32 or more and rounded to `dtype`."""
    return dout.sum(0, dtype=accumulator(dout.dtype)).to(dtype)


def apply_to_rows(
    function: type[torch.autograd.Function], x: Tensor, parameters: tuple, residual: Tensor | None, *options
) -> Tensor:
    """Return function.apply(x, *parameters, residual, *options), (..., C), with autocast off.

    `function` gets x (..., D) as rows (N, D), and residual (..., C), if not None, as rows (N, C) in x's dtype.
    """
    residual = None if residual is None else rows_of(residual.to(x.dtype))
    with torch.autocast(x.device.type, enabled=False):
        out = function.apply(rows_of(x), *parameters, residual, *options)
    # FSDP2 warns of views that a module returns.
    return torch.ops.aten._unsafe_view(out, (*x.shape[:-1], out.shape[-1]))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, residual):
        matrix = weight.to(x.dtype)
        ctx.save_for_backward(x, matrix)
        ctx.dtypes = weight.dtype, bias.dtype
        return torch.ops.linear.forward(x, matrix, bias, residual)

    @staticmethod
    @no_second_derivative("linear", "torch.nn.functional.linear")
    def backward(ctx, dout):
        x, matrix = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        rows = dout.contiguous()
        with torch.autocast(dout.device.type, enabled=False):
            dx = rows @ matrix
        dbias = bias_gradient(rows, bias_dtype) if ctx.needs_input_grad[2] else None
        dweight = torch.ops.linear.weight_gradient(rows, x, weight_dtype)
        return dx, dweight, dbias, dout if ctx.needs_input_grad[3] else None


def check_linear_shapes(name: str, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None) -> None:
    """Raise a ValueError if the shapes of the linear layer called `name` do not fit each other."""
    shape = *x.shape[:-1], weight.shape[0]
    if (
        weight.shape[1:] != x.shape[-1:]
        or bias.shape != shape[-1:]
        or (residual is not None and residual.shape != shape)
    ):
        shapes = ", ".join(str(tuple(t.shape)) for t in (x, weight, bias, residual) if t is not None)
        raise ValueError(
            f"the shapes {shapes} do not fit; give {name} x (..., D), weight (C, D), bias (C,) and residual (..., C)"
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias + residual, (..., C) in x's dtype, whether or not autocast is on.

    The shapes are x (..., D), weight (C, D), bias (C,) and residual (..., C), of any floating dtypes. The
    gradients of weight and bias have their parameters' dtypes and are never rounded to 16 bits on the way to fp32. If
    the LayerNorm that follows computes the gradient of the bias (kernels.layer_norm), detach bias.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    check_linear_shapes("linear", x, weight, bias, residual)
    return apply_to_rows(_Linear, x, (weight, bias.contiguous()), residual)
