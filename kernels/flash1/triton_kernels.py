"""FlashAttention in Triton, forward and backward, as in the first paper.

Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness" (2022), Algorithms 1, 2 and 4.
One program owns one head, so only batch and heads fill the GPU. It loops over tiles of K and V, and inside over the
tiles of Q that see any of them. The program reads and rewrites O, l and m of a query tile (dQ in the backward pass) in
memory for every key tile. O and dQ are summed in fp32. The softmax is computed in base 2.

M rows of a query tile (the paper's B_r), N rows of a key tile (B_c), D head size padded to a power of two; other names
as in kernels/common/head_rows.py.
"""

import triton
import triton.language as tl

from kernels.common.head_rows import (
    LOG2_E,
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


@triton.jit
def _queries_that_see(
    j, documents, batch, seq_q, seq_k, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr
):
    """Return start, a multiple of M, and stop of the queries that may see any of the keys j to j + N."""
    last, offset = tl.minimum(j + N, seq_k) - 1, seq_k - seq_q
    start, _ = queries_of(j, documents, batch, offset, seq_q, seq_k, 0, CAUSAL, False, DOCUMENTS)
    _, stop = queries_of(last, documents, batch, offset, seq_q, seq_k, 0, CAUSAL, False, DOCUMENTS)
    return tl.maximum(start, 0) // M * M, stop


@triton.jit
def _visible(o_i, o_j, documents, batch, seq_q, seq_k, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Return which keys each query sees, [M, N]."""
    first, end = keys_of(o_i, documents, batch, seq_k - seq_q, seq_q, seq_k, 0, CAUSAL, False, DOCUMENTS)
    visible = o_j[None, :] < end[:, None]
    if DOCUMENTS:
        visible = visible & (o_j[None, :] >= first[:, None])
    return visible


@triton.jit
def forward_kernel(
    q, k, v, out, l, m, numbers, documents,
    sq_b, sq_t, sq_h, sk_b, sk_t, sk_h, sv_b, sv_t, sv_h, so_b, so_t, so_h,
    heads, groups, seq_q, seq_k, scale, threshold, keep_scale,
    M: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, DROPOUT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Run Algorithm 1 for one head. Grid: B * heads.

    The caller fills out (B, seq_q, heads, HEAD_DIM) and l (B, heads, seq_q) with 0, and m (B, heads, seq_q) with -inf.
    All three are fp32; m is in base 2.
    """
    bh = tl.program_id(0)
    batch, head = bh // heads, bh % heads
    o_m, o_n = tl.arange(0, M), tl.arange(0, N)
    p_q, p_out = head_of(q, batch, head, sq_b, sq_h), head_of(out, batch, head, so_b, so_h)
    p_k = head_of(k, batch, head // groups, sk_b, sk_h)
    p_v = head_of(v, batch, head // groups, sv_b, sv_h)
    p_l, p_m = l + tl.cast(bh, tl.int64) * seq_q, m + tl.cast(bh, tl.int64) * seq_q
    p_of_queries, p_of_keys = numbers_of_head(numbers, bh, seq_q, seq_k, DROPOUT)
    for j in tl.range(0, seq_k, N):
        b_k = load_rows(p_k, batch, head, sk_t, j, seq_k, N, HEAD_DIM, D, True, False)  # [N, D]
        b_v = load_rows(p_v, batch, head, sv_t, j, seq_k, N, HEAD_DIM, D, True, False)  # [N, D]
        of_keys = random_numbers(p_of_keys, j + o_n, seq_k, True, DROPOUT)
        start, stop = _queries_that_see(j, documents, batch, seq_q, seq_k, M, N, CAUSAL, DOCUMENTS)
        for i in tl.range(start, stop, M):
            o_i = i + o_m
            b_q = load_rows(p_q, batch, head, sq_t, i, seq_q, M, HEAD_DIM, D, True, False)  # [M, D]
            # S = Q K^T [M, N]
            b_s = dot(b_q, tl.trans(b_k), tl.zeros([M, N], tl.float32), UPCAST) * (scale * LOG2_E)
            visible = _visible(o_i, j + o_n, documents, batch, seq_q, seq_k, CAUSAL, DOCUMENTS)
            b_s = tl.where(visible, b_s, float("-inf"))
            # P = exp(S - m_new), l = exp(m_old - m_new) l_old + rowsum(P)
            m_old = tl.load(p_m + o_i, mask=o_i < seq_q, other=float("-inf"))
            l_old = tl.load(p_l + o_i, mask=o_i < seq_q, other=0.0)
            m_new = tl.maximum(m_old, tl.max(b_s, 1))
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # for a row that has seen no key yet
            b_p = tl.math.exp2(b_s - shift[:, None])
            l_old *= tl.math.exp2(m_old - shift)
            l_new = l_old + tl.sum(b_p, 1)
            if DROPOUT:
                of_queries = random_numbers(p_of_queries, o_i, seq_q, True, DROPOUT)
                kept = of_queries[:, None] * of_keys[None, :] >= threshold.to(tl.uint32, bitcast=True)
                b_p = tl.where(kept, b_p * keep_scale, 0.0)
            # O = (exp(m_old - m_new) l_old O + P V) / l_new [M, D]
            b_out = load_rows(p_out, batch, head, so_t, i, seq_q, M, HEAD_DIM, D, True, False) * l_old[:, None]
            b_out = dot(to(b_p, b_v.dtype, UPCAST), b_v, b_out, UPCAST)
            b_out = b_out / tl.where(l_new == 0.0, 1.0, l_new)[:, None]
            store_rows(p_out, so_t, i, seq_q, o_m, b_out, HEAD_DIM, D, UPCAST)
            tl.store(p_l + o_i, l_new, mask=o_i < seq_q)
            tl.store(p_m + o_i, m_new, mask=o_i < seq_q)
        tl.debug_barrier()  # the next key tile reads rows that other threads wrote


@triton.jit
def backward_kernel(
    q, k, v, dout, out, l, m, dq, dk, dv, numbers, documents,
    sq_b, sq_t, sq_h, sk_b, sk_t, sk_h, sv_b, sv_t, sv_h,
    sdo_b, sdo_t, sdo_h, so_b, so_t, so_h, sdk_b, sdk_t, sdk_h,
    heads, groups, seq_q, seq_k, scale, threshold, keep_scale,
    M: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, DROPOUT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Run Algorithm 4 for one key/value head and the query heads of its group. Grid: B * heads / groups.

    l and m are forward_kernel's, and out is rounded to q's dtype. The caller fills dq (B, seq_q, heads, HEAD_DIM) fp32
    with 0. dq has the strides of out, and dv has the strides of dk.
    """
    kv_heads = heads // groups
    batch, kv_head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    o_m, o_n = tl.arange(0, M), tl.arange(0, N)
    p_k, p_v = head_of(k, batch, kv_head, sk_b, sk_h), head_of(v, batch, kv_head, sv_b, sv_h)
    p_dk, p_dv = head_of(dk, batch, kv_head, sdk_b, sdk_h), head_of(dv, batch, kv_head, sdk_b, sdk_h)
    for j in tl.range(0, seq_k, N):
        b_k = load_rows(p_k, batch, kv_head, sk_t, j, seq_k, N, HEAD_DIM, D, True, False)  # [N, D]
        b_v = load_rows(p_v, batch, kv_head, sv_t, j, seq_k, N, HEAD_DIM, D, True, False)  # [N, D]
        start, stop = _queries_that_see(j, documents, batch, seq_q, seq_k, M, N, CAUSAL, DOCUMENTS)
        b_dk, b_dv = tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32)
        for g in range(groups):
            head = kv_head * groups + g
            bh = batch * heads + head
            p_q, p_dout = head_of(q, batch, head, sq_b, sq_h), head_of(dout, batch, head, sdo_b, sdo_h)
            p_out, p_dq = head_of(out, batch, head, so_b, so_h), head_of(dq, batch, head, so_b, so_h)
            p_l, p_m = l + tl.cast(bh, tl.int64) * seq_q, m + tl.cast(bh, tl.int64) * seq_q
            p_of_queries, p_of_keys = numbers_of_head(numbers, bh, seq_q, seq_k, DROPOUT)
            of_keys = random_numbers(p_of_keys, j + o_n, seq_k, True, DROPOUT)
            for i in tl.range(start, stop, M):
                o_i = i + o_m
                b_q = load_rows(p_q, batch, head, sq_t, i, seq_q, M, HEAD_DIM, D, True, False)
                b_do = load_rows(p_dout, batch, head, sdo_t, i, seq_q, M, HEAD_DIM, D, True, False)
                b_out = load_rows(p_out, batch, head, so_t, i, seq_q, M, HEAD_DIM, D, True, False)
                b_m = tl.load(p_m + o_i, mask=o_i < seq_q, other=float("inf"))
                b_l = tl.load(p_l + o_i, mask=o_i < seq_q, other=1.0)
                # P = exp(Q K^T - m) / l [M, N]
                b_s = dot(b_q, tl.trans(b_k), tl.zeros([M, N], tl.float32), UPCAST) * (scale * LOG2_E)
                b_p = tl.math.exp2(b_s - b_m[:, None]) / b_l[:, None]
                b_p = tl.where(_visible(o_i, j + o_n, documents, batch, seq_q, seq_k, CAUSAL, DOCUMENTS), b_p, 0.0)
                # dP = dO V^T [M, N]
                b_dp = dot(b_do, tl.trans(b_v), tl.zeros([M, N], tl.float32), UPCAST)
                b_kept = b_p
                if DROPOUT:
                    of_queries = random_numbers(p_of_queries, o_i, seq_q, True, DROPOUT)
                    kept = of_queries[:, None] * of_keys[None, :] >= threshold.to(tl.uint32, bitcast=True)
                    b_kept, b_dp = tl.where(kept, b_p * keep_scale, 0.0), tl.where(kept, b_dp * keep_scale, 0.0)
                # dV += P^T dO [N, D]
                b_dv = dot(tl.trans(to(b_kept, b_do.dtype, UPCAST)), b_do, b_dv, UPCAST)
                # dS = P o (dP - rowsum(dO o O)) [M, N]
                b_delta = tl.sum(b_do.to(tl.float32) * b_out.to(tl.float32), 1)
                b_ds = to(b_p * (b_dp - b_delta[:, None]) * scale, b_q.dtype, UPCAST)
                # dQ += dS K [M, D], dK += dS^T Q [N, D]
                b_dq = load_rows(p_dq, batch, head, so_t, i, seq_q, M, HEAD_DIM, D, True, False)
                store_rows(p_dq, so_t, i, seq_q, o_m, dot(b_ds, b_k, b_dq, UPCAST), HEAD_DIM, D, UPCAST)
                b_dk = dot(tl.trans(b_ds), b_q, b_dk, UPCAST)
        store_rows(p_dk, sdk_t, j, seq_k, o_n, b_dk, HEAD_DIM, D, UPCAST)
        store_rows(p_dv, sdk_t, j, seq_k, o_n, b_dv, HEAD_DIM, D, UPCAST)
        tl.debug_barrier()  # the next key tile reads rows of dQ that other threads wrote
