"""Matrix products on Hopper with tanh-GELU or its gradient in their epilogue, in warp-specialised Gluon.

C = A B for A (rows, depth) and B (depth, columns). GELU's own passes over memory are saved: it reads and writes what a
product writes anyway. So is its arithmetic, which runs while the tensor cores compute the next tile: two warpgroups
multiply and leave each tile, rounded, in shared memory, where a third takes it from.

The product is CUTLASS's cooperative one: a program stays on each multiprocessor and walks over tiles; of M rows each
multiplying warpgroup owns 64; A and B come through a ring in shared memory by TMA. A warp that does nothing but load
would make four warpgroups, whose share of the registers is less than a wgmma of N = 256 columns needs, so the first of
the multiplying warpgroups starts the loads.

An H200 multiplies at the limit of its power, and of what shared memory delivers. So the epilogue reads a tile once and
uses neither for anything else: what it reads and writes besides goes between global memory and registers (by TMA, the
gradient took 1.2 times as long); and the slope is computed in the forward pass, which has to compute most of it, unless
memory is to be saved.

M rows and N columns of a tile, K depth of a step; accumulators are fp32.
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.runtime.jit import mangle_type

from kernels.gelu.launch import TILE
from kernels.gelu.triton_kernels import CUBIC, MINUS_LOG2_E, SLOPE
from kernels.launcher import descriptor, launch
from kernels.warpgroups import barrier, multiprocessors, ring

ROWS: gl.constexpr = gl.constexpr(64)  # of a multiplying warpgroup: the M of wgmma
M: gl.constexpr = gl.constexpr(TILE[0])
N: gl.constexpr = gl.constexpr(TILE[1])
K: gl.constexpr = gl.constexpr(64)
STAGES: gl.constexpr = gl.constexpr(3)
GROUP: gl.constexpr = gl.constexpr(32)  # tiles of rows that are computed for all columns before the next ones are
CHUNK: gl.constexpr = gl.constexpr(8)  # rows that the epilogue has in registers at a time: those of a swizzle
REGISTERS = 168  # of a thread: as many for each of the three warpgroups


@gluon.jit
def _count(rows, columns):
    """How many tiles this program computes."""
    return gl.cdiv(gl.cdiv(rows, M) * (columns // N) - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def _tile(n, rows, columns):
    """First row and column of this program's n-th tile. Those that run at a time share A and B in the L2 cache."""
    t = gl.program_id(0) + n * gl.num_programs(0)
    across = columns // N
    first = t // (GROUP * across) * GROUP
    height = gl.maximum(gl.minimum(gl.cdiv(rows, M) - first, GROUP), 1)  # also past the last tile, which is not loaded
    t -= first * across
    return (first + t % height) * M, t // height * N


@gluon.jit
def _load(place, a, b, rings, shape, steps, GRADIENT: gl.constexpr):
    """Starts the copies of a step into its slot, once that is empty, unless there are no more; returns the next place.

    A place is the number of a step, of its tile, and where in A and B it is.
    """
    step, n, i, j, k = place
    rows, columns, depth = shape
    a_slots, b_slots, full, empty = rings
    slot, there = step % STAGES, step < steps
    mbarrier.wait(empty.index(slot), (step // STAGES + 1) & 1, pred=there)
    mbarrier.expect(full.index(slot), (M + N) * K * 2, pred=there)
    tma.async_copy_global_to_shared(a, [i, k], full.index(slot), a_slots.index(slot), pred=there)
    if GRADIENT:
        tma.async_copy_global_to_shared(b, [k, j], full.index(slot), b_slots.index(slot), pred=there)
    else:
        tma.async_copy_global_to_shared(b, [j, k], full.index(slot), b_slots.index(slot), pred=there)
    k += K
    if k >= depth:
        k = 0
        n += 1
        i, j = _tile(n, rows, columns)
    return step + 1, n, i, j, k


@gluon.jit
def _multiplier(C: gl.constexpr, a, b, bias, rings, results, shape, GRADIENT: gl.constexpr):
    """Rows 64 C to 64 C + 64 of every tile of this program. The first one loads for both, STAGES - 1 steps ahead."""
    rows, columns, depth = shape
    a_slots, b_slots, full, empty = rings
    c_slots, c_full, c_empty = results
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    o_n = gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUT))
    zeros = gl.zeros([ROWS, N], gl.float32, LAYOUT)
    count = _count(rows, columns)
    steps = count * gl.cdiv(depth, K)
    i, j = _tile(0, rows, columns)
    place = (0, 0, i, j, 0)
    if C == 0:
        for _ in gl.static_range(STAGES - 1):
            place = _load(place, a, b, rings, shape, steps, GRADIENT)
    it = 0
    for n in range(count):
        acc = zeros
        if not GRADIENT:
            _i, j = _tile(n, rows, columns)
            acc += gl.load(bias + j + o_n).to(gl.float32)[None, :]
        acc = warpgroup_mma_init(acc)
        for k in range(0, depth, K):
            slot = it % STAGES
            mbarrier.wait(full.index(slot), it // STAGES & 1)
            b_s = b_slots.index(slot)
            if not GRADIENT:
                b_s = b_s.permute([1, 0])
            a_s = a_slots.index(slot).slice(C * ROWS, ROWS)
            acc = warpgroup_mma(a_s, b_s, acc, is_async=True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
            mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), pred=k > 0)
            if C == 0:
                place = _load(place, a, b, rings, shape, steps, GRADIENT)
            it += 1
        c = warpgroup_mma_wait(0, deps=(acc,)).to(c_slots.dtype)
        mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES))
        mbarrier.wait(c_empty.index(C), (n + 1) & 1)
        c_slots.index(C).store(c)
        barrier()  # all warps have written
        mbarrier.arrive(c_full.index(C))


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
def _gelu_of(results, out, saved, rows, columns, KEEP_OUTPUT: gl.constexpr):
    """Writes gelu(C) and GELU's slope there or C itself, CHUNK rows of a tile at a time."""
    c_slots, c_full, c_empty = results
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    CHUNKS: gl.constexpr = ROWS // CHUNK
    o_m = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))
    offsets = (o_m * columns)[:, None] + gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    for n in range(_count(rows, columns)):
        i, j = _tile(n, rows, columns)
        first, left = i.to(gl.int64) * columns + j, rows - i
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
                b_out, slope = _gelu(c.to(gl.float32))
                gl.store(saved + first + offsets, slope.to(c.dtype) if KEEP_OUTPUT else c, mask=mask)
                gl.store(out + first + offsets, b_out.to(c.dtype), mask=mask)
                first += CHUNK * columns
                left -= CHUNK


@gluon.jit
def _gradient_of(results, out, saved, recomputed, sums, rows, columns, KEEP_OUTPUT: gl.constexpr):
    """Multiplies a tile with GELU's slope where it is, CHUNK rows at a time, and sums its columns.

    What was saved is read two chunks ahead; if that is GELU's input, GELU's output is recomputed and written too.
    """
    c_slots, c_full, c_empty = results
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    CHUNKS: gl.constexpr = ROWS // CHUNK
    o_n = gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUT))
    o_m = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))
    offsets = (o_m * columns)[:, None] + o_n[None, :]
    step = CHUNK * columns
    for n in range(_count(rows, columns)):
        i, j = _tile(n, rows, columns)
        first, left = i.to(gl.int64) * columns + j, rows - i
        total = gl.zeros([CHUNK, N], gl.float32, LAYOUT)
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
                    b_out, slope = _gelu(slope)
                    gl.store(recomputed + first + offsets, b_out.to(c.dtype), mask=mask)
                d = c.to(gl.float32) * slope
                gl.store(out + first + offsets, d.to(c.dtype), mask=mask)
                total += d
                first += step
                left -= CHUNK
        gl.store(sums + i // M * columns + j + o_n, gl.sum(total, 0))


@gluon.jit
def _epilogue(results, out, saved, recomputed, sums, rows, columns, GRADIENT: gl.constexpr, KEEP_OUTPUT: gl.constexpr):
    if GRADIENT:
        _gradient_of(results, out, saved, recomputed, sums, rows, columns, KEEP_OUTPUT)
    else:
        _gelu_of(results, out, saved, rows, columns, KEEP_OUTPUT)


@gluon.jit(do_not_specialize=["rows"])
def linear_gelu_kernel(
    a, b, bias, out, saved, recomputed, sums, rows, columns, depth,
    GRADIENT: gl.constexpr, KEEP_OUTPUT: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """out = gelu(C) for C = A B + bias, and `saved` GELU's slope there or, unless KEEP_OUTPUT, C itself. With GRADIENT
    and no bias: out = C times the slope, which is `saved` or made of it; sums (cdiv(rows, M), columns) fp32 that over
    the rows of each tile; and unless KEEP_OUTPUT recomputed = gelu(saved).

    a reads [M, K] of A; b [N, K] of B^T or, with GRADIENT, [K, N] of B; out, saved and recomputed are (rows, columns),
    contiguous, columns a multiple of N; what is not used is None. Grid: any number of programs up to that of the tiles.
    """
    a_slots = gl.allocate_shared_memory(a.dtype, [STAGES, M, K], a.layout)
    b_slots = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)  # noqa: RUF005
    C_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, N], a.dtype)
    c_slots = gl.allocate_shared_memory(a.dtype, [2, ROWS, N], C_LAYOUT)
    full, empty = ring(STAGES, 2)
    c_full, c_empty = ring(2, 1)
    rings = (a_slots, b_slots, full, empty)
    results = (c_slots, c_full, c_empty)
    shape = (rows, columns, depth)
    gl.warp_specialize(
        [
            (_multiplier, (0, a, b, bias, rings, results, shape, GRADIENT)),
            (_multiplier, (1, a, b, bias, rings, results, shape, GRADIENT)),
            (_epilogue, (results, out, saved, recomputed, sums, rows, columns, GRADIENT, KEEP_OUTPUT)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


@cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype]
    return gl.NVMMASharedLayout.get_default_for([rows, columns], kind)


def _tiles_of(x: Tensor, rows: int, columns: int):
    return descriptor(x, [rows, columns], _layout(rows, columns, x.dtype))


def _arguments(a, b, bias, out, saved, recomputed, sums, gradient: bool, keep_output: bool) -> tuple:
    """Tensors, scalars and constants of linear_gelu_kernel."""
    tiles = _tiles_of(b, K.value, N.value) if gradient else _tiles_of(b, N.value, K.value)
    tensors = _tiles_of(a, M.value, K.value), tiles, bias, out, saved, recomputed, sums
    return tensors, (*out.shape, a.shape[1]), (gradient, keep_output, REGISTERS)


def compilation(dtype: torch.dtype, gradient: bool, keep_output: bool) -> tuple[dict, dict, dict]:
    """Signature, constants and options of linear_gelu_kernel, to compile it ahead of time."""
    x, floats = torch.empty((M.value, N.value), dtype=dtype), torch.empty(1)
    others = (None, x, x, None if keep_output else x, floats) if gradient else (floats, x, x, None, None)
    tensors, _, constants = _arguments(x, x, *others, gradient, keep_output)
    names = linear_gelu_kernel.arg_names
    signature = {name: "constexpr" if t is None else mangle_type(t) for name, t in zip(names, tensors, strict=False)}
    values = {name: None for name, kind in signature.items() if kind == "constexpr"}
    signature |= dict.fromkeys(("rows", "columns", "depth"), "i32")
    values |= dict(zip(names[len(signature) :], constants, strict=True))
    return signature | dict.fromkeys(names[len(signature) :], "constexpr"), values, {"num_warps": 4}


def _launch(a, b, bias, out, saved, recomputed, sums, gradient: bool, keep_output: bool) -> None:
    (rows, columns), device = out.shape, a.device
    programs = min(-(-rows // M.value) * (columns // N.value), multiprocessors(device))
    arguments = _arguments(a, b, bias, out, saved, recomputed, sums, gradient, keep_output)
    with torch.cuda.device_of(a):
        launch(linear_gelu_kernel, (a.dtype, bias is None or bias.dtype, device), programs, *arguments, num_warps=4)


def forward(x: Tensor, weight: Tensor, bias: Tensor, keep_output: bool) -> tuple[Tensor, Tensor]:
    """Same contract as definition.forward, where is_fused."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    saved = torch.empty_like(out)
    _launch(x, weight, bias, out, saved, None, None, gradient=False, keep_output=keep_output)
    return saved, out


def backward(dout: Tensor, weight: Tensor, saved: Tensor, keep_output: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Same contract as definition.backward, where is_fused."""
    rows, columns = saved.shape
    dpre, recomputed = torch.empty_like(saved), None if keep_output else torch.empty_like(saved)
    sums = torch.empty((-(-rows // M.value), columns), dtype=torch.float32, device=saved.device)
    _launch(dout, weight, None, dpre, saved, recomputed, sums, gradient=True, keep_output=keep_output)
    return dpre, sums.sum(0), saved.new_empty(0) if recomputed is None else recomputed
