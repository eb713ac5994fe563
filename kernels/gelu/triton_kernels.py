"""Tanh-GELU (Hendrycks and Gimpel, 2016) in Triton, forward and backward.

0.5 v (1 + tanh(u)) with u = sqrt(2 / pi) (v + 0.044715 v^3) equals v sigmoid(2 u). It takes one exponential, and a tanh
would be the bottleneck. With KEEP_OUTPUT the forward pass overwrites its input with GELU's derivative for the backward
pass. The backward pass also sums its result by column for the bias's gradient: a separate pass would cost a third.

M rows and N columns of a tile. All tensors are (rows, columns) and dense.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.dtypes import accumulator
from kernels.common.rounding import to

MINUS_LOG2_E: tl.constexpr = tl.constexpr(-1.4426950408889634)
SLOPE: tl.constexpr = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
CUBIC: tl.constexpr = tl.constexpr(0.07135481627159977)  # 0.044715 SLOPE
FORWARD, BACKWARD = (4, 512, 4), (8, 128, 2)  # M, N, warps: the fastest of a few on an H200, by 5 and 10 %
SLABS = 256  # at most so many partial sums of the bias's gradient


@triton.jit
def gelu_and_slope(v):
    """Return GELU and its slope, both in fp32."""
    squares = v * v
    s = 1 / (1 + tl.exp2(v * (SLOPE + CUBIC * squares) * MINUS_LOG2_E))
    out = v * s
    return out, s + (out - out * s) * (SLOPE + 3 * CUBIC * squares)


@triton.jit
def gelu_kernel(
    x, bias, out, rows, columns, M: tl.constexpr, N: tl.constexpr, KEEP_OUTPUT: tl.constexpr, UPCAST: tl.constexpr
):
    """Compute out = gelu(x + bias) for one tile. With KEEP_OUTPUT, GELU's slope overwrites x."""
    o_m = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    o_n = tl.program_id(1) * N + tl.arange(0, N)
    mask = (o_m < rows)[:, None] & (o_n < columns)[None, :]
    o_x = o_m[:, None] * columns + o_n[None, :]  # [M, N]
    b_bias = tl.load(bias + o_n, mask=o_n < columns, other=0.0).to(tl.float32)[None, :]  # [1, N]
    b_out, slope = gelu_and_slope(tl.load(x + o_x, mask=mask, other=0.0).to(tl.float32) + b_bias)
    tl.store(out + o_x, to(b_out, out.dtype.element_ty, UPCAST), mask=mask)
    if KEEP_OUTPUT:
        tl.store(x + o_x, to(slope, out.dtype.element_ty, UPCAST), mask=mask)


@triton.jit
def gelu_gradient_kernel(
    dout, saved, bias, dx, recomputed, sums, rows, columns, slab,
    M: tl.constexpr, N: tl.constexpr, KEEP_OUTPUT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute dx = dout * slope for `slab` rows, a multiple of M, and their sum, a row of sums (slabs, columns) fp32.

    With KEEP_OUTPUT `saved` is GELU's slope. Without it, `saved` is GELU's input before the bias, and the kernel
    recomputes the slope and GELU's output.
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
        o_x = o_m[:, None] * columns + o_n[None, :]  # [M, N]
        slope = tl.load(saved + o_x, mask=mask, other=0.0).to(tl.float32)
        if not KEEP_OUTPUT:
            b_out, slope = gelu_and_slope(slope + b_bias)
            tl.store(recomputed + o_x, to(b_out, dx.dtype.element_ty, UPCAST), mask=mask)
        # dx = dout * slope [M, N]
        b_dx = tl.load(dout + o_x, mask=mask, other=0.0).to(tl.float32) * slope
        total += b_dx
        tl.store(dx + o_x, to(b_dx, dx.dtype.element_ty, UPCAST), mask=mask)
    tl.store(sums + number * columns + o_n, tl.sum(total, 0), mask=o_n < columns)


def forward_(x: Tensor, bias: Tensor, keep_output: bool) -> Tensor:
    """Return gelu(x + bias) for x (N, C) and bias (C,), in x's dtype. With keep_output GELU's slope overwrites x."""
    (rows, columns), (m, n, warps) = x.shape, FORWARD
    out = torch.empty_like(x)
    grid = triton.cdiv(rows, m), triton.cdiv(columns, n)
    with torch.cuda.device_of(x):
        gelu_kernel[grid](x, bias, out, rows, columns, m, n, keep_output, x.device.type == "cpu", num_warps=warps)
    return out


def backward(dout: Tensor, saved: Tensor, bias: Tensor, keep_output: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return dout times GELU's slope (N, C), its sum over rows (C,) in fp32, and GELU's output or an empty tensor."""
    (rows, columns), (m, n, warps) = saved.shape, BACKWARD
    slab = max(triton.cdiv(triton.cdiv(rows, m), SLABS), 1) * m  # at least one tile, also for zero rows
    slabs = triton.cdiv(rows, slab)
    dx, sums = torch.empty_like(saved), torch.empty((slabs, columns), device=saved.device)
    recomputed = saved.new_empty(0) if keep_output else torch.empty_like(saved)
    tensors, constants = (dout, saved, bias, dx, recomputed, sums), (m, n, keep_output, saved.device.type == "cpu")
    grid = slabs, triton.cdiv(columns, n)
    with torch.cuda.device_of(saved):
        gelu_gradient_kernel[grid](*tensors, rows, columns, slab, *constants, num_warps=warps)
    return dx, sums.sum(0).to(accumulator(saved.dtype)), recomputed
