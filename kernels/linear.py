"""A linear layer whose weight gets its gradient in its own precision, whatever that of the products.

Tensor cores sum products of 16 bits in fp32. Under autocast the gradient of an fp32 weight is rounded to 16 bits all
the same, written, and read again by a kernel that only widens it. Here cuBLAS writes the sums as they are.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, library
from torch.autograd.function import once_differentiable

from kernels.operators import rows_of

_library = library.Library("linear", "DEF")
_library.define("weight_gradient(Tensor dout, Tensor x, ScalarType dtype) -> Tensor")


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


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        matrix = weight.to(x.dtype)
        ctx.save_for_backward(x, matrix)
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        return F.linear(x, matrix, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        x, matrix = ctx.saved_tensors
        rows = rows_of(dout)
        with torch.autocast(dout.device.type, enabled=False):
            dx = (rows @ matrix).view(x.shape)
        dweight = weight_gradient(rows, rows_of(x), ctx.weight_dtype)
        dbias = None
        if ctx.needs_input_grad[2]:
            dbias = rows.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(ctx.bias_dtype)
        return dx, dweight, dbias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias in x's dtype, autocast or not; x (..., D), weight (C, D) and bias (C,) in floating dtypes.

    The gradients of weight and bias come in their own dtypes, not rounded to 16 bits on the way to fp32.
    """
    with torch.autocast(x.device.type, enabled=False):
        return _Linear.apply(x, weight, bias)
