"""Parts of one tile of the Hopper forward: products, mask, softmax, dropout, and the store of O.

Legend: 64 rows of a consumer (ROWS), N keys of a block, D0 + D1 head size; i first query of the rows, j first key.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait

from kernels.flash2.hopper_forward.schedule import keys_at
from kernels.flash2.triton_kernels.common import natural_logsumexp
from kernels.hopper.warpgroups import accumulator_layout, hide

ROWS: gl.constexpr = gl.constexpr(64)  # of one consumer: the M of wgmma


@gluon.constexpr_function
def _store_layout(columns):
    """Return a layout of [64, columns] in which each thread writes 16 bytes at a time."""
    across = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def load_queries(q_slots, slot, HELD: gl.constexpr, N: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr):
    """Return Q [64, D0] and [64, D1] as operands: in registers if HELD, else in shared memory.

    Otherwise each product reads Q from shared memory again. Held queries make heads of 80 at 8k 5.8 % faster.
    """
    qs0, qs1 = q_slots
    q0, q1 = qs0.index(slot).reshape([ROWS, D0]), 0
    if D1:
        q1 = qs1.index(slot).reshape([ROWS, D1])
    if HELD:
        layout: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(N), 2)
        return q0.load(layout), q1.load(layout) if D1 else 0
    else:
        return q0, q1


@gluon.jit
def issue_scores(q0, q1, k_slots, slot, N: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr):
    """Issue S = Q K^T, [64, N]."""
    ks0, ks1 = k_slots
    s = warpgroup_mma_init(gl.zeros([ROWS, N], gl.float32, accumulator_layout(N)))
    k = ks0.index(slot).reshape([N, D0]).permute([1, 0])  # [D0, N]
    s = warpgroup_mma(q0, k, s, use_acc=False, is_async=True)
    if D1:
        k = ks1.index(slot).reshape([N, D1]).permute([1, 0])  # [D1, N]
        s = warpgroup_mma(q1, k, s, is_async=True)
    return s


@gluon.jit
def issue_output(p, v_slots, slot, acc0, acc1, N: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr):
    """Issue O += P V, [64, D0] and [64, D1]."""
    vs0, vs1 = v_slots
    acc0 = warpgroup_mma(p, vs0.index(slot).reshape([N, D0]), acc0, is_async=True)
    if D1:
        layout: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(D1), 2)
        p1 = gl.convert_layout(p, layout, assert_trivial=True)
        acc1 = warpgroup_mma(p1, vs1.index(slot).reshape([N, D1]), acc1, is_async=True)
    return acc0, acc1


@gluon.jit
def wait_for_output(acc0, acc1, p, D1: gl.constexpr):
    """Wait for all products. P is among the results because its registers are free only from here on."""
    if D1:
        return warpgroup_mma_wait(0, deps=(acc0, acc1, p))
    else:
        acc0, p = warpgroup_mma_wait(0, deps=(acc0, p))
        return acc0, acc1, p


@gluon.jit
def count_blocks(
    i, batch, shape, band, begin, blocks, N: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """Return the first block that the rows i to i + 64 see without a mask, the block after the last such one, and how
    many blocks the rows see in all. Blocks count from `begin`, the tile's first block.
    """
    _batches, _heads, seq_q, seq_k, _section = shape
    if WINDOW or DOCUMENTS:
        last = gl.minimum(i + ROWS, seq_q) - 1  # before i if all rows are past the last query
        _, full = keys_at(gl.minimum(i, last), batch, shape, band, CAUSAL, WINDOW, DOCUMENTS)
        full_begin, stop = keys_at(last, batch, shape, band, CAUSAL, WINDOW, DOCUMENTS)
        own = blocks
        if CAUSAL:
            # Otherwise a consumer whose document ends early would leave the others more than one block behind.
            own = gl.minimum(blocks, gl.maximum(gl.cdiv(stop, N) - begin, 1))
        return gl.cdiv(gl.maximum(full_begin, 0), N) - begin, gl.maximum(full, 0) // N - begin, own
    else:
        full = gl.minimum(seq_k // N, blocks)
        if CAUSAL:
            i += seq_k - seq_q
            full = gl.minimum(full, gl.maximum(i + 1, 0) // N)
            blocks = gl.minimum(blocks, gl.maximum(gl.cdiv(i + ROWS, N), 1))
        return 0, full, blocks


@gluon.jit
def needs_mask(j, full_begin, full, BANDED: gl.constexpr):
    """Return whether some row does not see all keys of block j; full_begin and full as from count_blocks."""
    if BANDED:
        return (j < full_begin) | (j >= full)
    else:
        return j >= full


@gluon.jit
def visible_keys(
    i, batch, shape, band, LAYOUT: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr
):  # fmt: skip
    """Return first and end [64] of the keys that the rows i to i + 64 see; placeholders without a window or documents.

    Without them, `mask` computes the end in each block, so that the end takes no register between blocks.
    """
    if WINDOW or DOCUMENTS:
        return keys_at(i + gl.arange(0, ROWS, layout=LAYOUT), batch, shape, band, CAUSAL, WINDOW, DOCUMENTS)
    else:
        return i, i


@gluon.jit
def mask(s, i, j, seen, seq_q, seq_k, SPARE: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr, BANDED: gl.constexpr):
    """Return the scores S [64, N] with -inf for hidden keys. If BANDED, `seen` is what visible_keys returned.

    With registers to SPARE, the column numbers stay in registers, which is 2 % faster.
    """
    first, end = seen
    if BANDED:
        s = hide(s, first - j, False)
    if BANDED and not CAUSAL:
        return hide(s, end - 1 - j, True)
    # Under a causal mask a query's document or window ends with the query itself: compute the end in each block.
    o_i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, s.type.layout))
    last = _last_key(i, o_i, j, seq_q, seq_k, CAUSAL)
    if SPARE:
        o_j = gl.arange(0, N, layout=gl.SliceLayout(0, s.type.layout))
        return gl.where(o_j[None, :] <= last[:, None], s, -float("inf"))
    else:
        return hide(s, last, True)


@gluon.jit
def _last_key(i, o_i, j, seq_q, seq_k, CAUSAL: gl.constexpr):
    """Return the last key that the queries i + o_i see, counted from key j; negative if it comes before key j."""
    if CAUSAL:
        return gl.minimum(i + seq_k - seq_q + o_i, seq_k - 1) - j
    else:
        return gl.zeros_like(o_i) + (seq_k - 1 - j)


@gluon.jit
def partial_sums(p):
    """Return each thread's own part of the row sums of P [64, N], as [64, 4]: four threads share a row.

    store_tile adds the four parts, once per tile. In each block the shuffles would take 3 % of the time.
    """
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _row_maxima(s, D1: gl.constexpr):
    """Return the row maxima [64] of S [64, N].

    A thread has N / 4 numbers of a row. gl.max(s, 1) compares them one after the other, and each comparison waits for
    the one before. For N = 128, the tree makes the longest chain 9 comparisons long instead of 33, with two of them
    between threads. On an H100, heads of 64 with three consumers are 1 to 6 % faster with it, and heads of 128 up to
    3 %. Causal heads in two parts are 2 to 5 % slower.
    """
    if D1:
        return gl.max(s, 1)
    else:
        parts = s.reshape([s.shape[0], s.shape[1] // 32, 4, 4, 2])  # axis 3: the four threads of a row
        return gl.convert_layout(gl.max(gl.max(gl.max(gl.max(parts, 4), 2), 1), 1), gl.SliceLayout(1, s.type.layout))


@gluon.jit
def new_maxima(s, m, scale_log2, D1: gl.constexpr):
    """Return the new row maxima of S scale_log2 [64], and what to subtract: 0 for a row that has seen no key yet."""
    m_new = gl.maximum(m, _row_maxima(s, D1) * scale_log2)
    return m_new, gl.where(m_new == -float("inf"), 0.0, m_new)


@gluon.jit
def softmax(s, shift, m, l, scale_log2):
    """Return P [64, N], the partial sums l [64, 4], and the factor alpha [64] of the old O; m are the old maxima."""
    p = gl.exp2(s * scale_log2 - shift[:, None])
    alpha = gl.exp2(m - shift)
    of_sums = gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))
    return p, l * of_sums[:, None] + partial_sums(p), alpha


@gluon.jit
def query_numbers(numbers, batch, head, i, shape, N: gl.constexpr, DROPOUT: gl.constexpr):
    """Return dropout's random numbers of the queries i to i + 64."""
    if DROPOUT:
        heads, seq_q, seq_k = shape[1], shape[2], shape[3]
        o_i = i + gl.arange(0, ROWS, layout=gl.SliceLayout(1, accumulator_layout(N)))
        p_head = numbers + (batch * heads + head).to(gl.int64) * (seq_q + seq_k)
        return gl.load(p_head + o_i, mask=o_i < seq_q, other=0).to(gl.uint32, bitcast=True)
    else:
        return 0


@gluon.jit
def key_numbers(numbers, batch, head, j, shape, N: gl.constexpr, DROPOUT: gl.constexpr):
    """Return dropout's random numbers of the keys j to j + N."""
    if DROPOUT:
        heads, seq_q, seq_k = shape[1], shape[2], shape[3]
        o_j = j + gl.arange(0, N, layout=gl.SliceLayout(0, accumulator_layout(N)))
        p_head = numbers + (batch * heads + head).to(gl.int64) * (seq_q + seq_k) + seq_q
        return gl.load(p_head + o_j, mask=o_j < seq_k, other=0).to(gl.uint32, bitcast=True)
    else:
        return 0


@gluon.jit
def as_operand(p, of_queries, of_keys, threshold, dtype: gl.constexpr, D0: gl.constexpr, DROPOUT: gl.constexpr):
    """Return P [64, N], rounded, as the operand of P V in registers. Dropped probabilities are zero; see dropout.py."""
    if DROPOUT:
        p = gl.where(of_queries[:, None] * of_keys[None, :] >= threshold.to(gl.uint32, bitcast=True), p, 0.0)
    layout: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(D0), 2)
    return gl.convert_layout(p.to(dtype), layout)


@gluon.jit
def rescale(acc, alpha, D: gl.constexpr):
    """Return O [64, D] with row i multiplied by alpha[i]."""
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, accumulator_layout(D)))[:, None]


@gluon.jit
def store_tile(out, logsumexp, acc0, acc1, m, l, keep_scale, batch, head, i, shape, D0: gl.constexpr, D1: gl.constexpr):
    """Write O and the logsumexp of the rows i to i + 64."""
    heads, seq_q = shape[1], shape[2]
    l = gl.convert_layout(gl.sum(l, 1), m.type.layout)  # [64]
    o_i = i + gl.arange(0, ROWS, layout=m.type.layout)
    p_lse = logsumexp + (batch * heads + head).to(gl.int64) * seq_q
    gl.store(p_lse + o_i, natural_logsumexp(m, l), mask=o_i < seq_q)
    inverse = keep_scale / gl.where(l == 0.0, 1.0, l)
    stride = heads * (D0 + D1)
    p_out = out + batch.to(gl.int64) * seq_q * stride + head * (D0 + D1)
    _store_part(p_out, stride, acc0, inverse, i, seq_q, D0)
    if D1:
        _store_part(p_out + D0, stride, acc1, inverse, i, seq_q, D1)


@gluon.jit
def _store_part(p_out, stride, acc, inverse, i, seq_q, COLUMNS: gl.constexpr):
    """Write one part of O [64, COLUMNS], each row times its `inverse`; p_out points to the head, stride is of rows."""
    layout: gl.constexpr = _store_layout(COLUMNS)
    b_out = rescale(acc, inverse, COLUMNS).to(p_out.dtype.element_ty)
    o_i = i + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    o_d = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    # i is inside the product so that the offsets are computed again for each tile. Kept in registers from tile to tile,
    # they would be spilled.
    p_tile = p_out + (o_i.to(gl.int64) * stride)[:, None] + o_d[None, :]
    gl.store(p_tile, gl.convert_layout(b_out, layout), mask=(o_i < seq_q)[:, None])
