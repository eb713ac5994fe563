"""The matrix product of Hopper's kernels with work in their epilogue, in warp-specialised Gluon.

C = A B for A (rows, depth) and B (depth, columns). The passes over memory of what is done to C are saved: it happens
before C is written. So is its arithmetic, which runs while the tensor cores compute the next tile: two warpgroups
multiply and leave each tile, rounded, in shared memory, where a third takes it from. That one, and what the kernel does
besides, is its caller's.

The product is CUTLASS's cooperative one: a program stays on each multiprocessor and walks over tiles; of M rows each
multiplying warpgroup owns 64; A and B come through a ring in shared memory by TMA. A warp that does nothing but load
would make four warpgroups, whose share of the registers is less than a wgmma of N = 256 columns needs, so the first of
the multiplying warpgroups starts the loads.

An H200 multiplies at the limit of its power, and of what shared memory delivers. So an epilogue reads a tile once and
uses neither for anything else: what it reads and writes besides goes between global memory and registers (by TMA, the
gradient of GELU took 1.2 times as long).

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

from kernels.common.launching import descriptor, launch
from kernels.hopper.selection import TILE
from kernels.hopper.warpgroups import barrier, multiprocessors, ring

ROWS: gl.constexpr = gl.constexpr(64)  # of a multiplying warpgroup: the M of wgmma
M: gl.constexpr = gl.constexpr(TILE[0])
N: gl.constexpr = gl.constexpr(TILE[1])
K: gl.constexpr = gl.constexpr(64)
STAGES: gl.constexpr = gl.constexpr(3)
# Tiles of rows that are computed for all columns before the next ones are. Of 8, 13, 16, 32 and 64 on an H200 in
# sustained load 8 was the fastest at depths of 2560, 8192 and 10240, and 1.5 % behind 16 at 3072; 32 takes 0.5 to 3.3 %
# longer than 8.
GROUP: gl.constexpr = gl.constexpr(8)
CHUNK: gl.constexpr = gl.constexpr(8)  # rows that an epilogue has in registers at a time: those of a swizzle
CHUNKS: gl.constexpr = gl.constexpr(ROWS.value // CHUNK.value)  # of what one of the multiplying warpgroups leaves
LAYOUT: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))  # of a chunk in an epilogue
REGISTERS = 168  # of a thread: as many for each of the three warpgroups


@gluon.jit
def count_tiles(rows, columns):
    """How many tiles this program computes."""
    return gl.cdiv(gl.cdiv(rows, M) * gl.cdiv(columns, N) - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def tile_at(n, rows, columns):
    """First row and column of this program's n-th tile. Those that run at a time share A and B in the L2 cache."""
    t = gl.program_id(0) + n * gl.num_programs(0)
    across = gl.cdiv(columns, N)
    first = t // (GROUP * across) * GROUP
    height = gl.maximum(gl.minimum(gl.cdiv(rows, M) - first, GROUP), 1)  # also past the last tile, which is not loaded
    t -= first * across
    return (first + t % height) * M, t // height * N


@gluon.jit
def _load(place, a, b, rings, shape, steps, TRANSPOSED: gl.constexpr):
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
    if TRANSPOSED:
        tma.async_copy_global_to_shared(b, [j, k], full.index(slot), b_slots.index(slot), pred=there)
    else:
        tma.async_copy_global_to_shared(b, [k, j], full.index(slot), b_slots.index(slot), pred=there)
    k += K
    if k >= depth:
        k = 0
        n += 1
        i, j = tile_at(n, rows, columns)
    return step + 1, n, i, j, k


@gluon.jit
def multiplier(C: gl.constexpr, a, b, start, rings, results, shape, TRANSPOSED: gl.constexpr):
    """Rows 64 C to 64 C + 64 of every tile of this program. The first one loads for both, STAGES - 1 steps ahead.

    TRANSPOSED, `b` reads [N, K] of B^T; else [K, N] of B. start (rows,) fp32 is added to each row, or is None.
    """
    rows, columns, depth = shape
    a_slots, b_slots, full, empty = rings
    c_slots, c_full, c_empty = results
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    o_m = C * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    zeros = gl.zeros([ROWS, N], gl.float32, LAYOUT)
    count = count_tiles(rows, columns)
    steps = count * gl.cdiv(depth, K)
    i, j = tile_at(0, rows, columns)
    place = (0, 0, i, j, 0)
    if C == 0:
        for _ in gl.static_range(STAGES - 1):
            place = _load(place, a, b, rings, shape, steps, TRANSPOSED)
    it = 0
    for n in range(count):
        acc = zeros
        if start is not None:
            i = tile_at(n, rows, columns)[0]
            acc += gl.load(start + i + o_m, mask=i + o_m < rows, other=0.0)[:, None]
        acc = warpgroup_mma_init(acc)
        for k in range(0, depth, K):
            slot = it % STAGES
            mbarrier.wait(full.index(slot), it // STAGES & 1)
            b_s = b_slots.index(slot)
            if TRANSPOSED:
                b_s = b_s.permute([1, 0])
            a_s = a_slots.index(slot).slice(C * ROWS, ROWS)
            acc = warpgroup_mma(a_s, b_s, acc, is_async=True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
            mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), pred=k > 0)
            if C == 0:
                place = _load(place, a, b, rings, shape, steps, TRANSPOSED)
            it += 1
        c = warpgroup_mma_wait(0, deps=(acc,)).to(c_slots.dtype)
        mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES))
        mbarrier.wait(c_empty.index(C), (n + 1) & 1)
        c_slots.index(C).store(c)
        barrier()  # all warps have written
        mbarrier.arrive(c_full.index(C))


@gluon.jit
def chunk_places(columns):
    """Rows and columns of a chunk, counted from its first, and where they are in a matrix of so many columns."""
    o_m = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))
    o_n = gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUT))
    return o_m, o_n, (o_m * columns)[:, None] + o_n[None, :]


@gluon.jit
def shared_memory(a, b):
    """Rings of A and B with their barriers, and two slots for tiles of C with theirs."""
    a_slots = gl.allocate_shared_memory(a.dtype, [STAGES, M, K], a.layout)
    b_slots = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)  # noqa: RUF005
    C_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, N], a.dtype)
    c_slots = gl.allocate_shared_memory(a.dtype, [2, ROWS, N], C_LAYOUT)
    full, empty = ring(STAGES, 2)
    c_full, c_empty = ring(2, 1)
    return (a_slots, b_slots, full, empty), (c_slots, c_full, c_empty)


@cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype]
    return gl.NVMMASharedLayout.get_default_for([rows, columns], kind)


def operands(a: Tensor, b: Tensor, transposed: bool) -> tuple:
    """a and b as the kernel's TMA reads them; see multiplier."""
    blocks = [M.value, K.value], [N.value, K.value] if transposed else [K.value, N.value]
    return tuple(descriptor(x, block, _layout(*block, x.dtype)) for x, block in zip((a, b), blocks, strict=True))


def launch_product(kernel, key: tuple, a: Tensor, tensors: tuple, scalars: tuple, constants: tuple) -> None:
    """A program for each multiprocessor, or for each tile where those are fewer; scalars begin with C's shape.

    `key` is what besides the arguments' presence tells compilations apart; see launcher.launch.
    """
    rows, columns = scalars[:2]
    programs = min(-(-rows // M.value) * -(-columns // N.value), multiprocessors(a.device))
    with torch.cuda.device_of(a):
        launch(kernel, (a.dtype, a.device, *key), programs, tensors, scalars, constants, num_warps=4)
