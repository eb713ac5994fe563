"""LayerNorm's gradient in Triton, by the bandwidth of HBM: each row is read once, and summed by column on the way.

A program takes every P-th tile of M rows, of P programs, and holds what its rows sum to; the programs' sums are added
in a fixed order afterwards. So that few programs keep HBM busy, they load two tiles ahead of the one at hand, where
shared memory holds these.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launcher import launch
from kernels.layer_norm import definition
from kernels.rounding import to

WIDEST = 8192  # columns that a program has registers for
# Of a tile, which has one row at least, and of a thread; programs. On an H200, at widths of 768, 2048 and 2560 in 16
# bits, the fastest of some thirty choices each: within 2 % of the time in which as much is copied.
ELEMENTS, PER_THREAD, PROGRAMS = 4096, 32, 2 * 132
STAGES, LARGEST_STAGE = 3, 3 * 8192  # bytes of three tiles, two of which fit into the shared memory of any GPU


@triton.jit
def layer_norm_gradient_kernel(
    dout, dstream, x, weight, mean, rstd, dx, sums, rows, columns,
    M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dx for tiles of M rows; the gradients by weight and bias of this program's, two rows of `sums` (2 P, C) fp32.

    dout, dstream, x and dx are (rows, columns), dense; N is a power of two of at least `columns`.
    """
    o_n = tl.arange(0, N)
    inside = o_n < columns
    b_weight = tl.load(weight + o_n, mask=inside, other=0.0).to(tl.float32)
    by_weight, by_bias = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
    for start in tl.range(tl.program_id(0) * M, rows, tl.num_programs(0) * M, num_stages=STAGES):
        o_m = start + tl.arange(0, M)
        mask = (o_m < rows)[:, None] & inside[None, :]
        o_x = o_m.to(tl.int64)[:, None] * columns + o_n[None, :]
        b_dout = tl.load(dout + o_x, mask=mask, other=0.0).to(tl.float32)
        b_x = tl.load(x + o_x, mask=mask, other=0.0).to(tl.float32)
        b_dstream = tl.load(dstream + o_x, mask=mask, other=0.0).to(tl.float32)
        b_rstd = tl.load(rstd + o_m, mask=o_m < rows, other=0.0)[:, None]
        normalised = (b_x - tl.load(mean + o_m, mask=o_m < rows, other=0.0)[:, None]) * b_rstd
        slope = b_dout * b_weight[None, :]  # zero past the last column, where `normalised` is not
        along = tl.sum(slope * normalised, 1)[:, None] / columns
        b_dx = b_dstream + b_rstd * (slope - tl.sum(slope, 1)[:, None] / columns - normalised * along)
        tl.store(dx + o_x, to(b_dx, dx.dtype.element_ty, UPCAST), mask=mask)
        by_weight += b_dout * normalised
        by_bias += b_dout
    p_sums = sums + tl.program_id(0).to(tl.int64) * 2 * columns + o_n
    tl.store(p_sums, tl.sum(by_weight, 0), mask=inside)
    tl.store(p_sums + columns, tl.sum(by_bias, 0), mask=inside)


def backward(
    dout: Tensor, dstream: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Same contract as definition.backward, which computes rows wider than WIDEST and fp64."""
    rows, columns = x.shape
    if columns > WIDEST or x.dtype == torch.float64:
        return definition.backward(dout, dstream, x, weight, mean, rstd)
    constants, warps = configuration(columns, x.dtype)
    programs = min(triton.cdiv(rows, constants[0]), PROGRAMS)
    dx, sums = torch.empty_like(x), torch.empty((programs, 2, columns), device=x.device)
    tensors = dout, dstream, x, weight, mean, rstd, dx, sums
    key, constants = (x.dtype, weight.dtype, x.device), (*constants, x.device.type == "cpu")
    with torch.cuda.device_of(x):
        launch(layer_norm_gradient_kernel, key, programs, tensors, (rows, columns), constants, num_warps=warps)
    dweight, dbias = sums.sum(0)
    return dx, dweight, dbias.clone()  # results of an operator share no memory


def configuration(columns: int, dtype: torch.dtype) -> tuple[tuple[int, int, int], int]:
    """M, N and STAGES of the kernel, and its warps."""
    n = triton.next_power_of_2(columns)
    m = max(ELEMENTS // n, 1)
    stages = STAGES if 3 * m * n * dtype.itemsize <= LARGEST_STAGE else 1
    return (m, n, stages), max(m * n // (32 * PER_THREAD), 1)
