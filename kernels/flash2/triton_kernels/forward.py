"""The plain forward kernel: O and the logsumexp.

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
    random_numbers,
    store_rows,
)
from kernels.common.rounding import to
from kernels.flash2.triton_kernels.common import keys_of_tile, natural_logsumexp, row_at


@triton.jit
def _forward_tiles(
    acc, m, l, b_q, keys, start, stop, seen, scale_log2, dropout,
    N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, BANDED: tl.constexpr, BLOCKS: tl.constexpr,
    DROPOUT: tl.constexpr, UPCAST: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Run lines 7 to 11 of Algorithm 1 over the keys [start, stop): online softmax, O not yet normalised.

    acc [M, D] is O, m [M] the row maxima of S scale_log2, l [M] the row sums of P, b_q [M, D] is Q. If MASKED, each
    query sees only the keys [first, end), which `seen` holds; if not BANDED, first is 0. Only masked tiles may reach
    past seq_k, so only they check bounds.
    """
    k, v, batch, kv_head, s_k, s_v, seq_k = keys
    p_list, first, end = seen
    of_queries, p_of_keys, threshold = dropout
    M: tl.constexpr = b_q.shape[0]
    o_n = tl.arange(0, N)
    for at in tl.range(start, stop, N):
        n = row_at(p_list, at, BLOCKS)
        o_j = n + o_n
        # S = Q K^T  [M, N]
        b_k = load_rows(k, batch, kv_head, s_k, n, seq_k, N, HEAD_DIM, D, MASKED, TMA)  # [N, D]
        b_s = dot(b_q, tl.trans(b_k), tl.zeros([M, N], tl.float32), UPCAST)
        if MASKED:
            visible = o_j[None, :] < end[:, None]
            if BANDED:
                visible = visible & (o_j[None, :] >= first[:, None])
            b_s = tl.where(visible, b_s, float("-inf"))
        # softmax
        m_new = tl.maximum(m, tl.max(b_s, 1) * scale_log2)  # [M]
        if MASKED:
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf is NaN: no key seen yet
        else:
            shift = m_new
        b_p = tl.math.exp2(b_s * scale_log2 - shift[:, None])  # [M, N]
        alpha = tl.math.exp2(m - shift)
        l = l * alpha + tl.sum(b_p, 1)
        if DROPOUT:
            of_keys = random_numbers(p_of_keys, o_j, seq_k, MASKED, DROPOUT)
            b_p = tl.where(of_queries[:, None] * of_keys[None, :] >= threshold.to(tl.uint32, bitcast=True), b_p, 0.0)
        # O = alpha O + P V  [M, D]
        b_v = load_rows(v, batch, kv_head, s_v, n, seq_k, N, HEAD_DIM, D, MASKED, TMA)  # [N, D]
        acc = dot(to(b_p, b_v.dtype, UPCAST), b_v, acc * alpha[:, None], UPCAST)
        m = m_new
    return acc, m, l


@triton.jit
def forward_kernel(
    q, k, v, out, logsumexp, numbers, documents, blocks,
    sq_b, sq_t, sq_h, sk_b, sk_t, sk_h, sv_b, sv_t, sv_h, so_b, so_t, so_h,
    heads, groups, seq_q, seq_k, window, scale, threshold, keep_scale,
    M: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, BLOCKS: tl.constexpr,
    DROPOUT: tl.constexpr, UPCAST: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Run Algorithm 1: one program computes M rows of O and of the logsumexp.

    q, out (B, seq_q, heads, HEAD_DIM), k, v (B, seq_k, heads / groups, HEAD_DIM) with unit stride along HEAD_DIM;
    logsumexp (B, heads, seq_q) fp32, natural. If WINDOW, a query sees the last `window` of its keys. If DOCUMENTS, it
    sees the keys of its document; documents (B, 2, seq_q) int32 holds where that starts and ends.
    Grid: B * heads * cdiv(seq_q, M) on axis 0.
    """
    tiles = tl.cdiv(seq_q, M)
    bh = tl.program_id(0) // tiles
    i = (tiles - 1 - tl.program_id(0) % tiles) * M  # longest first: causal rows are longest at the end
    batch, head = bh // heads, bh % heads
    offset = seq_k - seq_q
    o_m = tl.arange(0, M)
    kv_head = head // groups
    k = at_head(k, batch, kv_head, sk_b, sk_h, TMA)
    v = at_head(v, batch, kv_head, sv_b, sv_h, TMA)
    q = at_head(q, batch, head, sq_b, sq_h, TMA)
    b_q = load_rows(q, batch, head, sq_t, i, seq_q, M, HEAD_DIM, D, True, TMA)  # [M, D]

    # Some query sees the keys [start, stop), all queries see [full_start, full)
    start, full_start, full, stop, seen = keys_of_tile(
        i, o_m, documents, blocks, batch, offset, seq_q, seq_k, window, CAUSAL, WINDOW, DOCUMENTS, BLOCKS
    )
    p_of_queries, p_of_keys = numbers_of_head(numbers, bh, seq_q, seq_k, DROPOUT)
    of_queries = random_numbers(p_of_queries, i + o_m, seq_q, True, DROPOUT)
    dropout = (of_queries, p_of_keys, threshold)
    keys = (k, v, batch, kv_head, sk_t, sv_t, seq_k)
    # Tiles without a mask are whole ones inside [full_start, full)
    full, full_start = tl.maximum(full, 0) // N * N, tl.cdiv(tl.maximum(full_start, 0), N) * N

    # Masked tiles at the start, unmasked tiles, masked tiles at the end
    acc = tl.zeros([M, D], tl.float32)
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)
    BANDED: tl.constexpr = WINDOW or DOCUMENTS
    if BANDED:
        acc, m, l = _forward_tiles(
            acc, m, l, b_q, keys, tl.maximum(start, 0) // N * N, tl.minimum(full_start, stop), seen, scale * LOG2_E,
            dropout, N, HEAD_DIM, D, BANDED, BLOCKS, DROPOUT, UPCAST, TMA, True,
        )  # fmt: skip
    acc, m, l = _forward_tiles(
        acc, m, l, b_q, keys, full_start, full, seen, scale * LOG2_E,
        dropout, N, HEAD_DIM, D, BANDED, BLOCKS, DROPOUT, UPCAST, TMA, False,
    )  # fmt: skip
    acc, m, l = _forward_tiles(
        acc, m, l, b_q, keys, tl.maximum(full, full_start), stop, seen, scale * LOG2_E,
        dropout, N, HEAD_DIM, D, BANDED, BLOCKS, DROPOUT, UPCAST, TMA, True,
    )  # fmt: skip

    # O / l, and the logsumexp
    b_out = acc * (keep_scale / tl.where(l == 0.0, 1.0, l))[:, None]
    store_rows(head_of(out, batch, head, so_b, so_h), so_t, i, seq_q, o_m, b_out, HEAD_DIM, D, UPCAST)
    p_lse = logsumexp + tl.cast(bh, tl.int64) * seq_q + i + o_m
    tl.store(p_lse, natural_logsumexp(m, l), mask=i + o_m < seq_q)
