"""The kernel of the Hopper forward: its consumer warpgroups, and the launch of these and of the producer warp.

Legend: M rows of a query tile, ROWS = 64 of one consumer, N keys of a block, D0 + D1 head size; x0 and x1 are the two
parts of x. `it` is the number of key blocks before this tile in all tiles of this program. K of block j of this tile
is in slot (it + j) % STAGES of the rings, V of the same block in the next slot. The n-th tile's Q of consumer C is in
slot n % 2 * CONSUMERS + C of Q's ring.

The tuple rings has these members:

- the slots of Q, K and V in shared memory
- q_full and q_empty: barriers of Q's slots
- full and empty: barriers of the slots of K and V
- with documents, the places of the tiles in Q's slots

Other tuples: shape is (batches, heads, seq_q, seq_k, section), band is (documents, window, counter), and dropout is
(numbers, threshold, keep_scale). tile_of returns place, count_blocks returns counts, and visible_keys returns seen.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_init, warpgroup_mma_wait

from kernels.common.head_rows import LOG2_E
from kernels.flash2.hopper_forward.producer import producer
from kernels.flash2.hopper_forward.schedule import allocate_places, count_tiles, read_place, tile_at
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
from kernels.hopper.warpgroups import accumulator_layout, allocate_slots, release, ring

THREADS: gl.constexpr = gl.constexpr(128)  # of one consumer


@gluon.constexpr_function
def _each(columns, consumers):
    """Return whether each thread of a consumer releases slots itself; see warpgroups.release.

    On an H200 and with a causal mask, heads of 128 are 0 to 5 % faster if each thread releases slots. Heads of 64 with
    two consumers are 1 to 4 % slower.
    """
    return columns == 128 or consumers == 3


@gluon.constexpr_function
def _after_products(head_dim):
    """Return whether a consumer computes the exponentials after it has awaited P V, not under its own P V.

    The exponentials then run under the products of the other consumers. On an H100, this order makes heads of 64 with
    two consumers 1 to 2 % faster. The order makes heads of 80 2 to 10 % slower, and heads of 128 up to 4 % slower.
    """
    return head_dim == 64


@gluon.constexpr_function
def _holds_queries(n, head_dim, consumers, dropout):
    """Return whether registers hold a tile's queries. S and P take 3 N / 4 registers of a thread, O and held queries
    3 head_dim / 4.
    """
    return n + head_dim <= 208 and consumers == 2 and not dropout


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
    _q_slots, k_slots, v_slots, _q_full, _q_empty, full, empty, _places = rings
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
def _compute_tile(
    n, count, state, none, zero, C: gl.constexpr, parts,
    N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """Finish the n-th tile, whose block 0 is computed, and compute block 0 of the next tile.

    Walk over the other key blocks. Then issue S of the next tile's block 0 together with this tile's last P V, run the
    next tile's softmax under both, and store this tile. Return the state of the next tile, and whether there is a next
    tile. Without documents, `count` is the number of tiles.
    """
    rings, writes, shape, band, dropout = parts
    q_slots, k_slots, v_slots, q_full, q_empty, full, empty, places = rings
    out, logsumexp, scale_log2 = writes
    numbers, threshold, keep_scale = dropout
    it, p, m, l, batch, head, i, begin, blocks, counts, seen = state
    seq_q, seq_k = shape[2], shape[3]
    EACH: gl.constexpr = _each(D0, CONSUMERS)
    AFTER: gl.constexpr = _after_products(D0 + D1)
    SPARE: gl.constexpr = D0 + D1 == 64 and CONSUMERS == 2
    HELD: gl.constexpr = _holds_queries(N, D0 + D1, CONSUMERS, DROPOUT)
    BANDED: gl.constexpr = WINDOW or DOCUMENTS
    M: gl.constexpr = ROWS * CONSUMERS
    LAYOUT: gl.constexpr = gl.SliceLayout(1, accumulator_layout(N))

    # Blocks 1 to own of this tile
    if not DOCUMENTS:  # compute again, because the numbers need no memory and would take registers from tile to tile
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
    q_slot = (n + 1) % 2 * CONSUMERS + C
    if DOCUMENTS:
        # The producer publishes the next tile's place together with its Q. After the last tile, the batch is -1.
        _skip(it, own, blocks, full, empty, STAGES, EACH)
        mbarrier.wait(q_full.index(q_slot), (n + 1) // 2 & 1)
        place = read_place(places, q_slot)
        more = place[0] >= 0
    else:
        more = n + 1 < count
    if more:
        if not DOCUMENTS:
            _skip(it, own, blocks, full, empty, STAGES, EACH)
            place = tile_at(n + 1, shape, band, M, N, CAUSAL, WINDOW, DOCUMENTS)
            mbarrier.wait(q_full.index(q_slot), (n + 1) // 2 & 1)
        shared = own == blocks  # whether the last V and the next tile's first K have one slot
        it += blocks
        # S of the next tile's block 0, and this tile's last O += P V
        next_batch, next_head, next_i, begin, blocks = place
        next_i += C * ROWS
        counts = count_blocks(next_i, next_batch, shape, band, begin, blocks, N, CAUSAL, WINDOW, DOCUMENTS)
        seen = visible_keys(next_i, next_batch, shape, band, LAYOUT, CAUSAL, WINDOW, DOCUMENTS)
        q0, q1 = load_queries(q_slots, q_slot, HELD, N, D0, D1)
        s = issue_scores(q0, q1, k_slots, it % STAGES, N, D0, D1)
        acc0, acc1 = issue_output(p, v_slots, v_slot, acc0, acc1, N, D0, D1)
        of_queries = query_numbers(numbers, next_batch, next_head, next_i, shape, N, DROPOUT)
        of_keys = key_numbers(numbers, next_batch, next_head, begin * N, shape, N, DROPOUT)
        s = warpgroup_mma_wait(2 if D1 else 1, deps=(s,))
        # softmax of the next tile's block 0
        if needs_mask(0, counts[0], counts[1], BANDED):
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
    return (it, p, m, l, batch, head, i, begin, blocks, counts, seen), more


@gluon.jit
def _skip(it, own, blocks, full, empty, STAGES: gl.constexpr, EACH: gl.constexpr):
    """Wait for the blocks of this tile that only other consumers see, and release them."""
    for j in range(it + own + 1, it + blocks + 1):
        _wait_for_use(full, j, STAGES)
        release(empty.index(j % STAGES), EACH, pred=j < it + blocks)


@gluon.jit
def _consumer(
    C: gl.constexpr, parts,
    N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """Do the job of warpgroup C: compute O and the logsumexp of rows 64 C to 64 C + 64 of each tile of this program."""
    rings, writes, shape, band, dropout = parts
    q_slots, k_slots, _v_slots, q_full, _q_empty, full, empty, places = rings
    out, _logsumexp, scale_log2 = writes
    numbers, threshold, _keep_scale = dropout
    batches, heads, seq_q, seq_k = shape[0], shape[1], shape[2], shape[3]
    EACH: gl.constexpr = _each(D0, CONSUMERS)
    SPARE: gl.constexpr = D0 + D1 == 64 and CONSUMERS == 2
    HELD: gl.constexpr = _holds_queries(N, D0 + D1, CONSUMERS, DROPOUT)
    BANDED: gl.constexpr = WINDOW or DOCUMENTS
    M: gl.constexpr = ROWS * CONSUMERS
    LAYOUT: gl.constexpr = gl.SliceLayout(1, accumulator_layout(N))
    count = count_tiles(batches * heads * gl.cdiv(seq_q, M))
    # m and l of a row before its first block
    none = gl.full([ROWS], -float("inf"), gl.float32, LAYOUT)
    zero = partial_sums(gl.zeros([ROWS, N], gl.float32, accumulator_layout(N)))

    # Block 0 of the first tile: S = Q K^T, then softmax
    it = 0
    mbarrier.wait(q_full.index(C), 0)
    if DOCUMENTS:
        place = read_place(places, C)
    else:
        place = tile_at(0, shape, band, M, N, CAUSAL, WINDOW, DOCUMENTS)
    batch, head, i, begin, blocks = place
    i += C * ROWS
    counts = count_blocks(i, batch, shape, band, begin, blocks, N, CAUSAL, WINDOW, DOCUMENTS)
    seen = visible_keys(i, batch, shape, band, LAYOUT, CAUSAL, WINDOW, DOCUMENTS)
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

    state = (it, p, m, l, batch, head, i, begin, blocks, counts, seen)
    if DOCUMENTS:
        n, more = 0, True
        while more:
            state, more = _compute_tile(
                n, 0, state, none, zero, C, parts,
                N, STAGES, CONSUMERS, D0, D1, CAUSAL, WINDOW, DOCUMENTS, DROPOUT,
            )  # fmt: skip
            n += 1
    else:
        for n in range(count):
            state, more = _compute_tile(
                n, count, state, none, zero, C, parts,
                N, STAGES, CONSUMERS, D0, D1, CAUSAL, WINDOW, DOCUMENTS, DROPOUT,
            )  # fmt: skip


@gluon.jit
def _slots_of_parts(x0, x1, SLOTS: gl.constexpr, D1: gl.constexpr):
    """Allocate SLOTS tiles in shared memory, in two parts; part 1 is 0 if it is empty."""
    return allocate_slots(x0, SLOTS), allocate_slots(x1, SLOTS) if D1 else 0


@gluon.jit(do_not_specialize=["batches", "heads", "groups", "seq_q", "seq_k", "section", "window", "threshold"])
def forward_kernel(
    q0, q1, k0, k1, v0, v1, out, logsumexp, numbers, documents, counter,
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
    - counter: a zero, int32, from which the programs draw tiles with documents; or None.

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
    places = 0
    if DOCUMENTS:
        places = allocate_places(2 * CONSUMERS)  # one for each slot of Q
    rings = (q_slots, k_slots, v_slots, q_full, q_empty, full, empty, places)
    shape = (batches, heads, seq_q, seq_k, section)
    reads = (q0, q1, k0, k1, v0, v1, groups)
    writes = (out, logsumexp, scale * LOG2_E)
    band = (documents, window, counter)
    dropout = (numbers, threshold, keep_scale)
    parts = (rings, writes, shape, band, dropout)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, parts, N, STAGES, CONSUMERS, D0, D1, CAUSAL, WINDOW, DOCUMENTS, DROPOUT)),
                (_consumer, (1, parts, N, STAGES, CONSUMERS, D0, D1, CAUSAL, WINDOW, DOCUMENTS, DROPOUT)),
                (producer, (rings, reads, shape, band, N, STAGES, CONSUMERS, D0, D1, CAUSAL, WINDOW, DOCUMENTS)),
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
                (producer, (rings, reads, shape, band, N, STAGES, CONSUMERS, D0, D1, CAUSAL, WINDOW, DOCUMENTS)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
