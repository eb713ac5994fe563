"""The main kernel of the Hopper backward: its loading warp, its consumers, and their launch with the dQ warps.

Legend:

- M: rows of a query tile
- N: rows of a key tile
- D0 + D1: head size in two parts; x0 and x1 are the two parts of x
- x0_s: part 0 in shared memory; b_x0 is one tile of x0_s as a matrix
- j: first key of the program
- [first, stop): the query tiles that see some key of the program; t counts them over the query heads of the group
- QS, OS: slots of the rings, QS for Q and its statistics, OS for dO

Barriers, in the tuple bars: k_full of K and of V, q_full of Q's slots, do_full and do_empty of dO's slots, and dq_empty
of the one tile of dQ. A release of dO at do_empty also says that dQ of this tile is in dq0_s and dq1_s. warpgroups.ring
explains the parities.

Other tuples: shape is (heads, groups, seq_q, seq_k), band is (documents, window), and dropout is (numbers, threshold,
keep_scale).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from kernels.common.head_rows import LOG2_E, queries_of
from kernels.flash2.hopper_backward.finish import in_register_order
from kernels.flash2.hopper_backward.reducer import reduce_dq
from kernels.flash2.hopper_backward.schedule import place, query_tiles
from kernels.flash2.hopper_backward.tile import add_product, both_halves, half_of, ones_at, whole_tile
from kernels.flash2.tiles import in_halves
from kernels.hopper.gluon_versions import barrier, tma_load, tma_store
from kernels.hopper.warpgroups import accumulator_layout, allocate_slots, release

_in_halves = gluon.constexpr_function(in_halves)


@gluon.jit
def _load(x0, x1, x0_s, x1_s, bar, batch, row, head, BYTES: gl.constexpr, D1: gl.constexpr):
    """Load one tile of x (B, length, heads, D0 + D1) by TMA; the barrier waits for BYTES in all."""
    mbarrier.expect(bar, BYTES)
    tma_load(x0, [batch, row, head, 0], bar, x0_s)
    if D1:
        tma_load(x1, [batch, row, head, 64], bar, x1_s)


@gluon.constexpr_function
def rows_of_warps(m, warps):
    """Return how many warps share the m rows of dQ; the other warps share its columns."""
    return warps if m >= 16 * warps else 4


@gluon.constexpr_function
def is_transposed(n, head_dim):
    """Return whether dQ is computed as dQ^T = K^T dS^T, with K, K^T and V held in registers."""
    return n == head_dim == 64


@gluon.constexpr_function
def _each(warps):
    """Return whether each thread releases a slot of dO itself; see warpgroups.release.

    On an H200, two warpgroups are 3 to 4 % faster with it. One has few warps to wait for and is 1 to 4 % slower.
    """
    return warps > 4


@gluon.jit
def _producer(
    inputs, stats, buffers, stats_s, bars, batch, kv_head, j, heads, groups, tiles, first, stop, D1: gl.constexpr
):  # fmt: skip
    """Do the job of one warp: load K and V once, then Q, its statistics and dO through rings of tiles.

    Slots of Q need no barrier of their own for being empty. The consumers release dO of a tile after they are done with
    Q of the tile before. At tile t this warp waits for the release of dO of tile t - OS. Then Q of tile t - 1 - OS is
    free too. With OS + 1 slots this is the slot of Q to load next, so wait before loading Q. With OS + 2 slots wait
    after loading Q.
    """
    q0, q1, k0, k1, v0, v1, do0, do1 = inputs
    q0_s, q1_s, k0_s, k1_s, v0_s, v1_s, do0_s, do1_s = buffers
    k_full, q_full, do_full, do_empty, _ = bars
    M: gl.constexpr = q0.block_type.shape[1]
    QS: gl.constexpr = q0_s.shape[0]
    OS: gl.constexpr = do0_s.shape[0]
    STATS: gl.constexpr = stats_s.shape[0] // QS
    ROWS: gl.constexpr = stats.block_type.shape[0]
    K_BYTES: gl.constexpr = k0.block_type.nbytes + (k1.block_type.nbytes if D1 else 0)
    DO_BYTES: gl.constexpr = q0.block_type.nbytes + (q1.block_type.nbytes if D1 else 0)
    Q_BYTES: gl.constexpr = DO_BYTES + STATS * stats.block_type.nbytes
    # K [N, D]
    _load(k0, k1, k0_s, k1_s, k_full.index(0), batch, j, kv_head, K_BYTES, D1)
    t = 0
    for g in range(groups):
        for m in range(first, stop):
            head = kv_head * groups + g
            row = STATS * ROWS * ((batch * heads + head) * tiles + m)
            s, o = t % QS, t % OS
            bar = q_full.index(s)
            if QS == OS + 1:
                mbarrier.wait(do_empty.index(o), (t // OS & 1) ^ 1)
            # Q [M, D] and its statistics
            _load(q0, q1, q0_s.index(s), q1_s.index(s), bar, batch, m * M, head, Q_BYTES, D1)
            for i in gl.static_range(STATS):
                tma_load(stats, [row + i, 0], bar, stats_s.index(STATS * s + i))
            # V [N, D], once, after the first Q: S = Q K^T comes first
            if t == 0:
                _load(v0, v1, v0_s, v1_s, k_full.index(1), batch, j, kv_head, K_BYTES, D1)
            if QS == OS + 2:
                mbarrier.wait(do_empty.index(o), (t // OS & 1) ^ 1)
            # dO [M, D]
            _load(do0, do1, do0_s.index(o), do1_s.index(o), do_full.index(o), batch, m * M, head, DO_BYTES, D1)
            t += 1


@gluon.jit
def _wait_for_sum(running: gl.constexpr, x, x_1, D1: gl.constexpr):
    """Wait until at most `running` products run, and return both parts of the sum x as accumulators."""
    if D1:
        x, x_1 = warpgroup_mma_wait(running, deps=(x, x_1))
        return warpgroup_mma_init(x), warpgroup_mma_init(x_1)
    else:
        x = warpgroup_mma_wait(running, deps=(x,))
        return warpgroup_mma_init(x), x_1


@gluon.jit
def _write(outputs, buffers, dk, dk_1, dv, dv_1, scale, keep_scale, batch, j, kv_head, D1: gl.constexpr):
    """Write dK and dV [N, D], scaled and rounded, by TMA from the shared memory of K and V, which is free now."""
    dk0, dk1, dv0, dv1 = outputs
    k0_s, k1_s, v0_s, v1_s = buffers
    dtype: gl.constexpr = k0_s.dtype
    if D1:
        dk, dv, dk_1, dv_1 = warpgroup_mma_wait(0, deps=(dk, dv, dk_1, dv_1))
    else:
        dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
    barrier()  # until the products of all warps have read K and V
    v0_s.reshape(dv.shape).store((dv * keep_scale).to(dtype))
    k0_s.reshape(dk.shape).store((dk * (scale * keep_scale)).to(dtype))
    if D1:
        v1_s.reshape(dv_1.shape).store((dv_1 * keep_scale).to(dtype))
        k1_s.reshape(dk_1.shape).store((dk_1 * (scale * keep_scale)).to(dtype))
    fence_async_shared()
    barrier()  # until all warps have written
    tma_store(dv0, [batch, j, kv_head, 0], v0_s)
    tma_store(dk0, [batch, j, kv_head, 0], k0_s)
    if D1:
        tma_store(dv1, [batch, j, kv_head, 64], v1_s)
        tma_store(dk1, [batch, j, kv_head, 64], k1_s)
    tma.store_wait(0)


@gluon.jit
def _consumer(
    outputs, buffers, stats_s, ds_s, dq0_s, dq1_s, bars,
    batch, kv_head, j, shape, band, first, stop, full, full_end, scale, dropout,
    WARPS: gl.constexpr, D1: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr,
    DROPOUT: gl.constexpr, FUSED: gl.constexpr,
):  # fmt: skip
    """Do the job of WARPS warps: keep dK and dV of one key tile in registers and loop over the query tiles that see it.

    Per query tile: compute dS^T and issue dV += P^T dO (tile.py), issue dQ = dS K and dK += dS^T Q, and hand dQ over
    while dS^T Q runs. P^T and dS^T are operands in registers; dQ reads dS^T from shared memory. dK and dQ lack
    the scale here. With dropout, dK, dV and dQ lack the factor 1 / (1 - p). _write and finish_kernel multiply by both
    once, at the end.
    """
    heads, groups, seq_q, seq_k = shape
    numbers, threshold, keep_scale = dropout
    offset = seq_k - seq_q
    q0_s, q1_s, k0_s, k1_s, v0_s, v1_s, do0_s, do1_s = buffers
    k_full, q_full, do_full, do_empty, dq_empty = bars
    M: gl.constexpr = q0_s.shape[2]
    N: gl.constexpr = k0_s.shape[1]
    D0: gl.constexpr = k0_s.shape[3]
    QS: gl.constexpr = q0_s.shape[0]
    OS: gl.constexpr = do0_s.shape[0]
    STATS: gl.constexpr = stats_s.shape[0] // QS
    PARTS: gl.constexpr = 2 if D1 else 1
    IN_PRODUCTS: gl.constexpr = stats_s.dtype == gl.bfloat16
    # Heads of 80 with a causal mask or none have tiles of 128 queries, computed in two halves except for dQ. Each
    # warpgroup then has 64 rows and all columns of dQ. With 64 queries, each warpgroup would have all rows and half of
    # the columns, and both would read all of dS. With tiles of 64 keys, twice as many programs would add to dQ.
    IN_HALVES: gl.constexpr = FUSED and _in_halves(M, D0 + D1) and not DROPOUT
    WM: gl.constexpr = rows_of_warps(M, WARPS)
    WN: gl.constexpr = WARPS // WM
    SL: gl.constexpr = accumulator_layout(M // 2 if IN_HALVES else M, WARPS)  # of S^T, P^T, dP^T and dS^T [N, M]
    K0L: gl.constexpr = accumulator_layout(D0, WARPS)  # of dK and dV [N, D0]
    Q0L: gl.constexpr = accumulator_layout(D0, WM, WN)  # of dQ [M, D0]
    QTL: gl.constexpr = accumulator_layout(M, WARPS)  # of dQ^T [D0, M]
    if D1:
        K1L: gl.constexpr = accumulator_layout(D1, WARPS)
        Q1L: gl.constexpr = accumulator_layout(D1, WM, WN)
    # Products of 64 columns read operands as fast as shared memory delivers. So with 64 keys part 0 of V is held in
    # registers. Without part 1, K and K^T are too, and dQ is computed as its transpose, K^T dS^T. Without dQ, none is:
    # ptxas 12.8 would overwrite the registers of K with P, although the next tile needs K.
    V_HELD: gl.constexpr = FUSED and N == 64 and D0 == 64
    HELD: gl.constexpr = FUSED and is_transposed(N, D0 + D1)

    b_k0, b_v0 = k0_s.reshape([N, D0]), v0_s.reshape([N, D0])
    b_k1, b_v1 = b_k0, b_v0
    dk = warpgroup_mma_init(gl.zeros([N, D0], gl.float32, K0L))
    dv = warpgroup_mma_init(gl.zeros([N, D0], gl.float32, K0L))
    dk_1, dv_1 = 0, 0
    if D1:
        b_k1, b_v1 = k1_s.reshape([N, D1]), v1_s.reshape([N, D1])
        dk_1 = warpgroup_mma_init(gl.zeros([N, D1], gl.float32, K1L))
        dv_1 = warpgroup_mma_init(gl.zeros([N, D1], gl.float32, K1L))
    scale_log2 = scale * LOG2_E
    o_j = j + gl.arange(0, N, layout=gl.SliceLayout(1, SL))
    BANDED: gl.constexpr = WINDOW or DOCUMENTS
    first_query, end_query = full, full
    if BANDED:
        documents, window = band
        first_query, end_query = queries_of(
            o_j, documents, batch, offset, seq_q, seq_k, window, CAUSAL, WINDOW, DOCUMENTS
        )
    masked = (full, full_end, seq_k, offset, first_query, end_query)
    if DROPOUT:
        p_keys = numbers + (batch * heads + kv_head * groups).to(gl.int64) * (seq_q + seq_k) + seq_q + o_j
    of_lse, of_delta = 0, 0
    if IN_PRODUCTS and not IN_HALVES:
        of_lse = ones_at(0, N, gl.DotOperandLayout(0, SL, 2))
        of_delta = ones_at(3, N, gl.DotOperandLayout(0, SL, 2))
    mbarrier.wait(k_full.index(0), 0)  # K
    mbarrier.wait(k_full.index(1), 0)  # V
    # The first operands of S^T and dP^T
    a_k0, a_v0 = b_k0, b_v0
    if V_HELD:
        a_v0 = b_v0.load(gl.DotOperandLayout(0, SL, 2))
    if HELD:
        a_k0 = b_k0.load(gl.DotOperandLayout(0, SL, 2))
        a_kt = b_k0.permute([1, 0]).load(gl.DotOperandLayout(0, QTL, 2))
    t = 0
    for g in range(groups):
        for m in range(first, stop):
            s, o = t % QS, t % OS
            b_ds = ds_s.index(t % ds_s.shape[0]) if FUSED else ds_s
            b_q0, b_do0 = q0_s.index(s).reshape([M, D0]), do0_s.index(o).reshape([M, D0])
            b_q1, b_do1 = b_q0, b_do0
            if D1:
                b_q1, b_do1 = q1_s.index(s).reshape([M, D1]), do1_s.index(o).reshape([M, D1])
            if FUSED and _each(WARPS) and ds_s.shape[0] == 1:
                # Both warpgroups release dO of the tile before only after they are done with its dS.
                mbarrier.wait(do_empty.index((t + OS - 1) % OS), (t + 2 * OS - 1) // OS & 1)
            # dS^T [N, M], dV += P^T dO [N, D]
            if IN_HALVES:
                b_lse, b_delta = stats_s.index(STATS * s), stats_s.index(STATS * s)  # the same tile if IN_PRODUCTS
                if not IN_PRODUCTS:
                    b_lse, b_delta = b_lse.reshape([M]), stats_s.index(STATS * s + 1).reshape([M])
                ds16, dk, dk_1, dv, dv_1 = both_halves(
                    (a_k0, b_k1, a_v0, b_v1), (b_q0, b_q1, b_do0, b_do1), (b_lse, b_delta), b_ds,
                    q_full.index(s), t // QS & 1, do_full.index(o), t // OS & 1, dk, dk_1, dv, dv_1,
                    j, m * M, masked, scale_log2, SL, D1, WARPS, CAUSAL, BANDED, IN_PRODUCTS,
                )  # fmt: skip
                b_q0, b_q1 = half_of(b_q0, 1), half_of(b_q1, 1)
            else:
                dropped = (0, 0, threshold)
                if DROPOUT:
                    dropped = (p_keys + g * (seq_q + seq_k), o_j < seq_k, threshold)
                ds16, dv, dv_1 = whole_tile(
                    (a_k0, b_k1, a_v0, b_v1), (b_q0, b_q1, b_do0, b_do1), stats_s, STATS * s, b_ds,
                    q_full.index(s), t // QS & 1, do_full.index(o), t // OS & 1, dv, dv_1, (of_lse, of_delta),
                    j, m * M, masked, scale_log2, dropped,
                    SL, D1, WARPS, CAUSAL, BANDED, DROPOUT, FUSED,
                )  # fmt: skip
            # dQ = dS K  [M, D], or dQ^T = K^T dS^T  [D, M]
            if FUSED:
                barrier()  # until all warps have stored dS^T
            if HELD:
                dq = gl.zeros([D0, M], gl.float32, QTL)
                dq = warpgroup_mma(a_kt, b_ds, dq, use_acc=False, is_async=True)
            elif FUSED:
                dq = gl.zeros([M, D0], gl.float32, Q0L)
                dq = warpgroup_mma(b_ds.permute([1, 0]), b_k0, dq, use_acc=False, is_async=True)
                if D1:
                    dq_1 = gl.zeros([M, D1], gl.float32, Q1L)
                    dq_1 = warpgroup_mma(b_ds.permute([1, 0]), b_k1, dq_1, use_acc=False, is_async=True)
            if FUSED and _each(WARPS) and not IN_HALVES:
                # Otherwise Triton inserts a barrier between dQ, which reads dS, and the next store of dS, among the
                # exponentials. On an H200, this place makes heads of 64, 96 and 128 up to 3 % faster.
                barrier()
            # dK += dS^T Q  [N, D]
            dk, dk_1 = add_product(ds16, b_q0, b_q1, dk, dk_1, D1, WARPS)
            dv, dv_1 = _wait_for_sum(PARTS, dv, dv_1, D1)  # only dS^T Q may still run
            # dQ to shared memory, for reduce_dq
            if FUSED:
                mbarrier.wait(dq_empty, (t & 1) ^ 1)
                dq = warpgroup_mma_wait(PARTS, deps=(dq,))
                if HELD:
                    dq0_s.reshape([M * D0]).store(in_register_order(dq, D0, M, WARPS, 1))
                else:
                    dq0_s.reshape([M * D0]).store(in_register_order(dq, M, D0, WM, WN))
                if D1:
                    dq_1 = warpgroup_mma_wait(PARTS, deps=(dq_1,))
                    dq1_s.reshape([M * D1]).store(in_register_order(dq_1, M, D1, WM, WN))
                fence_async_shared()
            release(do_empty.index(o), _each(WARPS))
            dk, dk_1 = _wait_for_sum(0, dk, dk_1, D1)
            t += 1

    _write(outputs, (k0_s, k1_s, v0_s, v1_s), dk, dk_1, dv, dv_1, scale, keep_scale, batch, j, kv_head, D1)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate COUNT barriers. Each waits for ARRIVALS arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(COUNT):
        mbarrier.init(bars.index(s), count=ARRIVALS)
    return bars


@gluon.jit(do_not_specialize=["batches", "heads", "groups", "seq_q", "seq_k", "section", "window", "threshold"])
def main_kernel(
    q0, q1, k0, k1, v0, v1, do0, do1, stats, dq0, dq1, dk0, dk1, dv0, dv1, numbers, documents, turns,
    batches, heads, groups, seq_q, seq_k, section, window, scale, threshold, keep_scale,
    D1: gl.constexpr, WARPS: gl.constexpr, OS: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    DOCUMENTS: gl.constexpr, DROPOUT: gl.constexpr, FUSED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV and add up dQ. WARPS warps compute. More warps, with REGISTERS per thread, load and add up dQ.

    q0 to do1, dk0 to dv1: descriptors of the two parts of (B, length, heads, head_dim), None for an empty part 1.
    stats: as delta_kernel writes it. dq0, dq1: the accumulator in rows of 256 floats, None if not FUSED.
    numbers: dropout's, or None. documents and window: as in the plain kernel, or None and 0.
    turns: (B * heads * tiles) int32, how many key tiles have added to dQ of each query tile, zero at first; or None if
    the additions need no order.
    Grid: B * (heads / groups) * cdiv(seq_k, N), in the order of schedule.place.
    """
    M: gl.constexpr = q0.block_type.shape[1]
    N: gl.constexpr = k0.block_type.shape[1]
    QS: gl.constexpr = OS + 1 if WARPS > 4 else OS + 2  # see _producer
    dtype: gl.constexpr = q0.dtype
    kv_heads = heads // groups
    ORDERED: gl.constexpr = turns is not None
    bg, tile = place(batches * kv_heads, gl.cdiv(seq_k, N), section, ORDERED)
    batch, kv_head, j = bg // kv_heads, bg % kv_heads, tile * N
    tiles = gl.cdiv(seq_q, M)
    shape = (heads, groups, seq_q, seq_k)
    first, stop, full, full_end = query_tiles(j, documents, batch, shape, window, M, N, CAUSAL, WINDOW, DOCUMENTS)

    # Shared memory: K, V [N, D]; Q, dO [M, D] in rings; statistics; dS^T [N, M]; dQ [M, D]
    k0_s = gl.allocate_shared_memory(dtype, k0.block_type.shape, k0.layout)
    v0_s = gl.allocate_shared_memory(dtype, v0.block_type.shape, v0.layout)
    q0_s = allocate_slots(q0, QS)
    do0_s = allocate_slots(do0, OS)
    STATS: gl.constexpr = 1 if stats.dtype == gl.bfloat16 else 3 if DROPOUT else 2  # tiles of one query tile
    stats_s = allocate_slots(stats, STATS * QS)
    ds_s, dq0_s, dq1_s = k0_s, stats_s.index(0), stats_s.index(0)
    if FUSED:
        # For dQ each of two warpgroups reads dS that the other one stored. With a second tile of dS, it need not wait
        # for the other before it stores the next dS. It reuses a tile after two rounds. The barrier of the round in
        # between shows that the other has finished its products. With halves, shared memory has room for one tile only.
        DS: gl.constexpr = 2 if _each(WARPS) and not _in_halves(M, k0.block_type.shape[3] + D1) else 1
        ds_s = gl.allocate_shared_memory(dtype, [DS, N, M], gl.NVMMASharedLayout.get_default_for([N, M], dtype))
        dq0_s = gl.allocate_shared_memory(gl.float32, dq0.block_type.shape, dq0.layout)
        if D1:
            dq1_s = gl.allocate_shared_memory(gl.float32, dq1.block_type.shape, dq1.layout)
        else:
            dq1, dq1_s = dq0, dq0_s
    else:  # placeholders: reduce_dq gets no tile of dQ
        dq0, dq1 = stats, stats
    if D1:
        k1_s = gl.allocate_shared_memory(dtype, k1.block_type.shape, k1.layout)
        v1_s = gl.allocate_shared_memory(dtype, v1.block_type.shape, v1.layout)
        q1_s = allocate_slots(q1, QS)
        do1_s = allocate_slots(do1, OS)
    else:
        k1_s, v1_s, q1_s, do1_s = k0_s, v0_s, q0_s, do0_s
        q1, k1, v1, do1, dk1, dv1 = q0, k0, v0, do0, dk0, dv0
    do_empty = _barriers(OS, 32 * WARPS if _each(WARPS) else 1)
    bars = (_barriers(2, 1), _barriers(QS, 1), _barriers(OS, 1), do_empty, _barriers(1, 1).index(0))
    inputs = (q0, q1, k0, k1, v0, v1, do0, do1)
    outputs = (dk0, dk1, dv0, dv1)
    buffers = (q0_s, q1_s, k0_s, k1_s, v0_s, v1_s, do0_s, do1_s)
    dropout = (numbers, threshold, keep_scale)
    dq = (dq0, dq1, dq0_s, dq1_s)
    added = groups if FUSED else 0
    # An addition in a fixed order takes longer than a round, so two warps share them.
    ADDERS: gl.constexpr = 2 if ORDERED else 1
    gl.warp_specialize(
        [
            (
                _consumer,
                (outputs, buffers, stats_s, ds_s, dq0_s, dq1_s, bars, batch, kv_head, j, shape, (documents, window),
                 first, stop, full, full_end, scale, dropout, WARPS, D1, CAUSAL, WINDOW, DOCUMENTS, DROPOUT, FUSED),
            ),
            (
                _producer,
                (inputs, stats, buffers, stats_s, bars, batch, kv_head, j, heads, groups, tiles, first, stop, D1),
            ),
            (
                reduce_dq,
                (dq, bars, turns, batch, kv_head, tile, shape, added, tiles, first, stop, M, N, D1, CAUSAL, ADDERS, 0),
            ),
            (
                reduce_dq,
                (dq, bars, turns, batch, kv_head, tile, shape, added, tiles, first, stop, M, N, D1, CAUSAL, ADDERS, 1),
            ),
        ][: 2 + ADDERS],
        [1] * (1 + ADDERS),
        [REGISTERS] * (1 + ADDERS),
    )  # fmt: skip
