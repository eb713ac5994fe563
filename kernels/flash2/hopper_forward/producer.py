"""The producer warp of the Hopper forward. The docstring of kernel.py explains names, slots and tuples."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.flash2.hopper_forward.schedule import count_tiles, draw_tile, publish, tile_at, tile_of
from kernels.flash2.hopper_forward.tile import ROWS
from kernels.hopper.gluon_versions import tma_load


@gluon.jit
def _copy(x0, x1, batch, row, head, slots0, slots1, slot, full, D0: gl.constexpr, D1: gl.constexpr):
    """Start the copy of one tile by TMA; `full` must already expect its bytes."""
    tma_load(x0, [batch, row, head, 0], full, slots0.index(slot))
    if D1:
        tma_load(x1, [batch, row, head, D0], full, slots1.index(slot))


@gluon.jit
def _load_tile(
    n, it, v_place, place, rings, reads,
    N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
    DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """Load Q of the n-th tile, then K of each of its blocks together with V of the block before.

    Return the number of blocks so far, and batch, first key and head of the last block, whose V is not loaded yet.
    """
    BYTES: gl.constexpr = N * (D0 + D1) * 2  # of K or V in a slot
    q_slots, k_slots, v_slots, q_full, q_empty, full, empty, places = rings
    q0, q1, k0, k1, v0, v1, groups = reads
    batch, head, i, begin, blocks = place
    v_batch, v_row, v_head = v_place
    kv_head = head // groups
    # Q [64, D0 + D1] of each consumer
    for c in gl.static_range(CONSUMERS):
        slot = n % 2 * CONSUMERS + c
        mbarrier.wait(q_empty.index(slot), (n // 2 + 1) & 1)
        if DOCUMENTS:
            publish(places, slot, place)
        mbarrier.expect(q_full.index(slot), ROWS * (D0 + D1) * 2)
        _copy(q0, q1, batch, i + c * ROWS, head, q_slots[0], q_slots[1], slot, q_full.index(slot), D0, D1)
    # K [N, D0 + D1] of block j, and V of the block before; the very first block has no V beside it
    for j in range(blocks):
        slot = it % STAGES
        mbarrier.wait(empty.index(slot), (it // STAGES + 1) & 1)
        mbarrier.expect(full.index(slot), BYTES, pred=it == 0)
        mbarrier.expect(full.index(slot), 2 * BYTES, pred=it > 0)
        _copy(k0, k1, batch, (begin + j) * N, kv_head, k_slots[0], k_slots[1], slot, full.index(slot), D0, D1)
        if it > 0:
            _copy(v0, v1, v_batch, v_row, v_head, v_slots[0], v_slots[1], slot, full.index(slot), D0, D1)
        v_batch, v_row, v_head = batch, (begin + j) * N, kv_head
        it += 1
    return it, (v_batch, v_row, v_head)


@gluon.jit
def producer(
    rings, reads, shape, band,
    N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """Do the job of one warp: load each tile's Q, then K of each block together with V of the block before.

    Consumers need K one block earlier than V. So one slot, with one barrier, has K of a block and V of the one before.
    With documents, this warp also draws the tiles, and tells the consumers each tile's place or that none is left.
    """
    M: gl.constexpr = ROWS * CONSUMERS
    _q_slots, _k_slots, v_slots, q_full, q_empty, full, empty, places = rings
    v0, v1 = reads[4], reads[5]
    batches, heads, seq_q = shape[0], shape[1], shape[2]
    tiles = batches * heads * gl.cdiv(seq_q, M)
    it, v_place = 0, (0, 0, 0)
    if DOCUMENTS:
        n, t = 0, gl.program_id(0)
        place = tile_of(t, shape, band, M, N, CAUSAL, WINDOW, DOCUMENTS)
        following = draw_tile(band[2])  # one tile ahead, because the counter is in global memory
        while t < tiles:
            it, v_place = _load_tile(n, it, v_place, place, rings, reads, N, STAGES, CONSUMERS, D0, D1, DOCUMENTS)
            t = following
            place = tile_of(gl.minimum(t, tiles - 1), shape, band, M, N, CAUSAL, WINDOW, DOCUMENTS)
            following = draw_tile(band[2])
            n += 1
        for c in gl.static_range(CONSUMERS):
            slot = n % 2 * CONSUMERS + c
            mbarrier.wait(q_empty.index(slot), (n // 2 + 1) & 1)
            publish(places, slot, (-1, 0, 0, 0, 0))
            mbarrier.arrive(q_full.index(slot), count=1)
    else:
        for n in range(count_tiles(tiles)):
            place = tile_at(n, shape, band, M, N, CAUSAL, WINDOW, DOCUMENTS)
            it, v_place = _load_tile(n, it, v_place, place, rings, reads, N, STAGES, CONSUMERS, D0, D1, DOCUMENTS)
    # V of the last block
    v_batch, v_row, v_head = v_place
    slot = it % STAGES
    mbarrier.wait(empty.index(slot), (it // STAGES + 1) & 1)
    mbarrier.expect(full.index(slot), N * (D0 + D1) * 2)
    _copy(v0, v1, v_batch, v_row, v_head, v_slots[0], v_slots[1], slot, full.index(slot), D0, D1)
