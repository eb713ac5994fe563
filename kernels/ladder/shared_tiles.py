"""How tiles come into shared memory in the last backward step: loaded by one warp, or stored by the others."""

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kernels.hopper.gluon_versions import barrier, tma_load


@gluon.jit
def load(kv_s, qdo_s, stats_s, full, empty, row_q, row_k, column, steps, q, k, v, dout, stats, row, first):
    """Load a tile of K and V once. Then load tiles of queries from row_q on, each into a free slot of the ring.

    kv_s [2, N, D] holds K and V; the last barrier of `full` counts their bytes. qdo_s [4, M, D] holds Q in slots 0 and
    1, and dO in slots 2 and 3. stats_s [4, 1, M] holds logsumexp in slots 0 and 1, and delta in slots 2 and 3. The
    matrix `stats` holds logsumexp in `row` and delta in the next row, from column `first` on.
    """
    mbarrier.expect(full.index(2), 2 * k.block_type.nbytes)
    tma_load(k, [row_k, column], full.index(2), kv_s.index(0))
    tma_load(v, [row_k, column], full.index(2), kv_s.index(1))
    for t in range(steps):
        i, slot = t * q.block_type.shape[0], t % 2
        bar = full.index(slot)
        mbarrier.wait(empty.index(slot), (t // 2 + 1) & 1)
        mbarrier.expect(bar, 2 * (q.block_type.nbytes + stats.block_type.nbytes))
        tma_load(q, [row_q + i, column], bar, qdo_s.index(slot))
        tma_load(stats, [row, first + i], bar, stats_s.index(slot))
        tma_load(dout, [row_q + i, column], bar, qdo_s.index(2 + slot))
        tma_load(stats, [row + 1, first + i], bar, stats_s.index(2 + slot))


@gluon.jit
def store(x, tile):
    """Store x to a tile in shared memory. On return, the products and TMA copies of all warps see the whole tile."""
    tile.store(x)
    fence_async_shared()
    barrier()
