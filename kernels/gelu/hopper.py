"""Matrix products on Hopper with tanh-GELU or its gradient in their epilogue; see kernels/hopper/product.py.

GELU needs no passes over memory of its own. The forward pass computes most of the slope anyway, and saves the slope
unless memory is short (KEEP_OUTPUT is False). The epilogue adds the bias: read at the start of a product, it would hold
up both multiplying warpgroups, by 2 % of the forward pass at a depth of 2,048.

C = A B; C [M, N] is a tile of the product, and passes through registers CHUNK rows at a time.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.gelu.triton_kernels import CUBIC, MINUS_LOG2_E, SLOPE
from kernels.hopper.gluon_versions import barrier
from kernels.hopper.product import (
    CHUNK,
    CHUNK_LAYOUT,
    CHUNKS,
    REGISTERS,
    M,
    N,
    chunk_places,
    count_tiles,
    launch_product,
    multiplier,
    operands,
    shared_memory,
    tile_at,
)


@gluon.jit
def _reciprocal(x):
    """Return 1 / x in one instruction, with an error in the last bit. x is at least 1; infinity gives 0."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def _gelu(v):
    """Return GELU and its slope in fp32, as triton_kernels.gelu_and_slope does."""
    squares = v * v
    s = _reciprocal(1 + gl.exp2(v * (SLOPE * MINUS_LOG2_E + CUBIC * MINUS_LOG2_E * squares)))
    out = v * s
    return out, s + (out - out * s) * (SLOPE + 3 * CUBIC * squares)


@gluon.jit
def _apply_gelu(results, bias, out, saved, rows, columns, KEEP_OUTPUT: gl.constexpr):
    """Write out = gelu(C + bias), and GELU's slope or C to `saved`, CHUNK rows of a tile at a time."""
    c_slots, c_full, c_empty = results
    o_m, o_n, offsets = chunk_places(columns)
    for n in range(count_tiles(rows, columns)):
        i, j = tile_at(n, rows, columns)
        first, left = i.to(gl.int64) * columns + j, rows - i
        b_bias = gl.load(bias + j + o_n).to(gl.float32)[None, :]
        for half in gl.static_range(2):
            mbarrier.wait(c_full.index(half), n & 1)
            c_next = c_slots.index(half).slice(0, CHUNK).load(CHUNK_LAYOUT)
            for chunk in gl.static_range(CHUNKS):
                c = c_next  # [CHUNK, N]
                if chunk < CHUNKS - 1:
                    c_next = c_slots.index(half).slice((chunk + 1) * CHUNK, CHUNK).load(CHUNK_LAYOUT)
                barrier()  # The assembler moves no load past it, so the load of c_next overlaps the arithmetic.
                if chunk == CHUNKS - 1:
                    mbarrier.arrive(c_empty.index(half))
                mask = (o_m < left)[:, None]
                # GELU in the epilogue: out = gelu(C + bias)
                b_out, slope = _gelu(c.to(gl.float32) + b_bias)
                gl.store(saved + first + offsets, slope.to(c.dtype) if KEEP_OUTPUT else c, mask=mask)
                gl.store(out + first + offsets, b_out.to(c.dtype), mask=mask)
                first += CHUNK * columns
                left -= CHUNK


@gluon.jit
def _apply_gradient(results, bias, out, saved, recomputed, sums, rows, columns, KEEP_OUTPUT: gl.constexpr):
    """Write out = C * slope, CHUNK rows of a tile at a time, and its sum by column.

    `saved` is read two chunks ahead. Unless KEEP_OUTPUT it holds GELU's input before the bias, and GELU's output is
    recomputed and written too.
    """
    c_slots, c_full, c_empty = results
    o_m, o_n, offsets = chunk_places(columns)
    step = CHUNK * columns
    for n in range(count_tiles(rows, columns)):
        i, j = tile_at(n, rows, columns)
        first, left = i.to(gl.int64) * columns + j, rows - i
        total = gl.zeros([CHUNK, N], gl.float32, CHUNK_LAYOUT)
        if not KEEP_OUTPUT:
            b_bias = gl.load(bias + j + o_n).to(gl.float32)[None, :]
        soon = gl.load(saved + first + offsets, mask=(o_m < left)[:, None], other=0.0)
        later = gl.load(saved + (first + step) + offsets, mask=(o_m < left - CHUNK)[:, None], other=0.0)
        for half in gl.static_range(2):
            mbarrier.wait(c_full.index(half), n & 1)
            for chunk in gl.static_range(CHUNKS):
                c = c_slots.index(half).slice(chunk * CHUNK, CHUNK).load(CHUNK_LAYOUT)  # [CHUNK, N]
                slope = soon.to(gl.float32)
                soon = later
                if half * CHUNKS + chunk + 2 < 2 * CHUNKS:
                    mask = (o_m < left - 2 * CHUNK)[:, None]
                    later = gl.load(saved + (first + 2 * step) + offsets, mask=mask, other=0.0)
                if chunk == CHUNKS - 1:
                    barrier()  # until all warps have read
                    mbarrier.arrive(c_empty.index(half))
                mask = (o_m < left)[:, None]
                if not KEEP_OUTPUT:
                    b_out, slope = _gelu(slope + b_bias)
                    gl.store(recomputed + first + offsets, b_out.to(c.dtype), mask=mask)
                # GELU's gradient in the epilogue: out = C * slope
                d = c.to(gl.float32) * slope
                gl.store(out + first + offsets, d.to(c.dtype), mask=mask)
                total += d
                first += step
                left -= CHUNK
        gl.store(sums + i // M * columns + j + o_n, gl.sum(total, 0))


@gluon.jit
def _epilogue(
    results, bias, out, saved, recomputed, sums, rows, columns, GRADIENT: gl.constexpr, KEEP_OUTPUT: gl.constexpr
):
    if GRADIENT:
        _apply_gradient(results, bias, out, saved, recomputed, sums, rows, columns, KEEP_OUTPUT)
    else:
        _apply_gelu(results, bias, out, saved, rows, columns, KEEP_OUTPUT)


@gluon.jit(do_not_specialize=["rows"])
def linear_gelu_kernel(
    a, b, bias, out, saved, recomputed, sums, rows, columns, depth,
    GRADIENT: gl.constexpr, KEEP_OUTPUT: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute C = A B with GELU or its gradient in the epilogue.

    Without GRADIENT: out = gelu(C + bias), and `saved` is set to GELU's slope (KEEP_OUTPUT) or to C.
    With GRADIENT: out = C * slope, with the slope from `saved`, and sums (cdiv(rows, M), columns) fp32 is its sum over
    the rows of each tile. Unless KEEP_OUTPUT, recomputed = gelu(saved + bias).

    a reads [M, K] of A; b reads [N, K] of B^T or, with GRADIENT, [K, N] of B. out, saved and recomputed are (rows,
    columns), contiguous, columns a multiple of N. Unused tensors are None. Grid: at most one program per tile.
    """
    rings, results = shared_memory(a, b)
    shape = (rows, columns, depth)
    gl.warp_specialize(
        [
            (multiplier, (0, a, b, None, rings, results, shape, not GRADIENT)),
            (multiplier, (1, a, b, None, rings, results, shape, not GRADIENT)),
            (_epilogue, (results, bias, out, saved, recomputed, sums, rows, columns, GRADIENT, KEEP_OUTPUT)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


def arguments_of(a, b, bias, out, saved, recomputed, sums, gradient: bool, keep_output: bool) -> tuple:
    """Return the tensors, scalars and constants of linear_gelu_kernel."""
    tensors = *operands(a, b, transposed=not gradient), bias, out, saved, recomputed, sums
    return tensors, (*out.shape, a.shape[1]), (gradient, keep_output, REGISTERS)


def forward(x: Tensor, weight: Tensor, bias: Tensor, keep_output: bool) -> tuple[Tensor, Tensor]:
    """Compute definition.forward, for inputs that selection.fuses_whole_tiles accepts."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    saved = torch.empty_like(out)
    arguments = arguments_of(x, weight, bias, out, saved, None, None, gradient=False, keep_output=keep_output)
    launch_product(linear_gelu_kernel, (bias.dtype,), x, *arguments)
    return saved, out


def backward(
    dout: Tensor, weight: Tensor, bias: Tensor, saved: Tensor, keep_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute definition.backward, for inputs that selection.fuses_whole_tiles accepts."""
    rows, columns = saved.shape
    dpre, recomputed = torch.empty_like(saved), None if keep_output else torch.empty_like(saved)
    sums = torch.empty((-(-rows // M.value), columns), dtype=torch.float32, device=saved.device)
    arguments = arguments_of(dout, weight, bias, dpre, saved, recomputed, sums, gradient=True, keep_output=keep_output)
    launch_product(linear_gelu_kernel, (bias.dtype,), dout, *arguments)
    return dpre, sums.sum(0), saved.new_empty(0) if recomputed is None else recomputed
