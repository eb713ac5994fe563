"""Matrix products on Hopper with tanh-GELU or its gradient in their epilogue; see kernels/hopper/product.py.

C = A B. GELU's own passes over memory are saved: it reads and writes what a product writes anyway. The slope is
computed in the forward pass, which has to compute most of it, unless memory is to be saved.

The bias is added in the epilogue too: to read it where a product starts holds up both warpgroups that multiply, for
some 2 % of the forward pass at a depth of 2,048.
"""

from itertools import chain

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.gelu.triton_kernels import CUBIC, MINUS_LOG2_E, SLOPE
from kernels.hopper.product import (
    CHUNK,
    CHUNKS,
    LAYOUT,
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
from kernels.hopper.warpgroups import barrier, signature_of


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def _gelu(v):
    """GELU's output and slope; see triton_kernels.py."""
    squares = v * v
    s = _reciprocal(1 + gl.exp2(v * (SLOPE * MINUS_LOG2_E + CUBIC * MINUS_LOG2_E * squares)))
    out = v * s
    return out, s + (out - out * s) * (SLOPE + 3 * CUBIC * squares)


@gluon.jit
def _gelu_of(results, bias, out, saved, rows, columns, KEEP_OUTPUT: gl.constexpr):
    """Writes gelu(C + bias) and GELU's slope there or C itself, CHUNK rows of a tile at a time."""
    c_slots, c_full, c_empty = results
    o_m, o_n, offsets = chunk_places(columns)
    for n in range(count_tiles(rows, columns)):
        i, j = tile_at(n, rows, columns)
        first, left = i.to(gl.int64) * columns + j, rows - i
        b_bias = gl.load(bias + j + o_n).to(gl.float32)[None, :]
        for C in gl.static_range(2):
            mbarrier.wait(c_full.index(C), n & 1)
            c_next = c_slots.index(C).slice(0, CHUNK).load(LAYOUT)
            for chunk in gl.static_range(CHUNKS):
                c = c_next
                if chunk < CHUNKS - 1:
                    c_next = c_slots.index(C).slice((chunk + 1) * CHUNK, CHUNK).load(LAYOUT)
                barrier()  # the assembler moves no load past it: this one is to be under way during the arithmetic
                if chunk == CHUNKS - 1:
                    mbarrier.arrive(c_empty.index(C))
                mask = (o_m < left)[:, None]
                b_out, slope = _gelu(c.to(gl.float32) + b_bias)
                gl.store(saved + first + offsets, slope.to(c.dtype) if KEEP_OUTPUT else c, mask=mask)
                gl.store(out + first + offsets, b_out.to(c.dtype), mask=mask)
                first += CHUNK * columns
                left -= CHUNK


@gluon.jit
def _gradient_of(results, bias, out, saved, recomputed, sums, rows, columns, KEEP_OUTPUT: gl.constexpr):
    """Multiplies a tile with GELU's slope where it is, CHUNK rows at a time, and sums its columns.

    What was saved is read two chunks ahead; if that is GELU's input but for the bias, GELU's output is recomputed and
    written too.
    """
    c_slots, c_full, c_empty = results
    o_m, o_n, offsets = chunk_places(columns)
    step = CHUNK * columns
    for n in range(count_tiles(rows, columns)):
        i, j = tile_at(n, rows, columns)
        first, left = i.to(gl.int64) * columns + j, rows - i
        total = gl.zeros([CHUNK, N], gl.float32, LAYOUT)
        if not KEEP_OUTPUT:
            b_bias = gl.load(bias + j + o_n).to(gl.float32)[None, :]
        soon = gl.load(saved + first + offsets, mask=(o_m < left)[:, None], other=0.0)
        later = gl.load(saved + (first + step) + offsets, mask=(o_m < left - CHUNK)[:, None], other=0.0)
        for C in gl.static_range(2):
            mbarrier.wait(c_full.index(C), n & 1)
            for chunk in gl.static_range(CHUNKS):
                c = c_slots.index(C).slice(chunk * CHUNK, CHUNK).load(LAYOUT)
                slope = soon.to(gl.float32)
                soon = later
                if C * CHUNKS + chunk + 2 < 2 * CHUNKS:
                    mask = (o_m < left - 2 * CHUNK)[:, None]
                    later = gl.load(saved + (first + 2 * step) + offsets, mask=mask, other=0.0)
                if chunk == CHUNKS - 1:
                    barrier()  # all warps have read
                    mbarrier.arrive(c_empty.index(C))
                mask = (o_m < left)[:, None]
                if not KEEP_OUTPUT:
                    b_out, slope = _gelu(slope + b_bias)
                    gl.store(recomputed + first + offsets, b_out.to(c.dtype), mask=mask)
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
        _gradient_of(results, bias, out, saved, recomputed, sums, rows, columns, KEEP_OUTPUT)
    else:
        _gelu_of(results, bias, out, saved, rows, columns, KEEP_OUTPUT)


@gluon.jit(do_not_specialize=["rows"])
def linear_gelu_kernel(
    a, b, bias, out, saved, recomputed, sums, rows, columns, depth,
    GRADIENT: gl.constexpr, KEEP_OUTPUT: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """out = gelu(C + bias) for C = A B, and `saved` GELU's slope there or, unless KEEP_OUTPUT, C itself. With GRADIENT:
    out = C times the slope, which is `saved` or made of it; sums (cdiv(rows, M), columns) fp32 that over the rows of
    each tile; and unless KEEP_OUTPUT recomputed = gelu(saved + bias).

    a reads [M, K] of A; b [N, K] of B^T or, with GRADIENT, [K, N] of B; out, saved and recomputed are (rows, columns),
    contiguous, columns a multiple of N; what is not used is None. Grid: any number of programs up to that of the tiles.
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


def _arguments(a, b, bias, out, saved, recomputed, sums, gradient: bool, keep_output: bool) -> tuple:
    """Tensors, scalars and constants of linear_gelu_kernel."""
    tensors = *operands(a, b, transposed=not gradient), bias, out, saved, recomputed, sums
    return tensors, (*out.shape, a.shape[1]), (gradient, keep_output, REGISTERS)


def compilation(dtype: torch.dtype, gradient: bool, keep_output: bool) -> tuple[dict, dict, dict]:
    """Signature, constants and options of linear_gelu_kernel, to compile it ahead of time."""
    x, floats = torch.empty((M.value, N.value), dtype=dtype), torch.empty(1)
    others = (x, None if keep_output else x, floats) if gradient else (x, None, None)
    arguments = chain(*_arguments(x, x, floats, x, *others, gradient, keep_output))
    return *signature_of(linear_gelu_kernel, arguments), {"num_warps": 4}


def _launch(a, b, bias, out, saved, recomputed, sums, gradient: bool, keep_output: bool) -> None:
    arguments = _arguments(a, b, bias, out, saved, recomputed, sums, gradient, keep_output)
    launch_product(linear_gelu_kernel, (bias.dtype,), a, *arguments)


def forward(x: Tensor, weight: Tensor, bias: Tensor, keep_output: bool) -> tuple[Tensor, Tensor]:
    """Same contract as definition.forward, where launch.py takes it."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    saved = torch.empty_like(out)
    _launch(x, weight, bias, out, saved, None, None, gradient=False, keep_output=keep_output)
    return saved, out


def backward(
    dout: Tensor, weight: Tensor, bias: Tensor, saved: Tensor, keep_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Same contract as definition.backward, where launch.py takes it."""
    rows, columns = saved.shape
    dpre, recomputed = torch.empty_like(saved), None if keep_output else torch.empty_like(saved)
    sums = torch.empty((-(-rows // M.value), columns), dtype=torch.float32, device=saved.device)
    _launch(dout, weight, bias, dpre, saved, recomputed, sums, gradient=True, keep_output=keep_output)
    return dpre, sums.sum(0), saved.new_empty(0) if recomputed is None else recomputed
