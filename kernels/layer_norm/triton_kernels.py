"""LayerNorm of a residual stream and its gradient in Triton, at the bandwidth of HBM: each row is read once.

Program p of P takes tiles p, p + P, p + 2 P, ..., each of M rows. In the backward pass it accumulates sums over its
rows, and the programs' sums are added in a fixed order afterwards. Programs with several tiles load two tiles ahead if
the tiles are small enough (see `stages`). In the forward pass short rows have one program per tile.

M rows and N columns of a tile, N a power of two of at least `columns`. All matrices are (rows, columns) and dense.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.launching import launch_kernel
from kernels.common.rounding import to
from kernels.layer_norm import definition

WIDEST = 8192  # columns that fit into a program's registers
ELEMENTS = 4096  # of a tile, which has at least one row
PER_THREAD = 32  # elements of a thread; twice this number in the forward pass
# Several rows of the forward pass share a program's loads of weight and bias. Rows of up to SHORT columns have tiles of
# at least FORWARD_ROWS rows. Longer rows have FORWARD_PROGRAMS programs. On an H200 in 16 bits these values are among
# the fastest of about a hundred choices: widths of 768, 1024, 2048 and 2560 take 9, 2, 2 and 14 % more than a copy.
FORWARD_ROWS, FORWARD_PROGRAMS, SHORT = 4, 4 * 132, 2048
PROGRAMS = 2 * 132  # of the backward: on an H200 in 16 bits, within 2 % of the time of a copy
# Bytes of a stage: a tile of each of the backward's three tensors. Two stages fit into the shared memory of any GPU.
STAGES, LARGEST_STAGE = 3, 3 * 8192


@triton.jit
def layer_norm_kernel(
    x, weight, bias, out, mean, rstd, rows, columns, eps,
    M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute LayerNorm of x, and mean and rstd (rows,) in fp32, M rows at a time."""
    o_n = tl.arange(0, N)
    inside = (o_n < columns)[None, :]
    b_weight = tl.load(weight + o_n, mask=o_n < columns, other=0.0).to(tl.float32)[None, :]
    b_bias = tl.load(bias + o_n, mask=o_n < columns, other=0.0).to(tl.float32)[None, :]
    for start in tl.range(tl.program_id(0) * M, rows, tl.num_programs(0) * M, num_stages=STAGES):
        o_m = start + tl.arange(0, M)
        mask = (o_m < rows)[:, None] & inside
        o_x = o_m.to(tl.int64)[:, None] * columns + o_n[None, :]  # [M, N]
        b_x = tl.load(x + o_x, mask=mask, other=0.0).to(tl.float32)
        # out = (x - mean) rstd weight + bias [M, N]
        b_mean = tl.sum(b_x, 1) / columns
        centred = tl.where(inside, b_x - b_mean[:, None], 0.0)
        b_rstd = 1 / tl.sqrt(tl.sum(centred * centred, 1) / columns + eps)
        b_out = centred * b_rstd[:, None] * b_weight + b_bias
        tl.store(out + o_x, to(b_out, out.dtype.element_ty, UPCAST), mask=mask)
        tl.store(mean + o_m, b_mean, mask=o_m < rows)
        tl.store(rstd + o_m, b_rstd, mask=o_m < rows)


@triton.jit
def layer_norm_gradient_kernel(
    dout, dstream, x, weight, mean, rstd, dx, sums, rows, columns,
    M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, WITH_SUM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute dx, M rows at a time, and the program's rows of sums (P, 2 or 3, columns) fp32: the gradients by weight
    and bias and, WITH_SUM, the sum of dx over the rows.
    """
    o_n = tl.arange(0, N)
    inside = o_n < columns
    b_weight = tl.load(weight + o_n, mask=inside, other=0.0).to(tl.float32)
    by_weight, by_bias = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
    total = tl.zeros([M, N], tl.float32)
    for start in tl.range(tl.program_id(0) * M, rows, tl.num_programs(0) * M, num_stages=STAGES):
        o_m = start + tl.arange(0, M)
        mask = (o_m < rows)[:, None] & inside[None, :]
        o_x = o_m.to(tl.int64)[:, None] * columns + o_n[None, :]  # [M, N]
        b_dout = tl.load(dout + o_x, mask=mask, other=0.0).to(tl.float32)
        b_x = tl.load(x + o_x, mask=mask, other=0.0).to(tl.float32)
        b_dstream = tl.load(dstream + o_x, mask=mask, other=0.0).to(tl.float32)
        b_rstd = tl.load(rstd + o_m, mask=o_m < rows, other=0.0)[:, None]
        normalised = (b_x - tl.load(mean + o_m, mask=o_m < rows, other=0.0)[:, None]) * b_rstd
        slope = b_dout * b_weight[None, :]  # zero past the last column, unlike `normalised`
        # dx = dstream + rstd (slope - mean(slope) - normalised mean(slope normalised))
        along = tl.sum(slope * normalised, 1)[:, None] / columns
        b_dx = b_dstream + b_rstd * (slope - tl.sum(slope, 1)[:, None] / columns - normalised * along)
        tl.store(dx + o_x, to(b_dx, dx.dtype.element_ty, UPCAST), mask=mask)
        by_weight += b_dout * normalised
        by_bias += b_dout
        if WITH_SUM:
            total += b_dx
    p_sums = sums + tl.program_id(0).to(tl.int64) * (3 if WITH_SUM else 2) * columns + o_n
    tl.store(p_sums, tl.sum(by_weight, 0), mask=inside)
    tl.store(p_sums + columns, tl.sum(by_bias, 0), mask=inside)
    if WITH_SUM:
        tl.store(p_sums + 2 * columns, tl.sum(total, 0), mask=inside)


def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute definition.forward, which itself runs for fp64 and for rows wider than WIDEST."""
    rows, columns = x.shape
    if columns > WIDEST or x.dtype == torch.float64:
        return definition.forward(x, weight, bias, eps)
    m, n, warps, ahead = forward_tile(columns, x.dtype)
    programs = -(-rows // m) if columns <= SHORT else min(-(-rows // m), FORWARD_PROGRAMS)
    out = torch.empty_like(x)
    mean, rstd = (torch.empty((rows, 1), device=x.device) for _ in range(2))
    tensors, key = (x, weight, bias, out, mean, rstd), (x.dtype, weight.dtype, bias.dtype, x.device)
    constants = m, n, ahead, x.device.type == "cpu"
    with torch.cuda.device_of(x):
        launch_kernel(layer_norm_kernel, key, programs, tensors, (rows, columns, eps), constants, num_warps=warps)
    return out, mean, rstd


def backward(
    dout: Tensor, dstream: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, with_sum: bool
) -> tuple[Tensor, Tensor]:
    """Compute definition.backward, which itself runs for fp64 and for rows wider than WIDEST."""
    rows, columns = x.shape
    if columns > WIDEST or x.dtype == torch.float64:
        return definition.backward(dout, dstream, x, weight, mean, rstd, with_sum)
    m, n, warps = backward_tile(columns)
    programs = min(-(-rows // m), PROGRAMS)
    dx, sums = torch.empty_like(x), torch.empty((programs, 3 if with_sum else 2, columns), device=x.device)
    tensors = dout, dstream, x, weight, mean, rstd, dx, sums
    key = x.dtype, weight.dtype, x.device
    constants = m, n, stages(m * n, x.dtype), with_sum, x.device.type == "cpu"
    with torch.cuda.device_of(x):
        launch_kernel(layer_norm_gradient_kernel, key, programs, tensors, (rows, columns), constants, num_warps=warps)
    return dx, sums.sum(0)


@cache
def backward_tile(columns: int) -> tuple[int, int, int]:
    """Return M, N and the warps of layer_norm_gradient_kernel."""
    n = triton.next_power_of_2(columns)
    m = max(ELEMENTS // n, 1)
    return m, n, max(m * n // (32 * PER_THREAD), 1)


@cache
def forward_tile(columns: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return M, N, the warps and STAGES of layer_norm_kernel."""
    n = triton.next_power_of_2(columns)
    m = max(ELEMENTS // n, FORWARD_ROWS if columns <= SHORT else 1)
    return m, n, max(m * n // (32 * 2 * PER_THREAD), 1), 1 if columns <= SHORT else stages(m * n, dtype)


def stages(elements: int, dtype: torch.dtype) -> int:
    """Return STAGES of a kernel whose programs take several tiles of `elements` elements."""
    return STAGES if 3 * elements * dtype.itemsize <= LARGEST_STAGE else 1
