"""LayerNorm after a residual branch and its gradient in Triton, by the bandwidth of HBM: each row is read once.

A program takes every P-th tile of M rows, of P programs. Backward it holds what its rows sum to by column; the
programs' sums are added in a fixed order afterwards; and so that few of them keep HBM busy, they load two tiles ahead
of the one at hand, where shared memory holds these. Forward, short rows have a program for each tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launcher import launch
from kernels.layer_norm import definition
from kernels.rounding import to

WIDEST = 8192  # columns that a program has registers for
ELEMENTS, PER_THREAD = 4096, 32  # of a tile, which has one row at least, and of a thread
# Programs forward, for rows that are not SHORT, each of which takes several so that weight and bias are read less
# often. On an H200 in 16 bits, among the fastest of some twenty choices at each of five widths: 3 to 6 % above the time
# in which as much is copied, and at 2560 columns 9 %.
FORWARD_PROGRAMS, SHORT = 4 * 132, 2048
# Programs backward. On an H200, at widths of 768, 2048 and 2560 in 16 bits, the fastest of some thirty choices each:
# within 2 % of the time in which as much is copied.
PROGRAMS = 2 * 132
STAGES, LARGEST_STAGE = 3, 3 * 8192  # bytes of three tiles, two of which fit into the shared memory of any GPU


@triton.jit
def layer_norm_kernel(
    x, branch, branch_bias, weight, bias, stream, out, mean, rstd, rows, columns, eps,
    M: tl.constexpr, N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """stream = x + branch + branch_bias, LayerNorm of that, and its mean and rstd, which are fp32, by M rows.

    x, branch, stream and out are (rows, columns), dense; branch and stream None where x is what is normalised, and
    branch_bias (columns,) where a branch has none. N is a power of two of at least `columns`.
    """
    o_n = tl.arange(0, N)
    inside = (o_n < columns)[None, :]
    b_weight = tl.load(weight + o_n, mask=o_n < columns, other=0.0).to(tl.float32)[None, :]
    b_bias = tl.load(bias + o_n, mask=o_n < columns, other=0.0).to(tl.float32)[None, :]
    if branch_bias is not None:
        b_branch_bias = tl.load(branch_bias + o_n, mask=o_n < columns, other=0.0).to(tl.float32)[None, :]
    for start in tl.range(tl.program_id(0) * M, rows, tl.num_programs(0) * M, num_stages=1):
        o_m = start + tl.arange(0, M)
        mask = (o_m < rows)[:, None] & inside
        o_x = o_m.to(tl.int64)[:, None] * columns + o_n[None, :]
        b_x = tl.load(x + o_x, mask=mask, other=0.0).to(tl.float32)
        if branch is not None:
            b_branch = tl.load(branch + o_x, mask=mask, other=0.0).to(tl.float32)
            if branch_bias is not None:
                b_branch += b_branch_bias
            b_stream = to(b_x + b_branch, stream.dtype.element_ty, UPCAST)
            tl.store(stream + o_x, b_stream, mask=mask)
            b_x = b_stream.to(tl.float32)
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
    M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, BRANCH_BIAS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dx for tiles of M rows; the gradients by weight, bias and, where there is a BRANCH_BIAS, that of these rows.

    They are a program's two or three rows of `sums` (2 P or 3 P, C) fp32. dout, dstream, x and dx are (rows, columns),
    dense; N is a power of two of at least `columns`.
    """
    o_n = tl.arange(0, N)
    inside = o_n < columns
    b_weight = tl.load(weight + o_n, mask=inside, other=0.0).to(tl.float32)
    by_weight, by_bias = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
    by_branch_bias = tl.zeros([M, N], tl.float32)
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
        if BRANCH_BIAS:
            by_branch_bias += b_dx
    p_sums = sums + tl.program_id(0).to(tl.int64) * (3 if BRANCH_BIAS else 2) * columns + o_n
    tl.store(p_sums, tl.sum(by_weight, 0), mask=inside)
    tl.store(p_sums + columns, tl.sum(by_bias, 0), mask=inside)
    if BRANCH_BIAS:
        tl.store(p_sums + 2 * columns, tl.sum(by_branch_bias, 0), mask=inside)


def forward(
    x: Tensor, branch: Tensor | None, branch_bias: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Same contract as definition.forward, which computes rows wider than WIDEST and fp64."""
    rows, columns = x.shape
    if columns > WIDEST or x.dtype == torch.float64:
        return definition.forward(x, branch, branch_bias, weight, bias, eps)
    m, n, warps = tile(columns)
    programs = triton.cdiv(rows, m) if columns <= SHORT else min(triton.cdiv(rows, m), FORWARD_PROGRAMS)
    stream, out = None if branch is None else torch.empty_like(x), torch.empty_like(x)
    mean, rstd = (torch.empty((rows, 1), device=x.device) for _ in range(2))
    tensors = x, branch, branch_bias, weight, bias, stream, out, mean, rstd
    kinds = branch is None, branch_bias is None or branch_bias.dtype, x.dtype, weight.dtype, bias.dtype
    key, constants = (*kinds, x.device), (m, n, x.device.type == "cpu")
    with torch.cuda.device_of(x):
        launch(layer_norm_kernel, key, programs, tensors, (rows, columns, eps), constants, num_warps=warps)
    return x.new_empty(0) if stream is None else stream, out, mean, rstd


def backward(
    dout: Tensor, dstream: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, has_branch_bias: bool
) -> tuple[Tensor, Tensor]:
    """Same contract as definition.backward, which computes rows wider than WIDEST and fp64."""
    rows, columns = x.shape
    if columns > WIDEST or x.dtype == torch.float64:
        return definition.backward(dout, dstream, x, weight, mean, rstd, has_branch_bias)
    m, n, warps = tile(columns)
    programs = min(triton.cdiv(rows, m), PROGRAMS)
    dx, sums = torch.empty_like(x), torch.empty((programs, 3 if has_branch_bias else 2, columns), device=x.device)
    tensors = dout, dstream, x, weight, mean, rstd, dx, sums
    key = x.dtype, weight.dtype, x.device
    constants = m, n, stages(m * n, x.dtype), has_branch_bias, x.device.type == "cpu"
    with torch.cuda.device_of(x):
        launch(layer_norm_gradient_kernel, key, programs, tensors, (rows, columns), constants, num_warps=warps)
    return dx, sums.sum(0)


def tile(columns: int) -> tuple[int, int, int]:
    """M and N of the kernels, and their warps."""
    n = triton.next_power_of_2(columns)
    m = max(ELEMENTS // n, 1)
    return m, n, max(m * n // (32 * PER_THREAD), 1)


def stages(elements: int, dtype: torch.dtype) -> int:
    """STAGES of layer_norm_gradient_kernel, for tiles of so many elements."""
    return STAGES if 3 * elements * dtype.itemsize <= LARGEST_STAGE else 1
