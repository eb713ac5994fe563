"""The dQ warps of the Hopper backward: add tiles of dQ in shared memory to the accumulator, in a fixed order if wanted.

Legend: M rows of a query tile, N rows of a key tile, D0 + D1 head size; shape is (heads, groups, seq_q, seq_k).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.flash2.hopper_backward.schedule import turn_of
from kernels.hopper.gluon_versions import tma_add
from kernels.hopper.warpgroups import await_turn, end_turn


@gluon.jit
def reduce_dq(
    dq, bars, turns, batch, kv_head, tile, shape, groups, tiles, first, stop,
    M: gl.constexpr, N: gl.constexpr, D1: gl.constexpr, CAUSAL: gl.constexpr, WARPS: gl.constexpr, WARP: gl.constexpr,
):  # fmt: skip
    """Do the job of one warp: add each tile of dQ to the accumulator, once the consumers release the tile's dO.

    WARPS warps share the tiles; this one is WARP. If turns is not None, it waits for its turn (see turn_of).
    """
    dq0, dq1, dq0_s, dq1_s = dq
    heads = shape[0]
    _, _, _, do_empty, dq_empty = bars
    ROWS: gl.constexpr = dq0.block_type.shape[0] + (dq1.block_type.shape[0] if D1 else 0)
    OS: gl.constexpr = do_empty.shape[0]
    gl.static_assert(OS >= WARPS)  # otherwise a slot's next release would look like the one that this warp awaits
    t = 0
    for g in range(groups):
        for m in range(first, stop):
            if t % WARPS == WARP:
                query_tile = (batch * heads + kv_head * groups + g) * tiles + m
                row = query_tile * ROWS
                if turns is not None:
                    await_turn(turns + query_tile, turn_of(tile, m, shape, M, N, CAUSAL))
                mbarrier.wait(do_empty.index(t % OS), t // OS & 1)
                # dQ leaves through TMA
                tma_add(dq0, [row, 0], dq0_s)
                if D1:
                    tma_add(dq1, [row + dq0.block_type.shape[0], 0], dq1_s)
                tma.store_wait(0)
                mbarrier.arrive(dq_empty, count=1)
                if turns is not None:
                    end_turn(turns + query_tile)
            t += 1
