"""Rounding to FP8 in Triton, with the transpose and the statistics of the tensor in the same pass.

Hopper multiplies FP8 matrices only if both are contiguous along the dimension that the product sums over. So the
backward pass needs the transpose of each operand. GELU and its gradient are computed in the same pass too.

M rows and N columns of a tile. All matrices are (rows, columns) and dense, except for the transposes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.launching import launch_kernel
from kernels.common.rounding import to
from kernels.fp8.definition import E4M3, E5M2
from kernels.gelu.triton_kernels import gelu_and_slope

QUANTISE, GELU, GRADIENT = (64, 128, 4), (64, 64, 4), (128, 32, 4)  # M, N, warps: the fastest of 30 on an H100
# The largest number, and half of the smallest one: numbers up to this half become zero.
LIMITS = {E4M3: (448.0, 2.0**-10), E5M2: (57344.0, 2.0**-17)}


@triton.jit
def _places(rows, columns, M: tl.constexpr, N: tl.constexpr):
    """Return the row and column numbers of the program's tile, its mask, and its offsets in a matrix [M, N]."""
    tiles = tl.cdiv(columns, N)
    o_m = (tl.program_id(0) // tiles).to(tl.int64) * M + tl.arange(0, M)
    o_n = tl.program_id(0) % tiles * N + tl.arange(0, N)
    mask = (o_m < rows)[:, None] & (o_n < columns)[None, :]
    return o_m, o_n, mask, o_m[:, None] * columns + o_n[None, :]


@triton.jit
def _scaled(x, inverse, LIMIT: tl.constexpr):
    """Return x * inverse in fp32, limited to the range of the format. NaN stays NaN."""
    return tl.clamp(x.to(tl.float32) * inverse, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _store(x, scale, out, o_m, o_n, rows, columns, LIMIT: tl.constexpr):
    """Round a tile x [M, N] and store it."""
    scaled = _scaled(x, 1 / tl.load(scale), LIMIT)  # the reciprocal is exact, because scales are powers of two
    mask = (o_m < rows)[:, None] & (o_n < columns)[None, :]
    tl.store(out + o_m[:, None] * columns + o_n[None, :], scaled.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _store_transposed(x, scale, transposed, o_m, o_n, rows, columns, LIMIT: tl.constexpr):
    """Round a tile x [M, N] of 16 bits and store its transpose.

    The tile is transposed before it is rounded: Triton 3.6 moves the bytes of an FP8 tile to wrong places.
    """
    x_t = _scaled(tl.trans(x), 1 / tl.load(scale), LIMIT).to(transposed.dtype.element_ty)  # [N, M]
    mask = (o_n < columns)[:, None] & (o_m < rows)[None, :]
    tl.store(transposed + o_n.to(tl.int64)[:, None] * rows + o_m[None, :], x_t, mask=mask)


@triton.jit
def _observe(x, scale, statistics, rows, columns, TINY: tl.constexpr):
    """Add a tile x [M, N] to the statistics. Elements outside the matrix are 0. Program 0 counts the tensor.

    Atomic additions have no fixed order, so the last bits of the share that underflows may differ from run to run.
    """
    sizes = tl.abs(x.to(tl.float32))
    lost = (sizes <= TINY * tl.load(scale)) & (sizes != 0)
    tl.atomic_max(statistics, tl.max(sizes), sem="relaxed")
    tl.atomic_add(statistics + 1, tl.sum(lost.to(tl.float32)) / rows / columns, sem="relaxed")
    tl.atomic_add(statistics + 2, 1.0, mask=tl.program_id(0) == 0, sem="relaxed")


@triton.jit
def quantise_kernel(
    x, scale, statistics, out, transposed, rows, columns,
    LIMIT: tl.constexpr, TINY: tl.constexpr, M: tl.constexpr, N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute definition.quantise for one tile."""
    o_m, o_n, mask, o_x = _places(rows, columns, M, N)
    b_x = tl.load(x + o_x, mask=mask, other=0.0)  # [M, N]
    if x.dtype.element_ty == tl.float32:
        b_x = to(b_x, tl.bfloat16, UPCAST)
    _store(b_x, scale, out, o_m, o_n, rows, columns, LIMIT)
    _store_transposed(b_x, scale, transposed, o_m, o_n, rows, columns, LIMIT)
    _observe(b_x, scale, statistics, rows, columns, TINY)


@triton.jit
def gelu_kernel(
    pre, bias, scale, statistics, out, rows, columns,
    LIMIT: tl.constexpr, TINY: tl.constexpr, M: tl.constexpr, N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute definition.gelu for one tile."""
    o_m, o_n, mask, o_x = _places(rows, columns, M, N)
    b_bias = tl.load(bias + o_n, mask=o_n < columns, other=0.0).to(tl.float32)[None, :]  # [1, N]
    b_out, _ = gelu_and_slope(tl.load(pre + o_x, mask=mask, other=0.0).to(tl.float32) + b_bias)
    b_out = to(tl.where(mask, b_out, 0.0), pre.dtype.element_ty, UPCAST)
    _store(b_out, scale, out, o_m, o_n, rows, columns, LIMIT)
    _observe(b_out, scale, statistics, rows, columns, TINY)


@triton.jit
def gelu_gradient_kernel(
    dout, pre, bias, scale, statistics, out_scale, dpre, dpre_t, out_t, sums, rows, columns,
    LIMIT: tl.constexpr, TINY: tl.constexpr, M: tl.constexpr, N: tl.constexpr, UPCAST: tl.constexpr,
    OUT_LIMIT: tl.constexpr,
):  # fmt: skip
    """Compute definition.gelu_gradient for one tile, and the sum over its rows: a row of sums (tiles, columns) fp32."""
    o_m, o_n, mask, o_x = _places(rows, columns, M, N)
    b_bias = tl.load(bias + o_n, mask=o_n < columns, other=0.0).to(tl.float32)[None, :]  # [1, N]
    b_out, slope = gelu_and_slope(tl.load(pre + o_x, mask=mask, other=0.0).to(tl.float32) + b_bias)
    b_out = to(b_out, pre.dtype.element_ty, UPCAST)
    _store_transposed(b_out, out_scale, out_t, o_m, o_n, rows, columns, OUT_LIMIT)
    # dpre = dout * slope [M, N]
    b_dpre = tl.load(dout + o_x, mask=mask, other=0.0).to(tl.float32) * slope
    p_sums = sums + tl.program_id(0) // tl.cdiv(columns, N) * columns + o_n
    tl.store(p_sums, tl.sum(b_dpre, 0), mask=o_n < columns)
    b_dpre = to(b_dpre, pre.dtype.element_ty, UPCAST)
    _store(b_dpre, scale, dpre, o_m, o_n, rows, columns, LIMIT)
    _store_transposed(b_dpre, scale, dpre_t, o_m, o_n, rows, columns, LIMIT)
    _observe(b_dpre, scale, statistics, rows, columns, TINY)


def _launch(kernel, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], tile: tuple[int, int, int], *constants):
    """Launch a program for each tile of the first input (rows, columns). The first output has the dtype to round to."""
    x, (m, n, warps) = inputs[0], tile
    (rows, columns), dtype = x.shape, outputs[0].dtype
    key = dtype, x.device, *(x.dtype for x in inputs)
    constants = *LIMITS[dtype], m, n, x.device.type == "cpu", *constants
    programs = triton.cdiv(rows, m) * triton.cdiv(columns, n)
    with torch.cuda.device_of(x):
        launch_kernel(kernel, key, programs, (*inputs, *outputs), (rows, columns), constants, num_warps=warps)


def quantise(x: Tensor, scale: Tensor, statistics: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute definition.quantise."""
    out, transposed = torch.empty_like(x, dtype=dtype), torch.empty(x.shape[::-1], dtype=dtype, device=x.device)
    _launch(quantise_kernel, (x, scale, statistics), (out, transposed), QUANTISE)
    return out, transposed


def gelu(pre: Tensor, bias: Tensor, scale: Tensor, statistics: Tensor) -> Tensor:
    """Compute definition.gelu."""
    out = torch.empty_like(pre, dtype=E4M3)
    _launch(gelu_kernel, (pre, bias, scale, statistics), (out,), GELU)
    return out


def gelu_gradient(
    dout: Tensor, pre: Tensor, bias: Tensor, scale: Tensor, statistics: Tensor, out_scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute definition.gelu_gradient."""
    dpre, device = torch.empty_like(pre, dtype=E5M2), pre.device
    dpre_t, out_t = (torch.empty(pre.shape[::-1], dtype=dtype, device=device) for dtype in (E5M2, E4M3))
    sums = torch.empty((triton.cdiv(len(pre), GRADIENT[0]), pre.shape[1]), device=device)
    inputs, outputs = (dout, pre, bias, scale, statistics, out_scale), (dpre, dpre_t, out_t, sums)
    _launch(gelu_gradient_kernel, inputs, outputs, GRADIENT, LIMITS[E4M3][0])
    return dpre, dpre_t, out_t, sums.sum(0)
