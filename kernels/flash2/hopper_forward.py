"""Warp-specialised attention forward for Hopper, in Gluon: the scheme of FlashAttention-3.

Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision" (2024), Algorithms 1 and
2. One program stays on each multiprocessor and walks over tiles of queries. Its producer warp copies Q, K and V into
rings in shared memory by TMA; each of its two or three consumer warpgroups owns 64 rows of the tile, and issues S = QK
of one block of keys before PV of the block before. The first block of the next tile takes the place of the block after
the last, which hides the start of every tile but the first.

Of two consumers each runs its softmax under its own PV. Three have too few registers for a P beside the one that PV
reads: theirs run the maxima under their own PV, the exponentials under the others' products.

T queries, S keys, M rows of a query tile (64 to a consumer), N keys of a block, D0 + D1 head size, in two parts where
it is no power of two, with a descriptor and a product each. Softmax runs in base 2; statistics and accumulators are
fp32.
"""

from functools import cache, lru_cache

import numpy as np
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

from kernels.common.dropout import threshold
from kernels.common.launching import descriptor, launch
from kernels.flash2.options import Options
from kernels.flash2.tiles import SpecialisedForward, split_head_dim
from kernels.flash2.triton_kernels import natural_logsumexp
from kernels.hopper.warpgroups import hide, multiprocessors, release, ring, signature_of

LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)
THREADS: gl.constexpr = gl.constexpr(128)  # of one consumer
ROWS: gl.constexpr = gl.constexpr(64)  # of one consumer: the M of wgmma
CONSUMER_REGISTERS = {2: 240, 3: 160}  # of a thread, which leaves the producer the least there is
PRODUCER_REGISTERS = 24
CACHED = 24 * 2**20  # bytes of K and V, half of the H200's L2 cache
BEYOND = 1.05  # by how much a section of more is to be the more even one: 1.02 to 1.05 is what it costs at 8k
MOST_TOGETHER = 64  # heads


@gluon.constexpr_function
def _accumulator_layout(columns):
    """Of a wgmma result [64, columns] over one warpgroup."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def _store_layout(columns):
    """Rows of `columns` written 16 bytes to a thread."""
    across = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.constexpr_function
def _each(columns, consumers):
    """Whether each thread of a consumer gives slots back for itself, see warpgroups.release.

    Causal on an H200, in two races: heads of 128 are 0 to 2 % faster by it at 8k and 2 to 5 % at 2k; heads of 64
    with two consumers are 1 to 4 % slower at 8k, as if the threads' arrivals cost more there than the warps' waiting.
    """
    return columns == 128 or consumers == 3


@gluon.jit
def _count(tiles):
    """How many of `tiles` this program computes; see _tile."""
    programs, program = gl.num_programs(0), gl.program_id(0)
    rounds = tiles // programs
    place = gl.where(rounds % 2 == 0, program, programs - 1 - program)
    return rounds + (place < tiles % programs).to(gl.int32)


@gluon.jit
def _tile(n, shape, M: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr):
    """batch, head, first query and number of key blocks of this program's n-th tile.

    Tiles are dealt out longest first, back and forth over the programs, which evens out their sums; the heads of one
    section before those of the next. Every other section, counted from the last, has the shortest first: where two meet
    tiles are alike. How even the sums are is a matter of the section then, see _section.
    """
    batches, heads, seq_q, seq_k, section = shape
    programs, program = gl.num_programs(0), gl.program_id(0)
    t = n * programs + gl.where(n % 2 == 0, program, programs - 1 - program)
    rows = gl.cdiv(seq_q, M)
    first = t // (section * rows) * section
    t -= first * rows
    width = gl.minimum(section, batches * heads - first)
    bh = first + t % width
    i = (rows - 1 - t // width) * M
    blocks = gl.cdiv(seq_k, N)
    if CAUSAL:  # at least one, even where no query sees a key: it writes the zeros
        after = gl.cdiv(batches * heads, section) - 1 - first // section
        i = gl.where(after % 2 == 0, i, (rows - 1) * M - i)
        blocks = gl.minimum(blocks, gl.maximum(gl.cdiv(i + M + seq_k - seq_q, N), 1))
    return bh // heads, bh % heads, i, blocks


@gluon.jit
def _copy(x0, x1, batch, row, head, slots0, slots1, slot, full, D0: gl.constexpr, D1: gl.constexpr):
    """Starts the copy of one tile; `full` must expect it."""
    tma.async_copy_global_to_shared(x0, [batch, row, head, 0], full, slots0.index(slot))
    if D1:
        tma.async_copy_global_to_shared(x1, [batch, row, head, D0], full, slots1.index(slot))


@gluon.jit
def _producer(
    rings, reads, shape,
    N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = N * (D0 + D1) * 2  # of K or V in a slot
    M: gl.constexpr = ROWS * CONSUMERS
    q_slots, k_slots, v_slots, q_full, q_empty, full, empty = rings
    q0, q1, k0, k1, v0, v1, groups = reads
    batches, heads, seq_q = shape[0], shape[1], shape[2]
    it = 0
    v_batch, v_row, v_head = 0, 0, 0
    for n in range(_count(batches * heads * gl.cdiv(seq_q, M))):
        batch, head, i, blocks = _tile(n, shape, M, N, CAUSAL)
        kv_head = head // groups
        for c in gl.static_range(CONSUMERS):
            slot = n % 2 * CONSUMERS + c
            mbarrier.wait(q_empty.index(slot), (n // 2 + 1) & 1)
            mbarrier.expect(q_full.index(slot), ROWS * (D0 + D1) * 2)
            _copy(q0, q1, batch, i + c * ROWS, head, q_slots[0], q_slots[1], slot, q_full.index(slot), D0, D1)
        for j in range(blocks):
            slot = it % STAGES
            mbarrier.wait(empty.index(slot), (it // STAGES + 1) & 1)
            mbarrier.expect(full.index(slot), BYTES, pred=it == 0)
            mbarrier.expect(full.index(slot), 2 * BYTES, pred=it > 0)
            _copy(k0, k1, batch, j * N, kv_head, k_slots[0], k_slots[1], slot, full.index(slot), D0, D1)
            if it > 0:
                _copy(v0, v1, v_batch, v_row, v_head, v_slots[0], v_slots[1], slot, full.index(slot), D0, D1)
            v_batch, v_row, v_head = batch, j * N, kv_head
            it += 1
    slot = it % STAGES
    mbarrier.wait(empty.index(slot), (it // STAGES + 1) & 1)
    mbarrier.expect(full.index(slot), BYTES)
    _copy(v0, v1, v_batch, v_row, v_head, v_slots[0], v_slots[1], slot, full.index(slot), D0, D1)


@gluon.jit
def _scores(q0, q1, k_slots, slot, N: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr):
    """Issues S = Q K^T, [64, N]."""
    ks0, ks1 = k_slots
    s = warpgroup_mma_init(gl.zeros([ROWS, N], gl.float32, _accumulator_layout(N)))
    k = ks0.index(slot).reshape([N, D0]).permute([1, 0])
    s = warpgroup_mma(q0, k, s, use_acc=False, is_async=True)
    if D1:
        k = ks1.index(slot).reshape([N, D1]).permute([1, 0])
        s = warpgroup_mma(q1, k, s, is_async=True)
    return s


@gluon.jit
def _values(p, v_slots, slot, acc0, acc1, N: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr):
    """Issues O += P V, [64, D0] and [64, D1]."""
    vs0, vs1 = v_slots
    acc0 = warpgroup_mma(p, vs0.index(slot).reshape([N, D0]), acc0, is_async=True)
    if D1:
        layout: gl.constexpr = gl.DotOperandLayout(0, _accumulator_layout(D1), 2)
        p1 = gl.convert_layout(p, layout, assert_trivial=True)
        acc1 = warpgroup_mma(p1, vs1.index(slot).reshape([N, D1]), acc1, is_async=True)
    return acc0, acc1


@gluon.jit
def _blocks(i, seq_q, seq_k, blocks, N: gl.constexpr, CAUSAL: gl.constexpr):
    """Of the key blocks of the rows i to i + 64: how many need no mask, and how many there are."""
    full = gl.minimum(seq_k // N, blocks)
    if CAUSAL:
        i += seq_k - seq_q
        full = gl.minimum(full, gl.maximum(i + 1, 0) // N)
        blocks = gl.minimum(blocks, gl.maximum(gl.cdiv(i + ROWS, N), 1))
    return full, blocks


@gluon.jit
def _mask(s, i, j, seq_q, seq_k, SPARE: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr):
    """Scores [64, N] of the queries from i on and the keys from j on, -inf where the key is hidden.

    Where there are registers to SPARE the columns' numbers are held in some: 2 % faster.
    """
    o_i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, s.type.layout))
    last = _last_key(i, o_i, j, seq_q, seq_k, CAUSAL)
    if SPARE:
        o_j = gl.arange(0, N, layout=gl.SliceLayout(0, s.type.layout))
        return gl.where(o_j[None, :] <= last[:, None], s, -float("inf"))
    else:
        return hide(s, last, True)


@gluon.jit
def _last_key(i, o_i, j, seq_q, seq_k, CAUSAL: gl.constexpr):
    """The last key that the queries i + o_i see, counted from key j."""
    if CAUSAL:
        return gl.minimum(i + seq_k - seq_q + o_i, seq_k - 1) - j
    else:
        return gl.zeros_like(o_i) + (seq_k - 1 - j)


@gluon.jit
def _sums(p):
    """Sums of the rows of P [64, N] over the columns that a thread holds, [64, 4]: four threads share a row.

    They are added up at the tile's end alone. In each block the shuffles would take 3 % of the time.
    """
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _maxima(s, m, scale_log2):
    """The new maxima of the rows, and what to subtract from their scores: for a row that sees no key, nothing."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
    return m_new, gl.where(m_new == -float("inf"), 0.0, m_new)


@gluon.jit
def _softmax(s, shift, m, l, scale_log2):
    """P, the sums l of its rows as of _sums, and what the old sums and O are to be scaled by; m are the old maxima."""
    p = gl.exp2(s * scale_log2 - shift[:, None])
    alpha = gl.exp2(m - shift)
    of_sums = gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))
    return p, l * of_sums[:, None] + _sums(p), alpha


@gluon.jit
def _of_queries(numbers, batch, head, i, shape, N: gl.constexpr, DROPOUT: gl.constexpr):
    """Dropout's random numbers of the rows i to i + 64."""
    if DROPOUT:
        heads, seq_q, seq_k = shape[1], shape[2], shape[3]
        o_i = i + gl.arange(0, ROWS, layout=gl.SliceLayout(1, _accumulator_layout(N)))
        p_head = numbers + (batch * heads + head).to(gl.int64) * (seq_q + seq_k)
        return gl.load(p_head + o_i, mask=o_i < seq_q, other=0).to(gl.uint32, bitcast=True)
    else:
        return 0


@gluon.jit
def _of_keys(numbers, batch, head, j, shape, N: gl.constexpr, DROPOUT: gl.constexpr):
    """Those of the keys j to j + N."""
    if DROPOUT:
        heads, seq_q, seq_k = shape[1], shape[2], shape[3]
        o_j = j + gl.arange(0, N, layout=gl.SliceLayout(0, _accumulator_layout(N)))
        p_head = numbers + (batch * heads + head).to(gl.int64) * (seq_q + seq_k) + seq_q
        return gl.load(p_head + o_j, mask=o_j < seq_k, other=0).to(gl.uint32, bitcast=True)
    else:
        return 0


@gluon.jit
def _drop(p, of_queries, of_keys, threshold, DROPOUT: gl.constexpr):
    """P without what dropout drops, see dropout.py."""
    if DROPOUT:
        return gl.where(of_queries[:, None] * of_keys[None, :] >= threshold.to(gl.uint32, bitcast=True), p, 0.0)
    else:
        return p


@gluon.jit
def _operand(p, dtype: gl.constexpr, D0: gl.constexpr):
    layout: gl.constexpr = gl.DotOperandLayout(0, _accumulator_layout(D0), 2)
    return gl.convert_layout(p.to(dtype), layout)


@gluon.jit
def _rescale(acc, alpha, D: gl.constexpr):
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, _accumulator_layout(D)))[:, None]


@gluon.jit
def _await(barriers, n, SLOTS: gl.constexpr):
    """Waits for the n-th use of a ring of barriers."""
    mbarrier.wait(barriers.index(n % SLOTS), n // SLOTS & 1)


@gluon.jit
def _wait(pending: gl.constexpr, acc0, acc1, p, D1: gl.constexpr):
    if D1:
        return warpgroup_mma_wait(pending, deps=(acc0, acc1, p))
    else:
        acc0, p = warpgroup_mma_wait(pending, deps=(acc0, p))
        return acc0, acc1, p


@gluon.jit
def _walk(
    it, p, m, l, q0, q1, rings, batch, head, i, full_blocks, own, shape, scale_log2, dropout,
    SPARE: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, D0: gl.constexpr,
    D1: gl.constexpr, CAUSAL: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """Key blocks 1 to own of a tile whose block 0 is the it-th of this program: S of each, PV of the one before."""
    _q_slots, k_slots, v_slots, _q_full, _q_empty, full, empty = rings
    EACH: gl.constexpr = _each(D0, CONSUMERS)
    # Where one thread gives a slot back, that costs the warps two barriers. With a slot to spare it is given back a
    # block later, where one of the two is that of the wait for the next block, and none delays a product.
    LATE: gl.constexpr = STAGES > 3 and not EACH
    numbers, threshold, _ = dropout
    of_queries = _of_queries(numbers, batch, head, i, shape, N, DROPOUT)
    acc0 = warpgroup_mma_init(gl.zeros([ROWS, D0], gl.float32, _accumulator_layout(D0)))
    acc1 = 0
    if D1:
        acc1 = warpgroup_mma_init(gl.zeros([ROWS, D1], gl.float32, _accumulator_layout(D1)))
    # One loop, though only the last blocks need the mask: where a loop over those followed a loop over the others,
    # Triton 3.6's assembler (ptxas 12.8) shared Q's wgmma descriptor between the two and set it in the first alone.
    for j in range(1, own):
        slot = (it + j) % STAGES
        s = _scores(q0, q1, k_slots, slot, N, D0, D1)
        acc0, acc1 = _values(p, v_slots, slot, acc0, acc1, N, D0, D1)
        of_keys = _of_keys(numbers, batch, head, j * N, shape, N, DROPOUT)
        s = warpgroup_mma_wait(2 if D1 else 1, deps=(s,))
        if j >= full_blocks:
            s = _mask(s, i, j * N, shape[2], shape[3], SPARE, N, CAUSAL)
        m_new, shift = _maxima(s, m, scale_log2)
        if CONSUMERS == 2:
            b_p, l, alpha = _softmax(s, shift, m, l, scale_log2)
            p_next = _operand(_drop(b_p, of_queries, of_keys, threshold, DROPOUT), p.dtype, D0)
        else:
            alpha = gl.exp2(m - shift)
        if LATE:
            release(empty.index((it + j - 1) % STAGES), False, pred=j > 1)
        # Also keeps two consumers' exponentials above the wait for PV, which they are to run under: the assembler moves
        # them past no loop, and this wait is one.
        _await(full, it + j + 1, STAGES)
        acc0, acc1, p = _wait(0, acc0, acc1, p, D1)
        if not LATE:
            release(empty.index(slot), EACH)
        acc0 = warpgroup_mma_init(_rescale(acc0, alpha, D0))
        if D1:
            acc1 = warpgroup_mma_init(_rescale(acc1, alpha, D1))
        if CONSUMERS == 3:
            b_p, l, alpha = _softmax(s, shift, m, l, scale_log2)
            p_next = _operand(_drop(b_p, of_queries, of_keys, threshold, DROPOUT), p.dtype, D0)
        p, m = p_next, m_new
    if LATE:
        release(empty.index((it + own - 1) % STAGES), False, pred=own > 1)
    return p, acc0, acc1, m, l


@gluon.jit
def _store(p_out, stride, acc, inverse, i, seq_q, COLUMNS: gl.constexpr):
    """O [64, COLUMNS] from row i on."""
    layout: gl.constexpr = _store_layout(COLUMNS)
    b_out = _rescale(acc, inverse, COLUMNS).to(p_out.dtype.element_ty)
    o_i = i + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    o_d = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    # Multiplied with i inside, the offsets cannot be kept in registers from tile to tile, where they would be spilled.
    p_tile = p_out + (o_i.to(gl.int64) * stride)[:, None] + o_d[None, :]
    gl.store(p_tile, gl.convert_layout(b_out, layout), mask=(o_i < seq_q)[:, None])


@gluon.jit
def _finish(out, logsumexp, acc0, acc1, m, l, keep_scale, batch, head, i, shape, D0: gl.constexpr, D1: gl.constexpr):
    """Writes O and the logsumexp of the rows i to i + 64."""
    heads, seq_q = shape[1], shape[2]
    l = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    o_i = i + gl.arange(0, ROWS, layout=m.type.layout)
    p_lse = logsumexp + (batch * heads + head).to(gl.int64) * seq_q
    gl.store(p_lse + o_i, natural_logsumexp(m, l), mask=o_i < seq_q)
    inverse = keep_scale / gl.where(l == 0.0, 1.0, l)
    stride = heads * (D0 + D1)
    p_out = out + batch.to(gl.int64) * seq_q * stride + head * (D0 + D1)
    _store(p_out, stride, acc0, inverse, i, seq_q, D0)
    if D1:
        _store(p_out + D0, stride, acc1, inverse, i, seq_q, D1)


@gluon.jit
def _queries(q_slots, slot, HELD: gl.constexpr, N: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr):
    """Q [64, D0] and [64, D1] as products take it: HELD in registers where there is room for it, else in shared memory.

    From there every product would read it anew, which for a head of 128 is a third of all that is read; heads of 80
    at 8k are 5.8 % faster without, in sustained load on an H200.
    """
    qs0, qs1 = q_slots
    q0, q1 = qs0.index(slot).reshape([ROWS, D0]), 0
    if D1:
        q1 = qs1.index(slot).reshape([ROWS, D1])
    if HELD:
        layout: gl.constexpr = gl.DotOperandLayout(0, _accumulator_layout(N), 2)
        return q0.load(layout), q1.load(layout) if D1 else 0
    else:
        return q0, q1


@gluon.jit
def _consumer(
    C: gl.constexpr, rings, writes, shape, dropout,
    N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
    CAUSAL: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """Rows 64 C to 64 C + 64 of every tile of this program."""
    q_slots, k_slots, v_slots, q_full, q_empty, full, empty = rings
    out, logsumexp, scale_log2 = writes
    numbers, threshold, keep_scale = dropout
    batches, heads, seq_q, seq_k = shape[0], shape[1], shape[2], shape[3]
    EACH: gl.constexpr = _each(D0, CONSUMERS)
    SPARE: gl.constexpr = D0 + D1 == 64 and CONSUMERS == 2
    HELD: gl.constexpr = N + D0 + D1 <= 208 and CONSUMERS == 2 and not DROPOUT
    M: gl.constexpr = ROWS * CONSUMERS
    LAYOUT: gl.constexpr = gl.SliceLayout(1, _accumulator_layout(N))
    count = _count(batches * heads * gl.cdiv(seq_q, M))
    none = gl.full([ROWS], -float("inf"), gl.float32, LAYOUT)
    zero = _sums(gl.zeros([ROWS, N], gl.float32, _accumulator_layout(N)))

    it = 0
    batch, head, i, blocks = _tile(0, shape, M, N, CAUSAL)
    i += C * ROWS
    first_full, _ = _blocks(i, seq_q, seq_k, blocks, N, CAUSAL)
    mbarrier.wait(q_full.index(C), 0)
    q0, q1 = _queries(q_slots, C, HELD, N, D0, D1)
    mbarrier.wait(full.index(0), 0)
    s = _scores(q0, q1, k_slots, 0, N, D0, D1)
    s = warpgroup_mma_wait(0, deps=(s,))
    release(empty.index(0), EACH)
    if first_full == 0:
        s = _mask(s, i, 0, seq_q, seq_k, SPARE, N, CAUSAL)
    m, shift = _maxima(s, none, scale_log2)
    b_p, l, _ = _softmax(s, shift, none, zero, scale_log2)
    of_queries = _of_queries(numbers, batch, head, i, shape, N, DROPOUT)
    of_keys = _of_keys(numbers, batch, head, 0, shape, N, DROPOUT)
    p = _operand(_drop(b_p, of_queries, of_keys, threshold, DROPOUT), out.dtype.element_ty, D0)
    _await(full, 1, STAGES)

    for n in range(count):
        full_blocks, own = _blocks(i, seq_q, seq_k, blocks, N, CAUSAL)
        q_slot = n % 2 * CONSUMERS + C
        q0, q1 = _queries(q_slots, q_slot, HELD, N, D0, D1)
        p, acc0, acc1, m, l = _walk(
            it, p, m, l, q0, q1, rings, batch, head, i, full_blocks, own, shape, scale_log2, dropout,
            SPARE, N, STAGES, CONSUMERS, D0, D1, CAUSAL, DROPOUT,
        )  # fmt: skip
        release(q_empty.index(q_slot), EACH)
        v_slot = (it + own) % STAGES
        if n + 1 < count:
            for j in range(it + own + 1, it + blocks + 1):  # blocks that only other consumers see
                _await(full, j, STAGES)
                release(empty.index(j % STAGES), EACH, pred=j < it + blocks)
            shared = own == blocks
            it += blocks
            next_batch, next_head, next_i, blocks = _tile(n + 1, shape, M, N, CAUSAL)
            next_i += C * ROWS
            next_full, _ = _blocks(next_i, seq_q, seq_k, blocks, N, CAUSAL)
            q_slot = (n + 1) % 2 * CONSUMERS + C
            mbarrier.wait(q_full.index(q_slot), (n + 1) // 2 & 1)
            q0, q1 = _queries(q_slots, q_slot, HELD, N, D0, D1)
            s = _scores(q0, q1, k_slots, it % STAGES, N, D0, D1)
            acc0, acc1 = _values(p, v_slots, v_slot, acc0, acc1, N, D0, D1)
            of_queries = _of_queries(numbers, next_batch, next_head, next_i, shape, N, DROPOUT)
            of_keys = _of_keys(numbers, next_batch, next_head, 0, shape, N, DROPOUT)
            s = warpgroup_mma_wait(2 if D1 else 1, deps=(s,))
            if next_full == 0:
                s = _mask(s, next_i, 0, seq_q, seq_k, SPARE, N, CAUSAL)
            next_m, shift = _maxima(s, none, scale_log2)
            if CONSUMERS == 2:
                b_p, next_l, _ = _softmax(s, shift, none, zero, scale_log2)
                p_next = _operand(_drop(b_p, of_queries, of_keys, threshold, DROPOUT), p.dtype, D0)
            # Keeps the exponentials where they are, as in _walk. Of two slots the next block gets the one with the last
            # V of a consumer that owns fewer blocks, which gives it back only below: so for two, the block waited for
            # is one that has come already.
            _await(full, it if STAGES == 2 else it + 1, STAGES)
            out0, out1, p = _wait(0, acc0, acc1, p, D1)
            release(empty.index(it % STAGES), EACH)
            if not shared:
                release(empty.index(v_slot), EACH)
            if STAGES == 2:
                _await(full, it + 1, STAGES)
            if CONSUMERS == 3:
                b_p, next_l, _ = _softmax(s, shift, none, zero, scale_log2)
                p_next = _operand(_drop(b_p, of_queries, of_keys, threshold, DROPOUT), p.dtype, D0)
            _finish(out, logsumexp, out0, out1, m, l, keep_scale, batch, head, i, shape, D0, D1)
            p, m, l = p_next, next_m, next_l
            batch, head, i = next_batch, next_head, next_i
        else:
            acc0, acc1 = _values(p, v_slots, v_slot, acc0, acc1, N, D0, D1)
            out0, out1, p = _wait(0, acc0, acc1, p, D1)
            _finish(out, logsumexp, out0, out1, m, l, keep_scale, batch, head, i, shape, D0, D1)


@gluon.jit
def _slots(x0, x1, SLOTS: gl.constexpr, D1: gl.constexpr):
    """SLOTS tiles in shared memory. (Gluon knows no starred lists.)"""
    slots0 = gl.allocate_shared_memory(x0.dtype, [SLOTS] + x0.block_type.shape, x0.layout)  # noqa: RUF005
    slots1 = 0
    if D1:
        slots1 = gl.allocate_shared_memory(x1.dtype, [SLOTS] + x1.block_type.shape, x1.layout)  # noqa: RUF005
    return slots0, slots1


@gluon.jit(do_not_specialize=["batches", "heads", "groups", "seq_q", "seq_k", "section", "threshold"])
def forward_kernel(
    q0, q1, k0, k1, v0, v1, out, logsumexp, numbers,
    batches, heads, groups, seq_q, seq_k, section, scale, threshold, keep_scale,
    N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
    CAUSAL: gl.constexpr, DROPOUT: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """O (batches, seq_q, heads, D0 + D1) and logsumexp (batches, heads, seq_q) fp32, natural, both contiguous.

    q0 reads [1, 64, 1, D0] of Q (batches, seq_q, heads, D0 + D1), k0 and v0 [1, N, 1, D0] of K and V (batches, seq_k,
    heads / groups, D0 + D1); q1, k1 and v1 the D1 columns beyond, or None; numbers is dropout's, or None. Grid: any
    number of programs up to that of the tiles.
    """
    gl.static_assert(STAGES >= 2)  # a block is waited for before the slot of the one before is given back
    # Else one consumer could own two blocks more than another, and wait for what that one has to empty.
    gl.static_assert(N >= ROWS * (CONSUMERS - 1))
    q_slots = _slots(q0, q1, 2 * CONSUMERS, D1)
    k_slots = _slots(k0, k1, STAGES, D1)
    v_slots = _slots(v0, v1, STAGES, D1)
    ARRIVALS: gl.constexpr = THREADS if _each(D0, CONSUMERS) else 1
    q_full, q_empty = ring(2 * CONSUMERS, ARRIVALS)
    full, empty = ring(STAGES, CONSUMERS * ARRIVALS)
    rings = (q_slots, k_slots, v_slots, q_full, q_empty, full, empty)
    shape = (batches, heads, seq_q, seq_k, section)
    reads = (q0, q1, k0, k1, v0, v1, groups)
    writes = (out, logsumexp, scale * LOG2_E)
    dropout = (numbers, threshold, keep_scale)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, rings, writes, shape, dropout, N, STAGES, CONSUMERS, D0, D1, CAUSAL, DROPOUT)),
                (_consumer, (1, rings, writes, shape, dropout, N, STAGES, CONSUMERS, D0, D1, CAUSAL, DROPOUT)),
                (_producer, (rings, reads, shape, N, STAGES, CONSUMERS, D0, D1, CAUSAL)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, rings, writes, shape, dropout, N, STAGES, CONSUMERS, D0, D1, CAUSAL, DROPOUT)),
                (_consumer, (1, rings, writes, shape, dropout, N, STAGES, CONSUMERS, D0, D1, CAUSAL, DROPOUT)),
                (_consumer, (2, rings, writes, shape, dropout, N, STAGES, CONSUMERS, D0, D1, CAUSAL, DROPOUT)),
                (_producer, (rings, reads, shape, N, STAGES, CONSUMERS, D0, D1, CAUSAL)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


@cache
def _shared_layout(columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=min(2 * columns, 128), element_bitwidth=16, rank=4)


@lru_cache(4096)
def _section(shape: tuple[int, int, int], bytes_of_head: int, programs: int, config: SpecialisedForward) -> int:
    """How many heads to deal out together under a causal mask, see _tile, for a shape of heads, queries and keys.

    So few that their K and V, of so many bytes a head, stay in the L2 cache for each other's tiles; and of those
    numbers the one by which the programs' work is the most even. More only where none of them is nearly even.
    """

    def cost(section: int) -> float:
        cached = section == 1 or section * bytes_of_head <= CACHED
        return _longest(section, *shape, programs, config) * (1 if cached else BEYOND)

    return min(range(1, min(shape[0], MOST_TOGETHER) + 1), key=cost)


def _longest(section: int, heads: int, seq_q: int, seq_k: int, programs: int, config: SpecialisedForward) -> int:
    """Blocks that the busiest program computes under a causal mask, one more for each tile's start and end; as _tile.

    On an H200 a forward pass takes as much longer as this is above the mean: up to 5 % between sections of a few heads.
    """
    rows = -(-seq_q // config.queries)
    n, place = np.divmod(np.arange(heads * rows), programs)
    program = np.where(n % 2 == 0, place, programs - 1 - place)
    first = np.arange(heads * rows) // (section * rows) * section
    width = np.minimum(section, heads - first)
    tile = rows - 1 - (np.arange(heads * rows) - first * rows) // width
    after = -(-heads // section) - 1 - first // section
    tile = np.where(after % 2 == 0, tile, rows - 1 - tile)
    blocks = np.clip(-(-((tile + 1) * config.queries + seq_k - seq_q) // config.n), 1, -(-seq_k // config.n))
    return int(np.bincount(program, blocks + 1).max())


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, numbers: Tensor | None, config: SpecialisedForward
) -> tuple:
    """The tensors that forward_kernel takes."""
    d0, d1 = split_head_dim(q.shape[3])

    def parts(x: Tensor, rows: int) -> tuple:
        whole = descriptor(x, [1, rows, 1, d0], _shared_layout(d0))
        return whole, descriptor(x, [1, rows, 1, d1], _shared_layout(d1)) if d1 else None

    return *parts(q, ROWS.value), *parts(k, config.n), *parts(v, config.n), out, logsumexp, numbers


def _constants(head_dim: int, causal: bool, dropout: bool, config: SpecialisedForward) -> tuple:
    registers = CONSUMER_REGISTERS[config.consumers], PRODUCER_REGISTERS
    return *config, *split_head_dim(head_dim), causal, dropout, *registers


def compilation(
    head_dim: int, dtype: torch.dtype, causal: bool, dropout: bool, config: SpecialisedForward
) -> tuple[dict, dict, dict]:
    """Signature, constants and options of forward_kernel, to compile it ahead of time."""
    x, logsumexp = torch.empty((1, config.n, 1, head_dim), dtype=dtype), torch.empty(1)
    numbers = torch.empty(1, dtype=torch.int32) if dropout else None
    tensors = _arguments(x, x, x, x, logsumexp, numbers, config)
    sizes, scale, keep_scale = (1,) * 6, 1.0, 1.0
    scalars = *sizes, scale, threshold(0.0), keep_scale
    arguments = *tensors, *scalars, *_constants(head_dim, causal, dropout, config)
    return *signature_of(forward_kernel, arguments), {"num_warps": 4}


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options, config: SpecialisedForward) -> tuple[Tensor, Tensor]:
    """O (B, T, H, D) contiguous and the natural logsumexp (B, H, T) fp32; rows that see no key give zero and -inf.

    q (B, T, H, D), k and v (B, S, G, D), H a multiple of G, of D = 64, 80, 96 or 128 in bf16 or fp16 on an
    sm_90 device; unit stride along D, the other strides and the addresses multiples of 16 bytes. Options without
    window, documents or blocks.
    """
    (batch, seq_q, heads, head_dim), (seq_k, kv_heads) = q.shape, k.shape[1:3]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    logsumexp = torch.empty((batch, heads, seq_q), dtype=torch.float32, device=q.device)
    rows = -(-seq_q // config.queries)
    programs = min(batch * heads * rows, multiprocessors(q.device))
    bytes_of_head = -(-2 * seq_k * head_dim * k.element_size() * kv_heads // heads)
    shape = batch * heads, seq_q, seq_k
    section = _section(shape, bytes_of_head, programs, config) if options.causal else 1
    sizes = batch, heads, heads // kv_heads, seq_q, seq_k, section
    scalars = *sizes, options.scale, threshold(options.dropout_p), 1 / (1 - options.dropout_p)
    tensors = _arguments(q, k, v, out, logsumexp, options.numbers, config)
    constants = _constants(head_dim, options.causal, options.dropout_p > 0, config)
    with torch.cuda.device_of(q):
        launch(forward_kernel, (q.dtype, q.device, head_dim), programs, tensors, scalars, constants, num_warps=4)
    return out, logsumexp
