"""Tanh-GELU (Hendrycks and Gimpel, 2016) in Triton, forward and backward.

0.5 v (1 + tanh(u)) with u = sqrt(2 / pi) (v + 0.044715 v^3) is v sigmoid(2 u), one exponential instead of a tanh, which
would be the bottleneck. If GELU's output is kept, the forward pass leaves the derivative for the backward pass where it
has read the input, which nobody needs then. The backward pass sums its result by column while it has it: reading it
again for the bias's gradient costs a third of the whole.

A program owns M rows and N columns; all tensors are (rows, columns), dense.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.rounding import to

MINUS_LOG2_E: tl.constexpr = tl.constexpr(-1.4426950408889634)
SLOPE: tl.constexpr = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
CUBIC: tl.constexpr = tl.constexpr(0.07135481627159977)  # 0.044715 times that
FORWARD, BACKWARD = (4, 512, 4), (8, 128, 2)  # M, N and warps: of a few on an H200 the fastest, by 5 and 10 %
SLABS = 256  # partial sums of the bias's gradient, at most


@triton.jit
def _gelu(v):
    """GELU's result and slope."""
    squares = v * v
    s = 1 / (1 + tl.exp2(v * (SLOPE + CUBIC * squares) * MINUS_LOG2_E))
    out = v * s
    return out, s + (out - out * s) * (SLOPE + 3 * CUBIC * squares)


@triton.jit
def gelu_kernel(
    x, bias, out, rows, columns, M: tl.constexpr, N: tl.constexpr, KEEP_OUTPUT: tl.constexpr, UPCAST: tl.constexpr
):
    """out = gelu(x + bias) for a tile; with KEEP_OUTPUT GELU's slope takes the place of x."""
    o_m = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    o_n = tl.program_id(1) * N + tl.arange(0, N)
    mask = (o_m < rows)[:, None] & (o_n < columns)[None, :]
    o_x = o_m[:, None] * columns + o_n[None, :]
    b_bias = tl.load(bias + o_n, mask=o_n < columns, other=0.0).to(tl.float32)[None, :]
    b_out, slope = _gelu(tl.load(x + o_x, mask=mask, other=0.0).to(tl.float32) + b_bias)
    tl.store(out + o_x, to(b_out, out.dtype.element_ty, UPCAST), mask=mask)
    if KEEP_OUTPUT:
        tl.store(x + o_x, to(slope, out.dtype.element_ty, UPCAST), mask=mask)


@triton.jit
def gelu_gradient_kernel(
    dout,
    saved,
    bias,
    dx,
    recomputed,
    sums,
    rows,
    columns,
    slab,
    M: tl.constexpr,
    N: tl.constexpr,
    KEEP_OUTPUT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """dx for `slab` rows, a multiple of M, and its sum by column, a row of `sums` (slabs, columns) fp32.

    `saved` is GELU's slope or, unless KEEP_OUTPUT, its input but for the bias, from which its output is recomputed too.
    """
    number = tl.program_id(0)
    first = number.to(tl.int64) * slab
    o_n = tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros([M, N], tl.float32)
    if not KEEP_OUTPUT:
        b_bias = tl.load(bias + o_n, mask=o_n < columns, other=0.0).to(tl.float32)[None, :]
    for start in range(0, slab, M):
        o_m = first + start + tl.arange(0, M)
        mask = (o_m < rows)[:, None] & (o_n < columns)[None, :]
        o_x = o_m[:, None] * columns + o_n[None, :]
        slope = tl.load(saved + o_x, mask=mask, other=0.0).to(tl.float32)
        if not KEEP_OUTPUT:
            b_out, slope = _gelu(slope + b_bias)
            tl.store(recomputed + o_x, to(b_out, dx.dtype.element_ty, UPCAST), mask=mask)
        b_dx = tl.load(dout + o_x, mask=mask, other=0.0).to(tl.float32) * slope
        total += b_dx
        tl.store(dx + o_x, to(b_dx, dx.dtype.element_ty, UPCAST), mask=mask)
    tl.store(sums + number * columns + o_n, tl.sum(total, 0), mask=o_n < columns)


def forward_(x: Tensor, bias: Tensor, keep_output: bool) -> Tensor:
    """gelu(x + bias), x (N, C) and bias (C,), in x's dtype; with keep_output GELU's slope takes the place of x."""
    (rows, columns), (m, n, warps) = x.shape, FORWARD
    out = torch.empty_like(x)
    grid = triton.cdiv(rows, m), triton.cdiv(columns, n)
    with torch.cuda.device_of(x):
        gelu_kernel[grid](x, bias, out, rows, columns, m, n, keep_output, x.device.type == "cpu", num_warps=warps)
    return out


def backward(dout: Tensor, saved: Tensor, bias: Tensor, keep_output: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dout times GELU's slope (N, C), in its dtype; its sums over rows (C,), in fp32; GELU's result or nothing."""
    (rows, columns), (m, n, warps) = saved.shape, BACKWARD
    slab = max(triton.cdiv(triton.cdiv(rows, m), SLABS), 1) * m  # of a tile at least; of no rows there are none
    slabs = triton.cdiv(rows, slab)
    dx, sums = torch.empty_like(saved), torch.empty((slabs, columns), device=saved.device)
    recomputed = saved.new_empty(0) if keep_output else torch.empty_like(saved)
    tensors, constants = (dout, saved, bias, dx, recomputed, sums), (m, n, keep_output, saved.device.type == "cpu")
    grid = slabs, triton.cdiv(columns, n)
    with torch.cuda.device_of(saved):
        gelu_gradient_kernel[grid](*tensors, rows, columns, slab, *constants, num_warps=warps)
    return dx, sums.sum(0).to(torch.promote_types(saved.dtype, torch.float32)), recomputed
