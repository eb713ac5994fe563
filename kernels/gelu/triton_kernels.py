"""Tanh-GELU (Hendrycks and Gimpel, 2016) of x + bias in Triton, forward and backward.

0.5 v (1 + tanh(u)) with u = sqrt(2 / pi) (v + 0.044715 v^3) is v sigmoid(2 u), one exponential instead of a tanh, which
would be the bottleneck. The backward pass sums dx by column while it has it: reading it again for the bias's gradient
costs a third of the whole.

A program owns M rows and N columns; x is (rows, columns), dense.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rounding import to

MINUS_LOG2_E: tl.constexpr = tl.constexpr(-1.4426950408889634)
SLOPE: tl.constexpr = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
CUBIC: tl.constexpr = tl.constexpr(0.07135481627159977)  # 0.044715 times that
FORWARD, BACKWARD = (4, 512, 4), (8, 128, 2)  # M, N and warps: of a few on an H200 the fastest, by 5 and 10 %
SLABS = 256  # partial sums of the bias's gradient, at most


@triton.jit
def _sigmoid(v):
    """sigmoid(2 u) of the above."""
    return 1 / (1 + tl.exp2(v * (SLOPE + CUBIC * v * v) * MINUS_LOG2_E))


@triton.jit
def gelu_kernel(x, bias, out, rows, columns, M: tl.constexpr, N: tl.constexpr, UPCAST: tl.constexpr):
    """out = gelu(x + bias) for a tile."""
    o_m = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    o_n = tl.program_id(1) * N + tl.arange(0, N)
    mask = (o_m < rows)[:, None] & (o_n < columns)[None, :]
    o_x = o_m[:, None] * columns + o_n[None, :]
    b_bias = tl.load(bias + o_n, mask=o_n < columns, other=0.0).to(tl.float32)
    v = tl.load(x + o_x, mask=mask, other=0.0).to(tl.float32) + b_bias[None, :]
    tl.store(out + o_x, to(v * _sigmoid(v), out.dtype.element_ty, UPCAST), mask=mask)


@triton.jit
def gelu_gradient_kernel(
    dout,
    x,
    bias,
    dx,
    out,
    partial,
    rows,
    columns,
    slab,
    M: tl.constexpr,
    N: tl.constexpr,
    AGAIN: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """dx for `slab` rows, a multiple of M, and its sum by column, a row of `partial` (slabs, columns) fp32; if it is
    wanted AGAIN, out = gelu(x + bias) too."""
    number = tl.program_id(0)
    first = number.to(tl.int64) * slab
    o_n = tl.program_id(1) * N + tl.arange(0, N)
    b_bias = tl.load(bias + o_n, mask=o_n < columns, other=0.0).to(tl.float32)
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, slab, M):
        o_m = first + start + tl.arange(0, M)
        mask = (o_m < rows)[:, None] & (o_n < columns)[None, :]
        o_x = o_m[:, None] * columns + o_n[None, :]
        v = tl.load(x + o_x, mask=mask, other=0.0).to(tl.float32) + b_bias[None, :]
        b_dout = tl.load(dout + o_x, mask=mask, other=0.0).to(tl.float32)
        s = _sigmoid(v)
        b_dx = b_dout * (s + v * s * (1 - s) * (SLOPE + 3 * CUBIC * v * v))
        total += b_dx
        tl.store(dx + o_x, to(b_dx, dx.dtype.element_ty, UPCAST), mask=mask)
        if AGAIN:
            tl.store(out + o_x, to(v * s, out.dtype.element_ty, UPCAST), mask=mask)
    tl.store(partial + number * columns + o_n, tl.sum(total, 0), mask=o_n < columns)


def forward(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias), x (N, C) and bias (C,), in x's dtype."""
    (rows, columns), (m, n, warps) = x.shape, FORWARD
    out = torch.empty_like(x)
    grid = triton.cdiv(rows, m), triton.cdiv(columns, n)
    gelu_kernel[grid](x, bias, out, rows, columns, m, n, x.device.type == "cpu", num_warps=warps)
    return out


def backward(dout: Tensor, x: Tensor, bias: Tensor, again: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dx (N, C) in x's dtype, and dbias (C,) in the bias's: dx summed over its rows; and what forward gave, if it is
    wanted `again`, or an empty tensor."""
    (rows, columns), (m, n, warps) = x.shape, BACKWARD
    slab = triton.cdiv(triton.cdiv(rows, m), SLABS) * m
    slabs = triton.cdiv(rows, slab)
    dx, partial = torch.empty_like(x), torch.empty((slabs, columns), device=x.device)
    out = torch.empty_like(x) if again else x.new_empty(0)
    arguments = dout, x, bias, dx, out, partial, rows, columns, slab, m, n, again, x.device.type == "cpu"
    gelu_gradient_kernel[slabs, triton.cdiv(columns, n)](*arguments, num_warps=warps)
    return dx, partial.sum(0).to(bias.dtype), out
