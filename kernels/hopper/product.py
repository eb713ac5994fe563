"""A matrix product for Hopper with other work in its epilogue, in warp-specialised Gluon.

C = A B for A (rows, depth) and B (depth, columns). Two warpgroups multiply and leave each tile, rounded, in shared
memory. A third warpgroup, the epilogue, reads the tile from there and works on it before C is written. This saves
passes over memory, and its arithmetic runs while the tensor cores compute the next tile. The caller provides the
epilogue and the kernel.

The product follows CUTLASS's cooperative kernel. One program stays on each multiprocessor and walks over the tiles.
Each multiplying warpgroup owns 64 of the M rows. TMA loads A and B through a ring in shared memory. The first
multiplying warpgroup starts the loads: with a fourth warpgroup for loads, a wgmma of N = 256 columns would lack
registers.

An H200 multiplies at its power limit and at the bandwidth of shared memory. So an epilogue should read a tile from
shared memory only once and move all else between global memory and registers.

M rows and N columns of a tile, K depth of a step: a program's step number `it`, over all its tiles, is in slot
it % STAGES. Accumulators are fp32. Shared memory, in 16 bits:
a_slots [STAGES, M, K], b_slots [STAGES, N, K] (TRANSPOSED) or [STAGES, K, N], c_slots [2, ROWS, N].
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from kernels.common.launching import launch_kernel
from kernels.hopper.gluon_versions import barrier, tma_load
from kernels.hopper.selection import TILE
from kernels.hopper.warpgroups import accumulator_layout, allocate_slots, blocks_of, multiprocessors, ring

ROWS: gl.constexpr = gl.constexpr(64)  # of a multiplying warpgroup: the M of wgmma
M: gl.constexpr = gl.constexpr(TILE[0])
N: gl.constexpr = gl.constexpr(TILE[1])
K: gl.constexpr = gl.constexpr(64)
STAGES: gl.constexpr = gl.constexpr(3)
# Tiles are computed in groups of GROUP rows of tiles, all columns of a group before the next group. On an H200 in
# sustained load, 8 was the fastest of 8, 13, 16, 32 and 64 at most depths; 32 took 0.5 to 3.3 % longer.
GROUP: gl.constexpr = gl.constexpr(8)
CHUNK: gl.constexpr = gl.constexpr(8)  # rows that an epilogue reads at a time; the swizzle repeats after 8 rows
CHUNKS: gl.constexpr = gl.constexpr(ROWS.value // CHUNK.value)  # of a multiplying warpgroup's rows
CHUNK_LAYOUT: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))  # [CHUNK, N]
REGISTERS = 168  # of a thread, the same for each of the three warpgroups


@gluon.jit
def count_tiles(rows, columns):
    """Return the number of tiles that this program computes."""
    return gl.cdiv(gl.cdiv(rows, M) * gl.cdiv(columns, N) - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def tile_at(n, rows, columns):
    """Return the first row and column of this program's n-th tile. Concurrent tiles share A and B in the L2 cache."""
    t = gl.program_id(0) + n * gl.num_programs(0)
    across = gl.cdiv(columns, N)
    first = t // (GROUP * across) * GROUP
    height = gl.maximum(gl.minimum(gl.cdiv(rows, M) - first, GROUP), 1)  # at least 1: called past the last tile too
    t -= first * across
    return (first + t % height) * M, t // height * N


@gluon.jit
def _load(place, a, b, rings, shape, steps, TRANSPOSED: gl.constexpr):
    """Wait for the step's slot, start the copies into it if the step exists, and return the next step's place:
    (step, number of its tile, row of A, column of B, depth).
    """
    step, n, i, j, k = place
    rows, columns, depth = shape
    a_slots, b_slots, full, empty = rings
    slot, there = step % STAGES, step < steps
    mbarrier.wait(empty.index(slot), (step // STAGES + 1) & 1, pred=there)
    mbarrier.expect(full.index(slot), (M + N) * K * 2, pred=there)  # bytes of A and B
    tma_load(a, [i, k], full.index(slot), a_slots.index(slot), pred=there)
    if TRANSPOSED:
        tma_load(b, [j, k], full.index(slot), b_slots.index(slot), pred=there)
    else:
        tma_load(b, [k, j], full.index(slot), b_slots.index(slot), pred=there)
    k += K
    if k >= depth:
        k = 0
        n += 1
        i, j = tile_at(n, rows, columns)
    return step + 1, n, i, j, k


@gluon.jit
def multiplier(half: gl.constexpr, a, b, start, rings, results, shape, TRANSPOSED: gl.constexpr):
    """Compute rows 64 half to 64 half + 64 of every tile. Half 0 loads for both halves, STAGES - 1 steps ahead.

    `b` reads [N, K] of B^T if TRANSPOSED, or else [K, N] of B. start (rows,) fp32 is added to each row, or is None.
    """
    rows, columns, depth = shape
    a_slots, b_slots, full, empty = rings
    c_slots, c_full, c_empty = results
    ACC_LAYOUT: gl.constexpr = accumulator_layout(N)
    o_m = half * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC_LAYOUT))
    zeros = gl.zeros([ROWS, N], gl.float32, ACC_LAYOUT)
    count = count_tiles(rows, columns)
    steps = count * gl.cdiv(depth, K)
    i, j = tile_at(0, rows, columns)
    place = (0, 0, i, j, 0)
    if half == 0:
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
                b_s = b_s.permute([1, 0])  # [K, N]
            a_s = a_slots.index(slot).slice(half * ROWS, ROWS)  # [ROWS, K]
            acc = warpgroup_mma(a_s, b_s, acc, is_async=True)  # C += A B
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
            # The product of the step before is done, so release its slot. Step 0 releases nothing: the tile before has
            # released its last slot itself.
            mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), pred=k > 0)
            if half == 0:
                place = _load(place, a, b, rings, shape, steps, TRANSPOSED)
            it += 1
        c = warpgroup_mma_wait(0, deps=(acc,)).to(c_slots.dtype)
        mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES))
        # Hand C [ROWS, N] to the epilogue, once it has read C of the tile before.
        mbarrier.wait(c_empty.index(half), (n + 1) & 1)
        c_slots.index(half).store(c)
        barrier()  # until all warps have written
        mbarrier.arrive(c_full.index(half))


@gluon.jit
def chunk_places(columns):
    """Return row and column numbers of a chunk, and its offsets [CHUNK, N] in a matrix with `columns` columns."""
    o_m = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, CHUNK_LAYOUT))
    o_n = gl.arange(0, N, layout=gl.SliceLayout(0, CHUNK_LAYOUT))
    return o_m, o_n, (o_m * columns)[:, None] + o_n[None, :]


@gluon.jit
def shared_memory(a, b):
    """Allocate the rings of A and B, two slots for halves of C, and the barriers of both.

    Both multiplying warpgroups release a slot of A and B. The epilogue releases a half of C.
    """
    a_slots = allocate_slots(a, STAGES)
    b_slots = allocate_slots(b, STAGES)
    C_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, N], a.dtype)
    c_slots = gl.allocate_shared_memory(a.dtype, [2, ROWS, N], C_LAYOUT)
    full, empty = ring(STAGES, 2)
    c_full, c_empty = ring(2, 1)
    return (a_slots, b_slots, full, empty), (c_slots, c_full, c_empty)


def operands(a: Tensor, b: Tensor, transposed: bool) -> tuple:
    """Return TMA descriptors of a and b for `multiplier`."""
    b_block = (N.value, K.value) if transposed else (K.value, N.value)
    return blocks_of(a, M.value, K.value), blocks_of(b, *b_block)


def launch_product(kernel, key: tuple, a: Tensor, tensors: tuple, scalars: tuple, constants: tuple) -> None:
    """Launch one program per multiprocessor, or per tile if there are fewer. `scalars` begin with C's shape.

    `key` distinguishes compilations that a's dtype and device do not; see launch_kernel.
    """
    rows, columns = scalars[:2]
    programs = min(-(-rows // M.value) * -(-columns // N.value), multiprocessors(a.device))
    with torch.cuda.device_of(a):
        launch_kernel(kernel, (a.dtype, a.device, *key), programs, tensors, scalars, constants, num_warps=4)
