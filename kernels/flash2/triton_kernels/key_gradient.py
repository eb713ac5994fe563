"""The plain backward kernels that own keys: dK and dV, and the sums over pieces of long block lists.

Legend: M rows of a query tile, N rows of a key tile, HEAD_DIM head size, D head size padded to a power of two.
"""

import triton
import triton.language as tl

from kernels.common.head_rows import (
    LOG2_E,
    at_head,
    dot,
    head_of,
    load_rows,
    numbers_of_head,
    queries_of,
    random_numbers,
    store_rows,
)
from kernels.common.rounding import to
from kernels.flash2.triton_kernels.common import BLOCK, kept_blocks, row_at, row_of_blocks


@triton.jit
def _place_of_keys(blocks, key_lists, early, seq_k, N: tl.constexpr, BLOCKS: tl.constexpr):
    """Return this program's batch and key/value head, in one number; its first key; and, with BLOCKS, its list's row.

    Programs go head by head, so that a head's queries stay in the L2 cache. But the `early` lists, the longest ones,
    come first for all heads.
    """
    program = tl.program_id(0)
    if BLOCKS:
        tiles: tl.constexpr = BLOCK // N
        # Programs of one head: of early lists, and of the rest; at least 1, because both divide below
        first, rest = tl.maximum(early * tiles, 1), tl.maximum((key_lists - early) * tiles, 1)
        later = program - tl.num_programs(0) // key_lists * early  # negative for programs of early lists
        bg = tl.where(later < 0, program // first, later // rest)
        tile = tl.where(later < 0, program % first, early * tiles + later % rest)
        row = tl.cdiv(seq_k, BLOCK) + tile // tiles
        block = tl.load(row_of_blocks(blocks, row, seq_k))
        return bg, block * BLOCK + tile % tiles * N, row
    else:
        tiles = tl.cdiv(seq_k, N)
        return program // tiles, program % tiles * N, program


@triton.jit
def _key_gradient_tiles(
    dk, dv, b_k, b_v, queries, start, stop, seen, scale_log2, dropout,
    M: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, BANDED: tl.constexpr, BLOCKS: tl.constexpr,
    DROPOUT: tl.constexpr, UPCAST: tl.constexpr, TMA: tl.constexpr, BOUNDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Run lines 10 to 16 of Algorithm 2 without dQ for the queries [start, stop), everything transposed: [N, M].

    dk, dv, b_k and b_v are [N, D]. If MASKED, each key is seen only by the queries [first, end), which `seen` holds; if
    not BANDED, end is seq_q. Keys past seq_k need no mask, because their rows of dK and dV are not stored.

    With dropout, P^T dO and dP^T are not divided by keep = 1 - dropout_p, and delta_kernel stored delta times keep. So
    dK and dV lack the factor keep_scale, which the caller applies.
    """
    q, dout, p_lse, p_delta, batch, head, s_q, s_do, seq_q = queries
    p_list, first, end = seen
    of_keys, p_of_queries, threshold = dropout
    N: tl.constexpr = b_k.shape[0]
    o_m = tl.arange(0, M)
    for at in tl.range(start, stop, M):
        m = row_at(p_list, at, BLOCKS)
        o_i = m + o_m
        b_q = load_rows(q, batch, head, s_q, m, seq_q, M, HEAD_DIM, D, BOUNDED, TMA)  # [M, D]
        b_do = load_rows(dout, batch, head, s_do, m, seq_q, M, HEAD_DIM, D, BOUNDED, TMA)  # [M, D]
        # S^T = K Q^T, dP^T = V dO^T  [N, M]: both before the exponential, which hides under the second
        b_st = dot(b_k, tl.trans(b_q), tl.zeros([N, M], tl.float32), UPCAST)
        b_dpt = dot(b_v, tl.trans(b_do), tl.zeros([N, M], tl.float32), UPCAST)
        if BOUNDED:
            b_lse = tl.load(p_lse + o_i, mask=o_i < seq_q, other=float("inf"))  # [M]; inf makes P zero past seq_q
            b_delta = tl.load(p_delta + o_i, mask=o_i < seq_q, other=0.0)
        else:
            b_lse = tl.load(p_lse + o_i)
            b_delta = tl.load(p_delta + o_i)
        # P^T = exp(S^T - logsumexp)
        b_pt = tl.math.exp2(b_st * scale_log2 - (b_lse * LOG2_E)[None, :])
        if MASKED:
            visible = o_i[None, :] >= first[:, None]
            if BANDED:
                visible = visible & (o_i[None, :] < end[:, None])
            b_pt = tl.where(visible, b_pt, 0.0)
        b_pt_kept = b_pt
        if DROPOUT:
            of_queries = random_numbers(p_of_queries, o_i, seq_q, BOUNDED, DROPOUT)
            kept = of_keys[:, None] * of_queries[None, :] >= threshold.to(tl.uint32, bitcast=True)
            b_pt_kept = tl.where(kept, b_pt, 0.0)
            b_dpt = tl.where(kept, b_dpt, 0.0)
        # dV += P^T dO  [N, D]
        dv = dot(to(b_pt_kept, b_do.dtype, UPCAST), b_do, dv, UPCAST)
        # dS^T = P^T o (dP^T - delta), dK += dS^T Q  [N, D]
        b_dst = b_pt * (b_dpt - b_delta[None, :])
        dk = dot(to(b_dst, b_q.dtype, UPCAST), b_q, dk, UPCAST)
    return dk, dv


@triton.jit
def key_gradient_kernel(
    q, k, v, dout, logsumexp, delta, dk, dv, pieces, numbers, documents, blocks,
    sq_b, sq_t, sq_h, sk_b, sk_t, sk_h, sv_b, sv_t, sv_h, sdo_b, sdo_t, sdo_h, sdk_b, sdk_t, sdk_h,
    heads, groups, seq_q, seq_k, window, scale, threshold, keep_scale, key_lists, early,
    M: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, BLOCKS: tl.constexpr,
    DROPOUT: tl.constexpr, UPCAST: tl.constexpr, TMA: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of Algorithm 2: one program owns N keys of one key/value head and sums over its query heads.

    dk and dv share their strides (B, seq_k, heads / groups, HEAD_DIM). BOUNDED: seq_q is not a multiple of M or, with
    BLOCKS, of a block. Grid: B * (heads / groups) * cdiv(seq_k, N) on axis 0; causal keys are longest at the start.

    With BLOCKS, each of the key_lists rows that block_lists.listed has for keys has BLOCK / N programs instead. A list
    in several rows is among the first `early` rows. Its programs write to pieces, which add_pieces_kernel adds.
    """
    kv_heads = heads // groups
    bg, j, row = _place_of_keys(blocks, key_lists, early, seq_k, N, BLOCKS)
    batch, kv_head = bg // kv_heads, bg % kv_heads
    offset = seq_k - seq_q
    o_n = tl.arange(0, N)
    k = at_head(k, batch, kv_head, sk_b, sk_h, TMA)
    v = at_head(v, batch, kv_head, sv_b, sv_h, TMA)
    b_k = load_rows(k, batch, kv_head, sk_t, j, seq_k, N, HEAD_DIM, D, True, TMA)  # [N, D]
    b_v = load_rows(v, batch, kv_head, sv_t, j, seq_k, N, HEAD_DIM, D, True, TMA)  # [N, D]

    # Queries: [start, stop) see some key of the tile, [full_start, full) see all of them
    BANDED: tl.constexpr = WINDOW or DOCUMENTS
    last = tl.minimum(j + N, seq_k) - 1
    # fmt: off
    start, full = queries_of(j, documents, batch, offset, seq_q, seq_k, window, CAUSAL, WINDOW, DOCUMENTS)
    full_start, stop = queries_of(last, documents, batch, offset, seq_q, seq_k, window, CAUSAL, WINDOW, DOCUMENTS)
    first, end = queries_of(j + o_n, documents, batch, offset, seq_q, seq_k, window, CAUSAL, WINDOW, DOCUMENTS)
    # fmt: on
    p_list, partial, kept = kept_blocks(blocks, row, seq_k, BLOCKS)
    if BLOCKS:
        start, full_start, full, stop = 0, partial, kept, kept
    start, full_start = tl.maximum(start, 0) // M * M, tl.cdiv(tl.maximum(full_start, 0), M) * M
    if BANDED:
        full = tl.maximum(full, 0) // M * M  # without a band, all queries from full_start on see all keys

    # Masked tiles at the start, unmasked tiles, masked tiles at the end, for each query head
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
        queries = (q_head, do_head, p_lse, p_delta, batch, head, sq_t, sdo_t, seq_q)
        seen = (p_list, first, end)
        dropout = (of_keys, p_of_queries, threshold)
        if CAUSAL or DOCUMENTS:
            b_dk, b_dv = _key_gradient_tiles(
                b_dk, b_dv, b_k, b_v, queries, start, tl.minimum(full_start, stop), seen, scale * LOG2_E,
                dropout, M, HEAD_DIM, D, BANDED, BLOCKS, DROPOUT, UPCAST, TMA, BOUNDED, True,
            )  # fmt: skip
        b_dk, b_dv = _key_gradient_tiles(
            b_dk, b_dv, b_k, b_v, queries, full_start, full, seen, scale * LOG2_E,
            dropout, M, HEAD_DIM, D, BANDED, BLOCKS, DROPOUT, UPCAST, TMA, BOUNDED, False,
        )  # fmt: skip
        if BANDED:
            b_dk, b_dv = _key_gradient_tiles(
                b_dk, b_dv, b_k, b_v, queries, tl.maximum(full, full_start), stop, seen, scale * LOG2_E,
                dropout, M, HEAD_DIM, D, BANDED, BLOCKS, DROPOUT, UPCAST, TMA, BOUNDED, True,
            )  # fmt: skip

    # Store dK and dV, or a piece of them
    b_dk, b_dv = b_dk * (scale * keep_scale), b_dv * keep_scale
    stored = seq_k
    if BLOCKS:
        whole = tl.load(row_of_blocks(blocks, row, seq_k) + 1) == 1
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
    """Return pointers to ROWS keys, from `start` on, of one head's dK in pieces (2, early, all_heads, BLOCK, D)."""
    o_rows, o_d = tl.arange(0, ROWS), tl.arange(0, D)
    first = ((tl.cast(row, tl.int64) * all_heads + bg) * BLOCK + start) * D
    return pieces + first + o_rows[:, None] * D + o_d[None, :]


@triton.jit
def add_pieces_kernel(
    pieces, dk, dv, blocks, sdk_b, sdk_t, sdk_h, kv_heads, seq_k, early,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of keys whose lists are in several rows: add their pieces (2, early, B * kv_heads, BLOCK, D) in
    order. Grid: early * B * kv_heads * BLOCK / ROWS on axis 0.
    """
    tiles: tl.constexpr = BLOCK // ROWS
    all_heads = tl.num_programs(0) // (early * tiles)
    place, start = tl.program_id(0) // tiles, tl.program_id(0) % tiles * ROWS
    row, bg = place // all_heads, place % all_heads
    p_row = row_of_blocks(blocks, tl.cdiv(seq_k, BLOCK) + row, seq_k)
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
