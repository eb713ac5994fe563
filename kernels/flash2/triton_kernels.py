"""FlashAttention-2 in Triton: forward and backward, portable over NVIDIA and AMD GPUs and Triton's interpreter.

Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023), Algorithms 1 and 2.
Each program owns one tile of queries (forward, dQ) or of keys (dK and dV) and loops over the other side, over the tiles
that need a mask and over those that do not in loops of their own; what nobody sees is skipped. A query sees a range of
keys, and a key is seen by a range of queries: causal order, sliding window and documents only move their ends. Softmax
runs in base 2, with log2(e) folded into the scale; statistics and accumulators are fp32.

M rows of a query tile, N rows of a key tile; other names are those of kernels/common/head_rows.py.
"""

import triton
import triton.language as tl

from kernels.common.head_rows import (
    LOG2_E,
    at_head,
    dot,
    head_of,
    keys_of,
    load_rows,
    numbers_of_head,
    queries_of,
    random_numbers,
    store_rows,
)
from kernels.common.rounding import to
from kernels.flash2 import block_lists as blocks

BLOCK: tl.constexpr = tl.constexpr(blocks.BLOCK)
HEADER: tl.constexpr = tl.constexpr(blocks.HEADER)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
LN_2_REST: tl.constexpr = tl.constexpr(7.348693098485626e-09)
"""1 / LOG2_E - LN_2, with both as fp32 holds them: their product is not quite 1."""


@triton.jit
def natural_logsumexp(m, l):
    """m / log2(e) + ln(l) for a maximum m in base 2, so exact that the backward, which multiplies by log2(e), is back
    at m: where scores reach 10^4, dQ and dK show what is lost here. A row that sees no key has m = -inf, l = 0.
    """
    rest = tl.maximum(m, -1e30) * LN_2_REST
    return tl.math.fma(m, LN_2, tl.math.fma(tl.math.log2(l), LN_2, rest))


@triton.jit
def _row_of_blocks(blocks, row, seq_len):
    """A pointer to that row of what blocks.listed gives."""
    return blocks + tl.cast(row, tl.int64) * (tl.cdiv(seq_len, BLOCK) + HEADER)


@triton.jit
def _kept_blocks(blocks, row, seq_len, BLOCKS: tl.constexpr):
    """Of a row of blocks.listed: a pointer to its list, and how many queries or keys the list's first part has, and how
    many all of it. Nothing of use without BLOCKS."""
    if BLOCKS:
        p_row = _row_of_blocks(blocks, row, seq_len)
        return p_row + HEADER, tl.load(p_row + 2) * BLOCK, tl.load(p_row + 3) * BLOCK
    else:
        return row, row, row


@triton.jit
def _place_of_keys(blocks, key_lists, early, seq_k, N: tl.constexpr, BLOCKS: tl.constexpr):
    """This program's batch and key/value head, in one number; its first key; and with BLOCKS the row of its list.

    Head by head, whose queries then stay in the L2 cache; but `early` lists, the longest, come first in all heads:
    started last, they would end long after the others.
    """
    program = tl.program_id(0)
    if BLOCKS:
        tiles: tl.constexpr = BLOCK // N
        first, rest = tl.maximum(early * tiles, 1), tl.maximum((key_lists - early) * tiles, 1)
        later = program - tl.num_programs(0) // key_lists * early
        bg = tl.where(later < 0, program // first, later // rest)
        tile = tl.where(later < 0, program % first, early * tiles + later % rest)
        row = tl.cdiv(seq_k, BLOCK) + tile // tiles
        block = tl.load(_row_of_blocks(blocks, row, seq_k))
        return bg, block * BLOCK + tile % tiles * N, row
    else:
        tiles = tl.cdiv(seq_k, N)
        return program // tiles, program % tiles * N, program


@triton.jit
def _row_at(p_list, at, BLOCKS: tl.constexpr):
    """The row that a loop has come to: `at` itself, or where that lies when only listed blocks are walked through."""
    if BLOCKS:
        at = tl.cast(at, tl.int32)  # the interpreter counts in Python's integers
        return tl.load(p_list + at // BLOCK) * BLOCK + at % BLOCK
    else:
        return at


@triton.jit
def _forward_tiles(
    acc,
    m,
    l,
    b_q,
    k,
    v,
    batch,
    kv_head,
    s_k,
    s_v,
    start,
    stop,
    p_list,
    first,
    end,
    seq_k,
    scale_log2,
    of_queries,
    p_of_keys,
    threshold,
    N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    BANDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    DROPOUT: tl.constexpr,
    UPCAST: tl.constexpr,
    TMA: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Lines 7 to 11 of Algorithm 1 over the keys [start, stop): online softmax, O kept unnormalised.

    Where MASKED, each query sees the keys [first, end) of them; where not BANDED, first is 0.
    """
    M: tl.constexpr = b_q.shape[0]
    o_n = tl.arange(0, N)
    for at in tl.range(start, stop, N):
        n = _row_at(p_list, at, BLOCKS)
        o_j = n + o_n
        b_k = load_rows(k, batch, kv_head, s_k, n, seq_k, N, HEAD_DIM, D, MASKED, TMA)
        b_s = dot(b_q, tl.trans(b_k), tl.zeros([M, N], tl.float32), UPCAST)
        if MASKED:
            visible = o_j[None, :] < end[:, None]
            if BANDED:
                visible = visible & (o_j[None, :] >= first[:, None])
            b_s = tl.where(visible, b_s, float("-inf"))
        m_new = tl.maximum(m, tl.max(b_s, 1) * scale_log2)
        if MASKED:
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet
        else:
            shift = m_new
        b_p = tl.math.exp2(b_s * scale_log2 - shift[:, None])
        alpha = tl.math.exp2(m - shift)
        l = l * alpha + tl.sum(b_p, 1)
        if DROPOUT:
            of_keys = random_numbers(p_of_keys, o_j, seq_k, MASKED, DROPOUT)
            b_p = tl.where(of_queries[:, None] * of_keys[None, :] >= threshold.to(tl.uint32, bitcast=True), b_p, 0.0)
        b_v = load_rows(v, batch, kv_head, s_v, n, seq_k, N, HEAD_DIM, D, MASKED, TMA)
        acc = dot(to(b_p, b_v.dtype, UPCAST), b_v, acc * alpha[:, None], UPCAST)
        m = m_new
    return acc, m, l


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    out,
    logsumexp,
    numbers,
    documents,
    blocks,
    sq_b,
    sq_t,
    sq_h,
    sk_b,
    sk_t,
    sk_h,
    sv_b,
    sv_t,
    sv_h,
    so_b,
    so_t,
    so_h,
    heads,
    groups,
    seq_q,
    seq_k,
    window,
    scale,
    threshold,
    keep_scale,
    M: tl.constexpr,
    N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DROPOUT: tl.constexpr,
    UPCAST: tl.constexpr,
    TMA: tl.constexpr,
):
    """Algorithm 1: one program computes M rows of O and of the logsumexp.

    q, out (B, seq_q, heads, HEAD_DIM), k, v (B, seq_k, heads / groups, HEAD_DIM) with unit stride along HEAD_DIM;
    logsumexp (B, heads, seq_q) fp32, natural. Where WINDOW a query sees the last `window` of its keys; where DOCUMENTS
    the keys of its document, documents (B, 2, seq_q) int32 being where that starts and ends.
    Grid: B * heads * cdiv(seq_q, M) on axis 0.
    """
    tiles = tl.cdiv(seq_q, M)
    bh = tl.program_id(0) // tiles
    i = (tiles - 1 - tl.program_id(0) % tiles) * M  # causal rows are longest at the end: those first
    batch, head = bh // heads, bh % heads
    offset = seq_k - seq_q
    o_m = tl.arange(0, M)
    kv_head = head // groups
    k = at_head(k, batch, kv_head, sk_b, sk_h, TMA)
    v = at_head(v, batch, kv_head, sv_b, sv_h, TMA)
    q = at_head(q, batch, head, sq_b, sq_h, TMA)
    b_q = load_rows(q, batch, head, sq_t, i, seq_q, M, HEAD_DIM, D, True, TMA)

    BANDED: tl.constexpr = WINDOW or DOCUMENTS
    last = tl.minimum(i + M, seq_q) - 1
    # fmt: off
    start, full = keys_of(i, documents, batch, offset, seq_q, seq_k, window, CAUSAL, WINDOW, DOCUMENTS)
    full_start, stop = keys_of(last, documents, batch, offset, seq_q, seq_k, window, CAUSAL, WINDOW, DOCUMENTS)
    first, end = keys_of(i + o_m, documents, batch, offset, seq_q, seq_k, window, CAUSAL, WINDOW, DOCUMENTS)
    # fmt: on
    p_list, whole, kept = _kept_blocks(blocks, i // BLOCK, seq_q, BLOCKS)
    if BLOCKS:
        start, full_start, full, stop = 0, 0, whole, kept
    p_of_queries, p_of_keys = numbers_of_head(numbers, bh, seq_q, seq_k, DROPOUT)
    of_queries = random_numbers(p_of_queries, i + o_m, seq_q, True, DROPOUT)
    full, full_start = tl.maximum(full, 0) // N * N, tl.cdiv(tl.maximum(full_start, 0), N) * N
    acc = tl.zeros([M, D], tl.float32)
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)
    # fmt: off
    if BANDED:
        acc, m, l = _forward_tiles(
            acc, m, l, b_q, k, v, batch, kv_head, sk_t, sv_t,
            tl.maximum(start, 0) // N * N, tl.minimum(full_start, stop), p_list, first, end, seq_k,
            scale * LOG2_E, of_queries, p_of_keys, threshold,
            N, HEAD_DIM, D, BANDED, BLOCKS, DROPOUT, UPCAST, TMA, True,
        )
    acc, m, l = _forward_tiles(
        acc, m, l, b_q, k, v, batch, kv_head, sk_t, sv_t, full_start, full, p_list,
        first, end, seq_k, scale * LOG2_E, of_queries, p_of_keys, threshold,
        N, HEAD_DIM, D, BANDED, BLOCKS, DROPOUT, UPCAST, TMA, False,
    )
    acc, m, l = _forward_tiles(
        acc, m, l, b_q, k, v, batch, kv_head, sk_t, sv_t, tl.maximum(full, full_start), stop, p_list,
        first, end, seq_k, scale * LOG2_E, of_queries, p_of_keys, threshold,
        N, HEAD_DIM, D, BANDED, BLOCKS, DROPOUT, UPCAST, TMA, True,
    )
    # fmt: on
    b_out = acc * (keep_scale / tl.where(l == 0.0, 1.0, l))[:, None]
    store_rows(head_of(out, batch, head, so_b, so_h), so_t, i, seq_q, o_m, b_out, HEAD_DIM, D, UPCAST)
    p_lse = logsumexp + tl.cast(bh, tl.int64) * seq_q + i + o_m
    tl.store(p_lse, natural_logsumexp(m, l), mask=i + o_m < seq_q)


@triton.jit
def delta_kernel(
    out,
    dout,
    dlogsumexp,
    delta,
    so_b,
    so_t,
    so_h,
    sdo_b,
    sdo_t,
    sdo_h,
    heads,
    seq_q,
    keep,
    M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    LOGSUMEXP: tl.constexpr,
):
    """Line 4 of Algorithm 2: delta = rowsum(dO o O), (B, heads, seq_q) fp32. Grid: B * heads * cdiv(seq_q, M).

    Where the LOGSUMEXP has a gradient too, shaped like delta, it is taken off: dS = P o (dP - delta + dL). In dropout
    dP is Z o dP / keep, Z being 0 or 1; delta is stored times `keep`, so that the others divide by it once, at the end.
    """
    tiles = tl.cdiv(seq_q, M)
    bh = tl.program_id(0) // tiles
    i = tl.program_id(0) % tiles * M
    batch, head = bh // heads, bh % heads
    o_m = tl.arange(0, M)
    p_out, p_dout = head_of(out, batch, head, so_b, so_h), head_of(dout, batch, head, sdo_b, sdo_h)
    b_out = load_rows(p_out, batch, head, so_t, i, seq_q, M, HEAD_DIM, D, True, False)
    b_dout = load_rows(p_dout, batch, head, sdo_t, i, seq_q, M, HEAD_DIM, D, True, False)
    b_delta = tl.sum(b_out.to(tl.float32) * b_dout.to(tl.float32), 1)
    row = tl.cast(bh, tl.int64) * seq_q + i + o_m
    if LOGSUMEXP:
        b_delta -= tl.load(dlogsumexp + row, mask=i + o_m < seq_q, other=0.0)
    tl.store(delta + row, b_delta * keep, mask=i + o_m < seq_q)


@triton.jit
def _key_gradient_tiles(
    dk,
    dv,
    b_k,
    b_v,
    q,
    dout,
    p_lse,
    p_delta,
    batch,
    head,
    s_q,
    s_do,
    start,
    stop,
    p_list,
    first,
    end,
    seq_q,
    scale_log2,
    of_keys,
    p_of_queries,
    threshold,
    M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    BANDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    DROPOUT: tl.constexpr,
    UPCAST: tl.constexpr,
    TMA: tl.constexpr,
    BOUNDED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Lines 10 to 16 of Algorithm 2 without dQ, for the queries [start, stop), everything transposed: [N, M].

    Both products of S and dP are issued before the exponential, which then hides under the second. Rows past seq_q read
    a logsumexp of +inf, so that their P is zero; keys past seq_k need no mask, being rows of dK and dV never stored.
    Where MASKED, each key is seen by the queries [first, end); where not BANDED, end is seq_q.
    """
    N: tl.constexpr = b_k.shape[0]
    o_m = tl.arange(0, M)
    for at in tl.range(start, stop, M):
        m = _row_at(p_list, at, BLOCKS)
        o_i = m + o_m
        b_q = load_rows(q, batch, head, s_q, m, seq_q, M, HEAD_DIM, D, BOUNDED, TMA)
        b_do = load_rows(dout, batch, head, s_do, m, seq_q, M, HEAD_DIM, D, BOUNDED, TMA)
        b_st = dot(b_k, tl.trans(b_q), tl.zeros([N, M], tl.float32), UPCAST)
        b_dpt = dot(b_v, tl.trans(b_do), tl.zeros([N, M], tl.float32), UPCAST)
        if BOUNDED:
            b_lse = tl.load(p_lse + o_i, mask=o_i < seq_q, other=float("inf"))
            b_delta = tl.load(p_delta + o_i, mask=o_i < seq_q, other=0.0)
        else:
            b_lse = tl.load(p_lse + o_i)
            b_delta = tl.load(p_delta + o_i)
        b_pt = tl.math.exp2(b_st * scale_log2 - (b_lse * LOG2_E)[None, :])
        if MASKED:
            seen = o_i[None, :] >= first[:, None]
            if BANDED:
                seen = seen & (o_i[None, :] < end[:, None])
            b_pt = tl.where(seen, b_pt, 0.0)
        b_pt_kept = b_pt
        if DROPOUT:
            of_queries = random_numbers(p_of_queries, o_i, seq_q, BOUNDED, DROPOUT)
            kept = of_keys[:, None] * of_queries[None, :] >= threshold.to(tl.uint32, bitcast=True)
            b_pt_kept = tl.where(kept, b_pt, 0.0)
            b_dpt = tl.where(kept, b_dpt, 0.0)
        dv = dot(to(b_pt_kept, b_do.dtype, UPCAST), b_do, dv, UPCAST)
        b_dst = b_pt * (b_dpt - b_delta[None, :])
        dk = dot(to(b_dst, b_q.dtype, UPCAST), b_q, dk, UPCAST)
    return dk, dv


@triton.jit
def key_gradient_kernel(
    q,
    k,
    v,
    dout,
    logsumexp,
    delta,
    dk,
    dv,
    pieces,
    numbers,
    documents,
    blocks,
    sq_b,
    sq_t,
    sq_h,
    sk_b,
    sk_t,
    sk_h,
    sv_b,
    sv_t,
    sv_h,
    sdo_b,
    sdo_t,
    sdo_h,
    sdk_b,
    sdk_t,
    sdk_h,
    heads,
    groups,
    seq_q,
    seq_k,
    window,
    scale,
    threshold,
    keep_scale,
    key_lists,
    early,
    M: tl.constexpr,
    N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DROPOUT: tl.constexpr,
    UPCAST: tl.constexpr,
    TMA: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """dK and dV of Algorithm 2: one program owns N keys of one key/value head and sums over the heads of its group.

    dk and dv share their strides (B, seq_k, heads / groups, HEAD_DIM). BOUNDED says that seq_q is no multiple of M or,
    with BLOCKS, of a block. Grid: B * (heads / groups) * cdiv(seq_k, N) on axis 0; causal keys are longest at the
    start, as launched.

    With BLOCKS, for each of the key_lists rows that blocks.listed has for keys there are BLOCK / N programs instead. Of
    a list in several rows, among the first `early` ones, what each gives goes to pieces, for add_pieces_kernel.
    """
    kv_heads = heads // groups
    bg, j, row = _place_of_keys(blocks, key_lists, early, seq_k, N, BLOCKS)
    batch, kv_head = bg // kv_heads, bg % kv_heads
    offset = seq_k - seq_q
    o_n = tl.arange(0, N)
    k = at_head(k, batch, kv_head, sk_b, sk_h, TMA)
    v = at_head(v, batch, kv_head, sv_b, sv_h, TMA)
    b_k = load_rows(k, batch, kv_head, sk_t, j, seq_k, N, HEAD_DIM, D, True, TMA)
    b_v = load_rows(v, batch, kv_head, sv_t, j, seq_k, N, HEAD_DIM, D, True, TMA)

    BANDED: tl.constexpr = WINDOW or DOCUMENTS
    last = tl.minimum(j + N, seq_k) - 1
    # fmt: off
    start, full = queries_of(j, documents, batch, offset, seq_q, seq_k, window, CAUSAL, WINDOW, DOCUMENTS)
    full_start, stop = queries_of(last, documents, batch, offset, seq_q, seq_k, window, CAUSAL, WINDOW, DOCUMENTS)
    first, end = queries_of(j + o_n, documents, batch, offset, seq_q, seq_k, window, CAUSAL, WINDOW, DOCUMENTS)
    # fmt: on
    p_list, partial, kept = _kept_blocks(blocks, row, seq_k, BLOCKS)
    if BLOCKS:
        start, full_start, full, stop = 0, partial, kept, kept
    start, full_start = tl.maximum(start, 0) // M * M, tl.cdiv(tl.maximum(full_start, 0), M) * M
    if BANDED:
        full = tl.maximum(full, 0) // M * M  # elsewhere every tile from full_start on is seen whole
    b_dk = tl.zeros([N, D], tl.float32)
    b_dv = tl.zeros([N, D], tl.float32)
    for g in range(groups):
        head = kv_head * groups + g
        bh = batch * heads + head
        p_of_queries, p_of_keys = numbers_of_head(numbers, bh, seq_q, seq_k, DROPOUT)
        of_keys = random_numbers(p_of_keys, j + o_n, seq_k, True, DROPOUT)
        q_head = at_head(q, batch, head, sq_b, sq_h, TMA)
        do_head = at_head(dout, batch, head, sdo_b, sdo_h, TMA)
        p_lse = logsumexp + tl.cast(bh, tl.int64) * seq_q
        p_delta = delta + tl.cast(bh, tl.int64) * seq_q
        # fmt: off
        if CAUSAL or DOCUMENTS:
            b_dk, b_dv = _key_gradient_tiles(
                b_dk, b_dv, b_k, b_v, q_head, do_head, p_lse, p_delta, batch, head, sq_t, sdo_t,
                start, tl.minimum(full_start, stop), p_list, first, end, seq_q, scale * LOG2_E, of_keys, p_of_queries,
                threshold, M, HEAD_DIM, D, BANDED, BLOCKS, DROPOUT, UPCAST, TMA, BOUNDED, True,
            )
        b_dk, b_dv = _key_gradient_tiles(
            b_dk, b_dv, b_k, b_v, q_head, do_head, p_lse, p_delta, batch, head, sq_t, sdo_t,
            full_start, full, p_list, first, end, seq_q, scale * LOG2_E, of_keys, p_of_queries, threshold,
            M, HEAD_DIM, D, BANDED, BLOCKS, DROPOUT, UPCAST, TMA, BOUNDED, False,
        )
        if BANDED:
            b_dk, b_dv = _key_gradient_tiles(
                b_dk, b_dv, b_k, b_v, q_head, do_head, p_lse, p_delta, batch, head, sq_t, sdo_t,
                tl.maximum(full, full_start), stop, p_list, first, end, seq_q, scale * LOG2_E, of_keys, p_of_queries,
                threshold, M, HEAD_DIM, D, BANDED, BLOCKS, DROPOUT, UPCAST, TMA, BOUNDED, True,
            )
        # fmt: on
    b_dk, b_dv = b_dk * (scale * keep_scale), b_dv * keep_scale
    stored = seq_k
    if BLOCKS:
        whole = tl.load(_row_of_blocks(blocks, row, seq_k) + 1) == 1
        stored = tl.where(whole, seq_k, 0)
        if not whole:
            all_heads = tl.num_programs(0) // (key_lists * (BLOCK // N))
            p_dk = _rows_of_piece(pieces, row - tl.cdiv(seq_k, BLOCK), bg, all_heads, j % BLOCK, N, D)
            tl.store(p_dk, b_dk)
            tl.store(p_dk + tl.cast(early, tl.int64) * all_heads * (BLOCK * D), b_dv)
    p_dk, p_dv = head_of(dk, batch, kv_head, sdk_b, sdk_h), head_of(dv, batch, kv_head, sdk_b, sdk_h)
    store_rows(p_dk, sdk_t, j, stored, o_n, b_dk, HEAD_DIM, D, UPCAST)
    store_rows(p_dv, sdk_t, j, stored, o_n, b_dv, HEAD_DIM, D, UPCAST)


@triton.jit
def _rows_of_piece(pieces, row, bg, all_heads, start, ROWS: tl.constexpr, D: tl.constexpr):
    """Pointers to ROWS keys from `start` of one head's dK in a piece: pieces are (2, early, all_heads, BLOCK, D)."""
    o_rows, o_d = tl.arange(0, ROWS), tl.arange(0, D)
    first = ((tl.cast(row, tl.int64) * all_heads + bg) * BLOCK + start) * D
    return pieces + first + o_rows[:, None] * D + o_d[None, :]


@triton.jit
def add_pieces_kernel(
    pieces,
    dk,
    dv,
    blocks,
    sdk_b,
    sdk_t,
    sdk_h,
    kv_heads,
    seq_k,
    early,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """dK and dV of the keys whose lists are in several rows: the sums of their pieces, in order, so that their bits are
    the same each time. pieces (2, early, B * kv_heads, BLOCK, D) are fp32.
    Grid: early * B * kv_heads * BLOCK / ROWS on axis 0.
    """
    tiles: tl.constexpr = BLOCK // ROWS
    all_heads = tl.num_programs(0) // (early * tiles)
    place, start = tl.program_id(0) // tiles, tl.program_id(0) % tiles * ROWS
    row, bg = place // all_heads, place % all_heads
    p_row = _row_of_blocks(blocks, tl.cdiv(seq_k, BLOCK) + row, seq_k)
    count = tl.load(p_row + 1)
    if count > 1:
        b_dk, b_dv = tl.zeros([ROWS, D], tl.float32), tl.zeros([ROWS, D], tl.float32)
        for piece in range(row, row + count):
            p_dk = _rows_of_piece(pieces, piece, bg, all_heads, start, ROWS, D)
            b_dk += tl.load(p_dk)
            b_dv += tl.load(p_dk + tl.cast(early, tl.int64) * all_heads * (BLOCK * D))
        batch, kv_head, o_rows = bg // kv_heads, bg % kv_heads, tl.arange(0, ROWS)
        start += tl.load(p_row) * BLOCK
        p_dk, p_dv = head_of(dk, batch, kv_head, sdk_b, sdk_h), head_of(dv, batch, kv_head, sdk_b, sdk_h)
        store_rows(p_dk, sdk_t, start, seq_k, o_rows, b_dk, HEAD_DIM, D, UPCAST)
        store_rows(p_dv, sdk_t, start, seq_k, o_rows, b_dv, HEAD_DIM, D, UPCAST)


@triton.jit
def _query_gradient_tiles(
    dq,
    b_q,
    b_do,
    b_lse,
    b_delta,
    k,
    v,
    batch,
    kv_head,
    s_k,
    s_v,
    start,
    stop,
    p_list,
    first,
    end,
    seq_k,
    scale_log2,
    of_queries,
    p_of_keys,
    threshold,
    N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    BANDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    DROPOUT: tl.constexpr,
    UPCAST: tl.constexpr,
    TMA: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Lines 11 to 15 of Algorithm 2 for dQ alone, over the keys [start, stop), masked as in the forward kernel."""
    M: tl.constexpr = b_q.shape[0]
    o_n = tl.arange(0, N)
    for at in tl.range(start, stop, N):
        n = _row_at(p_list, at, BLOCKS)
        o_j = n + o_n
        b_k = load_rows(k, batch, kv_head, s_k, n, seq_k, N, HEAD_DIM, D, MASKED, TMA)
        b_v = load_rows(v, batch, kv_head, s_v, n, seq_k, N, HEAD_DIM, D, MASKED, TMA)
        b_s = dot(b_q, tl.trans(b_k), tl.zeros([M, N], tl.float32), UPCAST)
        b_dp = dot(b_do, tl.trans(b_v), tl.zeros([M, N], tl.float32), UPCAST)
        b_p = tl.math.exp2(b_s * scale_log2 - (b_lse * LOG2_E)[:, None])
        if MASKED:
            visible = o_j[None, :] < end[:, None]
            if BANDED:
                visible = visible & (o_j[None, :] >= first[:, None])
            b_p = tl.where(visible, b_p, 0.0)
        if DROPOUT:
            of_keys = random_numbers(p_of_keys, o_j, seq_k, MASKED, DROPOUT)
            kept = of_queries[:, None] * of_keys[None, :] >= threshold.to(tl.uint32, bitcast=True)
            b_dp = tl.where(kept, b_dp, 0.0)
        b_ds = b_p * (b_dp - b_delta[:, None])
        dq = dot(to(b_ds, b_k.dtype, UPCAST), b_k, dq, UPCAST)
    return dq


@triton.jit
def query_gradient_kernel(
    q,
    k,
    v,
    dout,
    logsumexp,
    delta,
    dq,
    numbers,
    documents,
    blocks,
    sq_b,
    sq_t,
    sq_h,
    sk_b,
    sk_t,
    sk_h,
    sv_b,
    sv_t,
    sv_h,
    sdo_b,
    sdo_t,
    sdo_h,
    sdq_b,
    sdq_t,
    sdq_h,
    heads,
    groups,
    seq_q,
    seq_k,
    window,
    scale,
    threshold,
    keep_scale,
    M: tl.constexpr,
    N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DROPOUT: tl.constexpr,
    UPCAST: tl.constexpr,
    TMA: tl.constexpr,
):
    """dQ of Algorithm 2: one program owns M queries, so that no atomics are needed. Grid as in the forward kernel."""
    tiles = tl.cdiv(seq_q, M)
    bh = tl.program_id(0) // tiles
    i = (tiles - 1 - tl.program_id(0) % tiles) * M
    batch, head = bh // heads, bh % heads
    offset = seq_k - seq_q
    o_m = tl.arange(0, M)
    kv_head = head // groups
    k = at_head(k, batch, kv_head, sk_b, sk_h, TMA)
    v = at_head(v, batch, kv_head, sv_b, sv_h, TMA)
    q = at_head(q, batch, head, sq_b, sq_h, TMA)
    dout = at_head(dout, batch, head, sdo_b, sdo_h, TMA)
    b_q = load_rows(q, batch, head, sq_t, i, seq_q, M, HEAD_DIM, D, True, TMA)
    b_do = load_rows(dout, batch, head, sdo_t, i, seq_q, M, HEAD_DIM, D, True, TMA)
    row = tl.cast(bh, tl.int64) * seq_q + i + o_m
    b_lse = tl.load(logsumexp + row, mask=i + o_m < seq_q, other=float("inf"))
    b_delta = tl.load(delta + row, mask=i + o_m < seq_q, other=0.0)

    BANDED: tl.constexpr = WINDOW or DOCUMENTS
    last = tl.minimum(i + M, seq_q) - 1
    # fmt: off
    start, full = keys_of(i, documents, batch, offset, seq_q, seq_k, window, CAUSAL, WINDOW, DOCUMENTS)
    full_start, stop = keys_of(last, documents, batch, offset, seq_q, seq_k, window, CAUSAL, WINDOW, DOCUMENTS)
    first, end = keys_of(i + o_m, documents, batch, offset, seq_q, seq_k, window, CAUSAL, WINDOW, DOCUMENTS)
    # fmt: on
    p_list, whole, kept = _kept_blocks(blocks, i // BLOCK, seq_q, BLOCKS)
    if BLOCKS:
        start, full_start, full, stop = 0, 0, whole, kept
    p_of_queries, p_of_keys = numbers_of_head(numbers, bh, seq_q, seq_k, DROPOUT)
    of_queries = random_numbers(p_of_queries, i + o_m, seq_q, True, DROPOUT)
    full, full_start = tl.maximum(full, 0) // N * N, tl.cdiv(tl.maximum(full_start, 0), N) * N
    b_dq = tl.zeros([M, D], tl.float32)
    # fmt: off
    if BANDED:
        b_dq = _query_gradient_tiles(
            b_dq, b_q, b_do, b_lse, b_delta, k, v, batch, kv_head, sk_t, sv_t, tl.maximum(start, 0) // N * N,
            tl.minimum(full_start, stop), p_list, first, end, seq_k, scale * LOG2_E, of_queries, p_of_keys, threshold,
            N, HEAD_DIM, D, BANDED, BLOCKS, DROPOUT, UPCAST, TMA, True,
        )
    b_dq = _query_gradient_tiles(
        b_dq, b_q, b_do, b_lse, b_delta, k, v, batch, kv_head, sk_t, sv_t, full_start, full, p_list,
        first, end, seq_k, scale * LOG2_E, of_queries, p_of_keys, threshold,
        N, HEAD_DIM, D, BANDED, BLOCKS, DROPOUT, UPCAST, TMA, False,
    )
    b_dq = _query_gradient_tiles(
        b_dq, b_q, b_do, b_lse, b_delta, k, v, batch, kv_head, sk_t, sv_t, tl.maximum(full, full_start), stop, p_list,
        first, end, seq_k, scale * LOG2_E, of_queries, p_of_keys, threshold,
        N, HEAD_DIM, D, BANDED, BLOCKS, DROPOUT, UPCAST, TMA, True,
    )
    # fmt: on
    store_rows(
        head_of(dq, batch, head, sdq_b, sdq_h), sdq_t, i, seq_q, o_m, b_dq * (scale * keep_scale), HEAD_DIM, D, UPCAST
    )
