"""The plain backward kernels that own queries: delta = rowsum(dO o O), and dQ.

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
from kernels.flash2.triton_kernels.common import keys_of_tile, row_at


@triton.jit
def delta_kernel(
    out, dout, dlogsumexp, delta, so_b, so_t, so_h, sdo_b, sdo_t, sdo_h, heads, seq_q, keep,
    M: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, LOGSUMEXP: tl.constexpr,
):  # fmt: skip
    """Run line 4 of Algorithm 2: delta = rowsum(dO o O), (B, heads, seq_q) fp32. Grid: B * heads * cdiv(seq_q, M).

    If LOGSUMEXP, subtract its gradient, shaped like delta: dS = P o (dP - delta + dL). With dropout dP is Z o dP / keep
    with Z = 0 or 1 and keep = 1 - dropout_p. delta is stored times keep, so that the other kernels divide by keep once,
    at their end.
    """
    tiles = tl.cdiv(seq_q, M)
    bh = tl.program_id(0) // tiles
    i = tl.program_id(0) % tiles * M
    batch, head = bh // heads, bh % heads
    o_m = tl.arange(0, M)
    p_out, p_dout = head_of(out, batch, head, so_b, so_h), head_of(dout, batch, head, sdo_b, sdo_h)
    b_out = load_rows(p_out, batch, head, so_t, i, seq_q, M, HEAD_DIM, D, True, False)  # [M, D]
    b_dout = load_rows(p_dout, batch, head, sdo_t, i, seq_q, M, HEAD_DIM, D, True, False)  # [M, D]
    b_delta = tl.sum(b_out.to(tl.float32) * b_dout.to(tl.float32), 1)
    row = tl.cast(bh, tl.int64) * seq_q + i + o_m
    if LOGSUMEXP:
        b_delta -= tl.load(dlogsumexp + row, mask=i + o_m < seq_q, other=0.0)
    tl.store(delta + row, b_delta * keep, mask=i + o_m < seq_q)


@triton.jit
def _query_gradient_tiles(
    dq, b_q, b_do, b_lse, b_delta, keys, start, stop, seen, scale_log2, dropout,
    N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, BANDED: tl.constexpr, BLOCKS: tl.constexpr,
    DROPOUT: tl.constexpr, UPCAST: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Run lines 10, 11 and 13 to 15 of Algorithm 2, those for dQ, over the keys [start, stop).

    dq, b_q and b_do are [M, D]; b_lse, natural, and b_delta are [M]. The mask is as in the forward kernel.
    """
    k, v, batch, kv_head, s_k, s_v, seq_k = keys
    p_list, first, end = seen
    of_queries, p_of_keys, threshold = dropout
    M: tl.constexpr = b_q.shape[0]
    o_n = tl.arange(0, N)
    for at in tl.range(start, stop, N):
        n = row_at(p_list, at, BLOCKS)
        o_j = n + o_n
        b_k = load_rows(k, batch, kv_head, s_k, n, seq_k, N, HEAD_DIM, D, MASKED, TMA)  # [N, D]
        b_v = load_rows(v, batch, kv_head, s_v, n, seq_k, N, HEAD_DIM, D, MASKED, TMA)  # [N, D]
        # S = Q K^T, dP = dO V^T  [M, N]
        b_s = dot(b_q, tl.trans(b_k), tl.zeros([M, N], tl.float32), UPCAST)
        b_dp = dot(b_do, tl.trans(b_v), tl.zeros([M, N], tl.float32), UPCAST)
        # P = exp(S - logsumexp)
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
        # dS = P o (dP - delta), dQ += dS K  [M, D]
        b_ds = b_p * (b_dp - b_delta[:, None])
        dq = dot(to(b_ds, b_k.dtype, UPCAST), b_k, dq, UPCAST)
    return dq


@triton.jit
def query_gradient_kernel(
    q, k, v, dout, logsumexp, delta, dq, numbers, documents, blocks,
    sq_b, sq_t, sq_h, sk_b, sk_t, sk_h, sv_b, sv_t, sv_h, sdo_b, sdo_t, sdo_h, sdq_b, sdq_t, sdq_h,
    heads, groups, seq_q, seq_k, window, scale, threshold, keep_scale,
    M: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, BLOCKS: tl.constexpr,
    DROPOUT: tl.constexpr, UPCAST: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Compute dQ of Algorithm 2: one program owns M queries, so dQ needs no atomics. Grid as in the forward kernel."""
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
    b_q = load_rows(q, batch, head, sq_t, i, seq_q, M, HEAD_DIM, D, True, TMA)  # [M, D]
    b_do = load_rows(dout, batch, head, sdo_t, i, seq_q, M, HEAD_DIM, D, True, TMA)  # [M, D]
    row = tl.cast(bh, tl.int64) * seq_q + i + o_m
    b_lse = tl.load(logsumexp + row, mask=i + o_m < seq_q, other=float("inf"))  # [M]
    b_delta = tl.load(delta + row, mask=i + o_m < seq_q, other=0.0)  # [M]

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
    b_dq = tl.zeros([M, D], tl.float32)
    BANDED: tl.constexpr = WINDOW or DOCUMENTS
    if BANDED:
        b_dq = _query_gradient_tiles(
            b_dq, b_q, b_do, b_lse, b_delta, keys, tl.maximum(start, 0) // N * N, tl.minimum(full_start, stop), seen,
            scale * LOG2_E, dropout, N, HEAD_DIM, D, BANDED, BLOCKS, DROPOUT, UPCAST, TMA, True,
        )  # fmt: skip
    b_dq = _query_gradient_tiles(
        b_dq, b_q, b_do, b_lse, b_delta, keys, full_start, full, seen,
        scale * LOG2_E, dropout, N, HEAD_DIM, D, BANDED, BLOCKS, DROPOUT, UPCAST, TMA, False,
    )  # fmt: skip
    b_dq = _query_gradient_tiles(
        b_dq, b_q, b_do, b_lse, b_delta, keys, tl.maximum(full, full_start), stop, seen,
        scale * LOG2_E, dropout, N, HEAD_DIM, D, BANDED, BLOCKS, DROPOUT, UPCAST, TMA, True,
    )  # fmt: skip
    store_rows(
        head_of(dq, batch, head, sdq_b, sdq_h), sdq_t, i, seq_q, o_m, b_dq * (scale * keep_scale), HEAD_DIM, D, UPCAST
    )
