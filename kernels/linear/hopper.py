"""A matrix product on Hopper that adds a bias and a residual in its epilogue; see kernels/hopper/product.py.

So the LayerNorm that follows reads one tensor, instead of reading two and writing their sum. M rows and N columns of a
tile, K depth of a step.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.hopper.gluon_versions import barrier
from kernels.hopper.product import (
    CHUNK,
    CHUNK_LAYOUT,
    CHUNKS,
    REGISTERS,
    chunk_places,
    count_tiles,
    launch_product,
    multiplier,
    operands,
    shared_memory,
    tile_at,
)


@gluon.jit
def _add_bias_and_residual(results, bias, residual, out, rows, columns):
    """Write out = C + bias + residual, CHUNK rows of a tile at a time. The residual is read two chunks ahead."""
    c_slots, c_full, c_empty = results
    o_m, o_n, offsets = chunk_places(columns)
    step = CHUNK * columns
    for n in range(count_tiles(rows, columns)):
        i, j = tile_at(n, rows, columns)
        first, left = i.to(gl.int64) * columns + j, rows - i
        b_bias = gl.load(bias + j + o_n).to(c_slots.dtype)[None, :]  # [1, N]
        if residual is not None:
            soon = gl.load(residual + first + offsets, mask=(o_m < left)[:, None], other=0.0)
            later = gl.load(residual + (first + step) + offsets, mask=(o_m < left - CHUNK)[:, None], other=0.0)
        for half in gl.static_range(2):
            mbarrier.wait(c_full.index(half), n & 1)
            for chunk in gl.static_range(CHUNKS):
                # out = C + bias + residual in the epilogue
                total = c_slots.index(half).slice(chunk * CHUNK, CHUNK).load(CHUNK_LAYOUT) + b_bias  # [CHUNK, N]
                if residual is not None:
                    total += soon
                    soon = later
                    if half * CHUNKS + chunk + 2 < 2 * CHUNKS:
                        mask = (o_m < left - 2 * CHUNK)[:, None]
                        later = gl.load(residual + (first + 2 * step) + offsets, mask=mask, other=0.0)
                if chunk == CHUNKS - 1:
                    barrier()  # until all warps have read
                    mbarrier.arrive(c_empty.index(half))
                gl.store(out + first + offsets, total, mask=(o_m < left)[:, None])
                first += step
                left -= CHUNK


@gluon.jit(do_not_specialize=["rows"])
def linear_sum_kernel(a, b, bias, residual, out, rows, columns, depth, REGISTERS: gl.constexpr):
    """Compute out = A B + bias + residual; residual may be None. Each sum is rounded.

    a reads [M, K] of A, b [N, K] of B^T; bias (columns,); residual and out are (rows, columns), contiguous, columns a
    multiple of N. Grid: at most one program per tile.
    """
    rings, results = shared_memory(a, b)
    shape = (rows, columns, depth)
    gl.warp_specialize(
        [
            (multiplier, (0, a, b, None, rings, results, shape, True)),
            (multiplier, (1, a, b, None, rings, results, shape, True)),
            (_add_bias_and_residual, (results, bias, residual, out, rows, columns)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


def arguments_of(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, out: Tensor) -> tuple:
    """Return the tensors, scalars and constants of linear_sum_kernel."""
    return (*operands(x, weight, transposed=True), bias, residual, out), (*out.shape, x.shape[1]), (REGISTERS,)


def forward(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None) -> Tensor:
    """Compute launch.forward, for inputs that selection.fuses_whole_tiles accepts."""
    out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    key = bias.dtype, residual is None
    launch_product(linear_sum_kernel, key, x, *arguments_of(x, weight, bias, residual, out))
    return out
