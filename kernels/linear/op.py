"""A linear layer that adds its result to a residual stream, on PyTorch operators: GPU kernels, the definition on CPU.

Its weight gets its gradient in its own precision, whatever that of the products. Tensor cores sum products of 16 bits
in fp32. Under autocast the gradient of an fp32 weight is rounded to 16 bits all the same, written, and read again by a
kernel that only widens it. Here cuBLAS writes the sums as they are.
"""

import torch
from torch import Tensor, library
from torch.autograd.function import once_differentiable

from kernels.common.registering import implement, rows_of

_library = library.Library("linear", "DEF")
_library.define("forward(Tensor x, Tensor weight, Tensor bias, Tensor? residual) -> Tensor")
_library.define("weight_gradient(Tensor dout, Tensor x, ScalarType dtype) -> Tensor")
implement(_library, "linear", ("forward",))


@library.register_fake("linear::forward")
def _(x, weight, bias, residual):
    return x.new_empty((x.shape[0], weight.shape[0]))


def _weight_gradient(dout: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
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


def weight_gradient(dout: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """dout^T x, (C, D) in `dtype`, of dout (N, C) and x (N, D) in one dtype; not rounded from 16 bits to fp32.

    An operator, since torch 2.9's compiler does not know the product whose result is wider than its operands.
    """
    return torch.ops.linear.weight_gradient(dout, x, dtype)


def bias_gradient(dout: Tensor, dtype: torch.dtype) -> Tensor:
    """dout (N, C) summed over its rows, in fp32 or more, and then in `dtype`."""
    return dout.sum(0, dtype=torch.promote_types(dout.dtype, torch.float32)).to(dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, residual):
        matrix = weight.to(x.dtype)
        ctx.save_for_backward(x, matrix)
        ctx.dtypes = weight.dtype, bias.dtype
        return torch.ops.linear.forward(x, matrix, bias, residual)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        x, matrix = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        rows = dout.contiguous()
        with torch.autocast(dout.device.type, enabled=False):
            dx = rows @ matrix
        dbias = bias_gradient(rows, bias_dtype) if ctx.needs_input_grad[2] else None
        return dx, weight_gradient(rows, x, weight_dtype), dbias, dout if ctx.needs_input_grad[3] else None


def linear(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
    """x weight^T + bias + residual in x's dtype, autocast or not; x (..., D), weight (C, D), bias (C,), residual
    (..., C), in floating dtypes.

    The gradients of weight and bias come in their own dtypes, not rounded to 16 bits on the way to fp32. That of bias
    takes a pass over the result's: where the LayerNorm that follows can sum it (kernels.layer_norm), give it detached.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    shape = *x.shape[:-1], weight.shape[0]
    if (
        weight.shape[1:] != x.shape[-1:]
        or bias.shape != shape[-1:]
        or (residual is not None and residual.shape != shape)
    ):
        shapes = ", ".join(str(tuple(t.shape)) for t in (x, weight, bias, residual) if t is not None)
        raise ValueError(f"linear takes x (..., D), weight (C, D), bias (C,) and residual (..., C), not {shapes}")
    residual = None if residual is None else rows_of(residual.to(x.dtype))
    with torch.autocast(x.device.type, enabled=False):
        out = _Linear.apply(rows_of(x), weight, bias.contiguous(), residual)
    return torch.ops.aten._unsafe_view(out, shape)  # of a view FSDP2 warns where a module returns it
