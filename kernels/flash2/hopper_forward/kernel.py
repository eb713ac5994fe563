"""The kernel of the Hopper forward: its producer warp, its consumer warpgroups, and the launch of both.

Legend: M rows of a query tile, ROWS = 64 of one consumer, N keys of a block, D0 + D1 head size; x0 and x1 are the two
parts of x. `it` is the number of key blocks before this tile in all tiles of this program. K of block j of this tile
is in slot (it + j) % STAGES of the rings, V of the same block in the next slot. The n-th tile's Q of consumer C is in
slot n % 2 * CONSUMERS + C of Q's ring.

The tuple rings has the slots of Q, K and V in shared memory, and then their barriers. q_full and q_empty are for Q's
slots. full and empty are for the slots of K and V.

Other tuples: shape is (batches, heads, seq_q, seq_k, section), band is (documents, window), and dropout is (numbers,
threshold, keep_scale). count_blocks returns counts, and visible_keys returns seen.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_init, warpgroup_mma_wait

from kernels.common.head_rows import LOG2_E
from kernels.flash2.hopper_forward.schedule import count_tiles, tile_at
from kernels.flash2.hopper_forward.tile import (
    ROWS,
    as_operand,
    count_blocks,
    issue_output,
    issue_scores,
    key_numbers,
    load_queries,
    mask,
    needs_mask,
    new_maxima,
    partial_sums,
    query_numbers,
    rescale,
    softmax,
    store_tile,
    visible_keys,
    wait_for_output,
)
from kernels.hopper.gluon_versions import tma_load
from kernels.hopper.warpgroups import accumulator_layout, allocate_slots, release, ring

THREADS: gl.constexpr = gl.constexpr(128)  # of one consumer


@gluon.constexpr_function
def _each(columns, consumers):
    """Return whether each thread of a consumer releases slots itself; see warpgroups.release.

    Causal on an H200, heads of 128 are 0 to 5 % faster with it. Heads of 64 with two consumers are 1 to 4 % slower.
    """
    return columns == 128 or consumers == 3


@gluon.constexpr_function
def _after_products(head_dim):
    """Return whether a consumer computes the exponentials after it has awaited P V, not under its own P V.

    The exponentials then run under the products of the other consumers. On an H100, heads of 64 with two consumers are
    1 to 2 % faster with it. Heads of 80 are 2 to 10 % slower, and heads of 128 up to 4 %.
    """
    return head_dim == 64


@gluon.jit
def _copy(x0, x1, batch, row, head, slots0, slots1, slot, full, D0: gl.constexpr, D1: gl.constexpr):
    """Start the copy of one tile by TMA; `full` must already expect its bytes."""
    tma_load(x0, [batch, row, head, 0], full, slots0.index(slot))
    if D1:
        tma_load(x1, [batch, row, head, D0], full, slots1.index(slot))


@gluon.jit
def _producer(
    rings, reads, shape, band,
    N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """Do the job of one warp: load each tile's Q, then K of each block together with V of the block before.

    Consumers need K one block earlier than V. So one slot, with one barrier, has K of a block and V of the one before.
    """
    BYTES: gl.constexpr = N * (D0 + D1) * 2  # of K or V in a slot
    M: gl.constexpr = ROWS * CONSUMERS
    q_slots, k_slots, v_slots, q_full, q_empty, full, empty = rings
    q0, q1, k0, k1, v0, v1, groups = reads
    batches, heads, seq_q = shape[0], shape[1], shape[2]
    it = 0
    v_batch, v_row, v_head = 0, 0, 0
    for n in range(count_tiles(batches * heads * gl.cdiv(seq_q, M))):
        batch, head, i, begin, blocks = tile_at(n, shape, band, M, N, CAUSAL, WINDOW, DOCUMENTS)
        kv_head = head // groups
        # Q [64, D0 + D1] of each consumer
        for c in gl.static_range(CONSUMERS):
            slot = n % 2 * CONSUMERS + c
            mbarrier.wait(q_empty.index(slot), (n // 2 + 1) & 1)
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
    # V of the last block
    slot = it % STAGES
    mbarrier.wait(empty.index(slot), (it // STAGES + 1) & 1)
    mbarrier.expect(full.index(slot), BYTES)
    _copy(v0, v1, v_batch, v_row, v_head, v_slots[0], v_slots[1], slot, full.index(slot), D0, D1)


@gluon.jit
def _wait_for_use(barriers, n, SLOTS: gl.constexpr):
    """Wait for tile number n of a ring; see warpgroups.ring."""
    mbarrier.wait(barriers.index(n % SLOTS), n // SLOTS & 1)


@gluon.jit
def _walk(
    it, p, m, l, q0, q1, rings, batch, head, i, begin, counts, seen, shape, scale_log2, dropout,
    SPARE: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, D0: gl.constexpr,
    D1: gl.constexpr, CAUSAL: gl.constexpr, BANDED: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """Compute the key blocks 1 to `own` of a tile: S of each block, and P V of the block before.

    p [64, N], m [64] and l [64, 4] come from block 0. The returned p, m and l are those after the last block. The
    returned O lacks P V of the last block, and the division by l.
    """
    _q_slots, k_slots, v_slots, _q_full, _q_empty, full, empty = rings
    EACH: gl.constexpr = _each(D0, CONSUMERS)
    # If one thread releases a slot, the warps meet at two barriers. With a slot to spare, release it one block later:
    # one of the barriers then coincides with the wait for the next block, and neither delays a product.
    LATE: gl.constexpr = STAGES > 3 and not EACH
    AFTER: gl.constexpr = _after_products(D0 + D1)
    full_begin, full_end, own = counts
    numbers, threshold, _ = dropout
    of_queries = query_numbers(numbers, batch, head, i, shape, N, DROPOUT)
    acc0 = warpgroup_mma_init(gl.zeros([ROWS, D0], gl.float32, accumulator_layout(D0)))
    acc1 = 0
    if D1:
        acc1 = warpgroup_mma_init(gl.zeros([ROWS, D1], gl.float32, accumulator_layout(D1)))
    # Use one loop, although only the last blocks need the mask. With two loops, Triton 3.6's assembler (ptxas 12.8)
    # shared Q's wgmma descriptor between them and set it only in the first.
    for j in range(1, own):
        slot = (it + j) % STAGES
        # S = Q K^T of block j  [64, N]
        s = issue_scores(q0, q1, k_slots, slot, N, D0, D1)
        # O += P V of block j - 1  [64, D0 + D1]
        acc0, acc1 = issue_output(p, v_slots, slot, acc0, acc1, N, D0, D1)
        of_keys = key_numbers(numbers, batch, head, (begin + j) * N, shape, N, DROPOUT)
        s = warpgroup_mma_wait(2 if D1 else 1, deps=(s,))  # P V, one product for each part, may still run
        # softmax, under P V
        if needs_mask(j, full_begin, full_end, BANDED):
            s = mask(s, i, (begin + j) * N, seen, shape[2], shape[3], SPARE, N, CAUSAL, BANDED)
        m_new, shift = new_maxima(s, m, scale_log2, D1)
        if not AFTER:
            b_p, l, alpha = softmax(s, shift, m, l, scale_log2)
            p_next = as_operand(b_p, of_queries, of_keys, threshold, p.dtype, D0, DROPOUT)
        else:
            alpha = gl.exp2(m - shift)
        if LATE:
            release(empty.index((it + j - 1) % STAGES), False, pred=j > 1)
        # Wait for K of block j + 1 and V of block j, which the next round reads. If the exponentials run under P V,
        # this wait also keeps them above the wait for P V: the assembler moves them past no loop, and this wait is one.
        _wait_for_use(full, it + j + 1, STAGES)
        acc0, acc1, p = wait_for_output(acc0, acc1, p, D1)
        if not LATE:
            release(empty.index(slot), EACH)
        # O *= alpha
        acc0 = warpgroup_mma_init(rescale(acc0, alpha, D0))
        if D1:
            acc1 = warpgroup_mma_init(rescale(acc1, alpha, D1))
        if AFTER:
            b_p, l, alpha = softmax(s, shift, m, l, scale_log2)
            p_next = as_operand(b_p, of_queries, of_keys, threshold, p.dtype, D0, DROPOUT)
        p, m = p_next, m_new
    if LATE:
        release(empty.index((it + own - 1) % STAGES), False, pred=own > 1)
    return p, acc0, acc1, m, l


@gluon.jit
def _consumer(
    C: gl.constexpr, parts,
    N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """Do the job of warpgroup C: compute O and the logsumexp of rows 64 C to 64 C + 64 of every tile of this program.

    For each tile, walk over the key blocks. Then issue S of the next tile's block 0 together with this tile's last P V,
    run the next tile's softmax under both, and store this tile.
    """
    rings, writes, shape, band, dropout = parts
    q_slots, k_slots, v_slots, q_full, q_empty, full, empty = rings
    out, logsumexp, scale_log2 = writes
    numbers, threshold, keep_scale = dropout
    batches, heads, seq_q, seq_k = shape[0], shape[1], shape[2], shape[3]
    EACH: gl.constexpr = _each(D0, CONSUMERS)
    AFTER: gl.constexpr = _after_products(D0 + D1)
    SPARE: gl.constexpr = D0 + D1 == 64 and CONSUMERS == 2
    # S and P take 3 N / 4 registers of a thread, O and held queries 3 (D0 + D1) / 4.
    HELD: gl.constexpr = N + D0 + D1 <= 208 and CONSUMERS == 2 and not DROPOUT
    BANDED: gl.constexpr = WINDOW or DOCUMENTS
    M: gl.constexpr = ROWS * CONSUMERS
    LAYOUT: gl.constexpr = gl.SliceLayout(1, accumulator_layout(N))
    count = count_tiles(batches * heads * gl.cdiv(seq_q, M))
    # m and l of a row before its first block
    none = gl.full([ROWS], -float("inf"), gl.float32, LAYOUT)
    zero = partial_sums(gl.zeros([ROWS, N], gl.float32, accumulator_layout(N)))

    # Block 0 of the first tile: S = Q K^T, then softmax
    it = 0
    batch, head, i, begin, blocks = tile_at(0, shape, band, M, N, CAUSAL, WINDOW, DOCUMENTS)
    i += C * ROWS
    counts = count_blocks(i, batch, shape, band, begin, blocks, N, CAUSAL, WINDOW, DOCUMENTS)
    seen = visible_keys(i, batch, shape, band, LAYOUT, CAUSAL, WINDOW, DOCUMENTS)
    mbarrier.wait(q_full.index(C), 0)
    q0, q1 = load_queries(q_slots, C, HELD, N, D0, D1)
    mbarrier.wait(full.index(0), 0)
    s = issue_scores(q0, q1, k_slots, 0, N, D0, D1)
    s = warpgroup_mma_wait(0, deps=(s,))
    release(empty.index(0), EACH)
    if needs_mask(0, counts[0], counts[1], BANDED):
        s = mask(s, i, begin * N, seen, seq_q, seq_k, SPARE, N, CAUSAL, BANDED)
    m, shift = new_maxima(s, none, scale_log2, D1)
    b_p, l, _ = softmax(s, shift, none, zero, scale_log2)
    of_queries = query_numbers(numbers, batch, head, i, shape, N, DROPOUT)
    of_keys = key_numbers(numbers, batch, head, begin * N, shape, N, DROPOUT)
    p = as_operand(b_p, of_queries, of_keys, threshold, out.dtype.element_ty, D0, DROPOUT)
    _wait_for_use(full, 1, STAGES)

    for n in range(count):
        # Blocks 1 to own of this tile
        counts = count_blocks(i, batch, shape, band, begin, blocks, N, CAUSAL, WINDOW, DOCUMENTS)
        own = counts[2]
        q_slot = n % 2 * CONSUMERS + C
        q0, q1 = load_queries(q_slots, q_slot, HELD, N, D0, D1)
        p, acc0, acc1, m, l = _walk(
            it, p, m, l, q0, q1, rings, batch, head, i, begin, counts, seen, shape, scale_log2, dropout,
            SPARE, N, STAGES, CONSUMERS, D0, D1, CAUSAL, BANDED, DROPOUT,
        )  # fmt: skip
        release(q_empty.index(q_slot), EACH)
        v_slot = (it + own) % STAGES
        if n + 1 < count:
            # Skip blocks that only other consumers see
            for j in range(it + own + 1, it + blocks + 1):
                _wait_for_use(full, j, STAGES)
                release(empty.index(j % STAGES), EACH, pred=j < it + blocks)
            shared = own == blocks  # whether the last V and the next tile's first K have one slot
            it += blocks
            # S of the next tile's block 0, and this tile's last O += P V
            next_batch, next_head, next_i, begin, blocks = tile_at(n + 1, shape, band, M, N, CAUSAL, WINDOW, DOCUMENTS)
            next_i += C * ROWS
            next_counts = count_blocks(next_i, next_batch, shape, band, begin, blocks, N, CAUSAL, WINDOW, DOCUMENTS)
            seen = visible_keys(next_i, next_batch, shape, band, LAYOUT, CAUSAL, WINDOW, DOCUMENTS)
            q_slot = (n + 1) % 2 * CONSUMERS + C
            mbarrier.wait(q_full.index(q_slot), (n + 1) // 2 & 1)
            q0, q1 = load_queries(q_slots, q_slot, HELD, N, D0, D1)
            s = issue_scores(q0, q1, k_slots, it % STAGES, N, D0, D1)
            acc0, acc1 = issue_output(p, v_slots, v_slot, acc0, acc1, N, D0, D1)
            of_queries = query_numbers(numbers, next_batch, next_head, next_i, shape, N, DROPOUT)
            of_keys = key_numbers(numbers, next_batch, next_head, begin * N, shape, N, DROPOUT)
            s = warpgroup_mma_wait(2 if D1 else 1, deps=(s,))
            # softmax of the next tile's block 0
            if needs_mask(0, next_counts[0], next_counts[1], BANDED):
                s = mask(s, next_i, begin * N, seen, seq_q, seq_k, SPARE, N, CAUSAL, BANDED)
            next_m, shift = new_maxima(s, none, scale_log2, D1)
            if not AFTER:
                b_p, next_l, _ = softmax(s, shift, none, zero, scale_log2)
                p_next = as_operand(b_p, of_queries, of_keys, threshold, p.dtype, D0, DROPOUT)
            # This wait keeps the exponentials in place, as in _walk. With two slots, the next block needs the slot of
            # the last V of a consumer with fewer blocks, and that consumer releases it only below. So with two slots,
            # wait here for a block that has already arrived.
            _wait_for_use(full, it if STAGES == 2 else it + 1, STAGES)
            out0, out1, p = wait_for_output(acc0, acc1, p, D1)
            release(empty.index(it % STAGES), EACH)
            if not shared:
                release(empty.index(v_slot), EACH)
            if STAGES == 2:
                _wait_for_use(full, it + 1, STAGES)
            if AFTER:
                b_p, next_l, _ = softmax(s, shift, none, zero, scale_log2)
                p_next = as_operand(b_p, of_queries, of_keys, threshold, p.dtype, D0, DROPOUT)
            store_tile(out, logsumexp, out0, out1, m, l, keep_scale, batch, head, i, shape, D0, D1)
            p, m, l = p_next, next_m, next_l
            batch, head, i = next_batch, next_head, next_i
        else:
            acc0, acc1 = issue_output(p, v_slots, v_slot, acc0, acc1, N, D0, D1)
            out0, out1, p = wait_for_output(acc0, acc1, p, D1)
            store_tile(out, logsumexp, out0, out1, m, l, keep_scale, batch, head, i, shape, D0, D1)


@gluon.jit
def _slots_of_parts(x0, x1, SLOTS: gl.constexpr, D1: gl.constexpr):
    """Allocate SLOTS tiles in shared memory, in two parts; part 1 is 0 if it is empty."""
    return allocate_slots(x0, SLOTS), allocate_slots(x1, SLOTS) if D1 else 0


@gluon.jit(do_not_specialize=["batches", "heads", "groups", "seq_q", "seq_k", "section", "window", "threshold"])
def forward_kernel(
    q0, q1, k0, k1, v0, v1, out, logsumexp, numbers, documents,
    batches, heads, groups, seq_q, seq_k, section, window, scale, threshold, keep_scale,
    N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr, DROPOUT: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute O (batches, seq_q, heads, D0 + D1) and the natural logsumexp (batches, heads, seq_q) fp32, contiguous.

    - q0: descriptor of Q (batches, seq_q, heads, D0 + D1); reads [1, 64, 1, D0].
    - k0, v0: descriptors of K and V (batches, seq_k, heads / groups, D0 + D1); read [1, N, 1, D0].
    - q1, k1, v1: descriptors of the other D1 columns, or None.
    - numbers: random numbers of dropout, or None.
    - documents, window: as in the plain kernel, or None and 0.

    Warps: four for each consumer, and one for the producer. The first consumer is the default partition.
    Grid: any number of programs up to the number of tiles.
    """
    gl.static_assert(STAGES >= 2)  # a consumer waits for a block before it releases the slot of the block before
    # Otherwise one consumer could have two blocks more than another, and wait for a slot that the other must release.
    gl.static_assert(N >= ROWS * (CONSUMERS - 1))
    q_slots = _slots_of_parts(q0, q1, 2 * CONSUMERS, D1)  # [64, D], two tiles
    k_slots = _slots_of_parts(k0, k1, STAGES, D1)  # [N, D]
    v_slots = _slots_of_parts(v0, v1, STAGES, D1)  # [N, D]
    ARRIVALS: gl.constexpr = THREADS if _each(D0, CONSUMERS) else 1
    q_full, q_empty = ring(2 * CONSUMERS, ARRIVALS)
    full, empty = ring(STAGES, CONSUMERS * ARRIVALS)
    rings = (q_slots, k_slots, v_slots, q_full, q_empty, full, empty)
    shape = (batches, heads, seq_q, seq_k, section)
    reads = (q0, q1, k0, k1, v0, v1, groups)
    writes = (out, logsumexp, scale * LOG2_E)
    band = (documents, window)
    dropout = (numbers, threshold, keep_scale)
    parts = (rings, writes, shape, band, dropout)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, parts, N, STAGES, CONSUMERS, D0, D1, CAUSAL, WINDOW, DOCUMENTS, DROPOUT)),
                (_consumer, (1, parts, N, STAGES, CONSUMERS, D0, D1, CAUSAL, WINDOW, DOCUMENTS, DROPOUT)),
                (_producer, (rings, reads, shape, band, N, STAGES, CONSUMERS, D0, D1, CAUSAL, WINDOW, DOCUMENTS)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, parts, N, STAGES, CONSUMERS, D0, D1, CAUSAL, WINDOW, DOCUMENTS, DROPOUT)),
                (_consumer, (1, parts, N, STAGES, CONSUMERS, D0, D1, CAUSAL, WINDOW, DOCUMENTS, DROPOUT)),
                (_consumer, (2, parts, N, STAGES, CONSUMERS, D0, D1, CAUSAL, WINDOW, DOCUMENTS, DROPOUT)),
                (_producer, (rings, reads, shape, band, N, STAGES, CONSUMERS, D0, D1, CAUSAL, WINDOW, DOCUMENTS)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
