"""The part of the Hopper backward's consumers for one pair of tiles: S, P, dP, dS and the products of dK and dV.

Everything is transposed, [N, M]. dQ = dS K is in main_loop.py, since both paths share it.

Legend: M rows of a query tile, N rows of a key tile, D0 + D1 head size; i first query, j first key. A product of two
operands with parts 0 and 1 is x0 y0 + x1 y1.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.warpgroups import accumulator_layout, hide


@gluon.jit
def _transposed_product(x0, x1, y0, y1, zeros, D1: gl.constexpr):
    """Issue x y^T [N, M]; x [N, D0 + D1] in shared memory or registers, y [M, D0 + D1] in shared memory."""
    product = warpgroup_mma(x0, y0.permute([1, 0]), zeros, use_acc=False, is_async=True)
    if D1:
        product = warpgroup_mma(x1, y1.permute([1, 0]), product, is_async=True)
    return product


@gluon.jit
def add_product(x, y0, y1, z0, z1, D1: gl.constexpr, WARPS: gl.constexpr):
    """Issue z += x y [N, D0 + D1]; x [N, M], rounded, in registers, y [M, D0 + D1] in shared memory."""
    A0L: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(y0.shape[1], WARPS), 2)
    z0 = warpgroup_mma(gl.convert_layout(x, A0L), y0, z0, is_async=True)
    if D1:
        A1L: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(D1, WARPS), 2)
        z1 = warpgroup_mma(gl.convert_layout(x, A1L), y1, z1, is_async=True)
    return z0, z1


@gluon.jit
def ones_at(first: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return [ROWS, 16] bf16 with ones in the columns first to first + 2.

    Its product with the transpose of split_in_bf16's result is one statistic, repeated for all rows.
    """
    o_c = gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    ones = gl.full([ROWS, 16], 1.0, gl.float32, LAYOUT)
    return gl.where((o_c >= first) & (o_c < first + 3), ones, 0.0).to(gl.bfloat16)


@gluon.jit
def _mask(s_t, j, i, masked, CAUSAL: gl.constexpr, BANDED: gl.constexpr):
    """Return S^T [N, M] with -inf for hidden keys. Under the causal mask no query sees past seq_k."""
    _full, _full_end, seq_k, offset, first, end = masked
    if BANDED:
        return hide(hide(s_t, first - i, False), end - 1 - i, True)
    LAYOUT: gl.constexpr = s_t.type.layout
    o_n = gl.arange(0, s_t.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    if CAUSAL:
        return hide(s_t, o_n + (j - i - offset), False)
    else:
        return gl.where((j + o_n < seq_k)[:, None], s_t, float("-inf"))


@gluon.jit
def _probabilities(s_t, lse, j, i, masked, scale_log2, CAUSAL: gl.constexpr, BANDED: gl.constexpr):
    """Return P^T [N, M] of the queries from i on. Tiles with queries before `full` need the mask. If BANDED, so do
    tiles with queries from `full_end` on.

    masked: full, full_end, seq_k, seq_k - seq_q, and if BANDED first and end [N] of the queries that see each key.
    """
    full, full_end = masked[0], masked[1]
    hidden = i < full
    if BANDED:
        hidden = hidden | (i + s_t.shape[1] > full_end)
    if hidden:
        s_t = _mask(s_t, j, i, masked, CAUSAL, BANDED)
    return gl.exp2(s_t * scale_log2 - lse)


@gluon.jit
def whole_tile(
    keys, queries, stats_s, row, ds_s, q_full, q_phase, do_full, do_phase, dv, dv_1, ones,
    j, i, masked, scale_log2, dropout,
    SL: gl.constexpr, D1: gl.constexpr, WARPS: gl.constexpr, CAUSAL: gl.constexpr, BANDED: gl.constexpr,
    DROPOUT: gl.constexpr, FUSED: gl.constexpr,
):  # fmt: skip
    """Return dS^T [N, M] of a tile of queries, rounded, and dV with P^T dO issued. If FUSED, store dS^T to ds_s too.

    The statistics are in stats_s from `row` on. S and dP are issued before the exponential, which hides under dP. With
    one warpgroup, dS hides under P^T dO. Two warpgroups issue P^T dO after dS is stored (LATE), as FlashAttention-3
    does, so that exponentials and dS overlap and fit in the registers. Statistics IN_PRODUCTS take no registers and do
    not need this order.

    ones: the results of ones_at for logsumexp and delta. dropout: pointers to the numbers of the keys [N], their mask,
    and the threshold.
    """
    k0, k1, v0, v1 = keys  # [N, D]
    q0, q1, do0, do1 = queries  # [M, D]
    of_lse, of_delta = ones  # [N, 16]
    p_keys, mask, threshold = dropout
    M: gl.constexpr = q0.shape[0]
    PARTS: gl.constexpr = 2 if D1 else 1
    ROW: gl.constexpr = gl.SliceLayout(0, SL)
    dtype: gl.constexpr = q0.dtype
    IN_PRODUCTS: gl.constexpr = stats_s.dtype == gl.bfloat16
    LATE: gl.constexpr = FUSED and WARPS > 4 and not IN_PRODUCTS
    N: gl.constexpr = v0.shape[0]
    zeros = gl.zeros([N, M], gl.float32, SL)
    # S^T = K Q^T  [N, M]
    mbarrier.wait(q_full, q_phase)
    s_t = _transposed_product(k0, k1, q0, q1, zeros, D1)
    if IN_PRODUCTS:
        b_stats = stats_s.index(row).permute([1, 0])  # [16, M]
        s_t = warpgroup_mma(of_lse, b_stats, s_t, is_async=True)
    # dP^T = V dO^T  [N, M]
    mbarrier.wait(do_full, do_phase)
    dp_t = _transposed_product(v0, v1, do0, do1, zeros, D1)
    if IN_PRODUCTS:
        dp_t = warpgroup_mma(of_delta, b_stats, dp_t, is_async=True)
        s_t = warpgroup_mma_wait(2, deps=(s_t,))  # dP's two products may run: these heads have one part
        lse, delta = 0.0, 0.0
    else:
        s_t = warpgroup_mma_wait(PARTS, deps=(s_t,))
        # Load late: the products use these registers until S is done. The same holds for delta.
        lse = stats_s.index(row).reshape([M]).load(ROW)[None, :]
    # P^T = exp(S^T - logsumexp)  [N, M]
    p_t = _probabilities(s_t, lse, j, i, masked, scale_log2, CAUSAL, BANDED)
    if DROPOUT:
        of_keys = gl.load(p_keys, mask=mask, other=0)
        of_keys = of_keys.to(gl.uint32, bitcast=True)
        of_queries = stats_s.index(row + 2).reshape([M]).load(ROW).to(gl.uint32, bitcast=True)
        kept = of_keys[:, None] * of_queries[None, :] >= threshold.to(gl.uint32, bitcast=True)
        p_t = gl.where(kept, p_t, -p_t)  # from here on, the sign of P tells what is dropped
        p16 = gl.maximum(p_t, 0.0).to(dtype)
    else:
        p16 = p_t.to(dtype)
    # dV += P^T dO  [N, D]
    if not LATE:
        dv, dv_1 = add_product(p16, do0, do1, dv, dv_1, D1, WARPS)
    # dS^T = P^T o (dP^T - delta)  [N, M], or P^T o (0 - delta) where P is dropped
    dp_t = warpgroup_mma_wait(0 if LATE else PARTS, deps=(dp_t,))
    if not IN_PRODUCTS:
        delta = stats_s.index(row + 1).reshape([M]).load(ROW)[None, :]
    if DROPOUT:
        ds16 = (p_t * gl.where(p_t > 0.0, dp_t - delta, delta)).to(dtype)
    else:
        ds16 = (p_t * (dp_t - delta)).to(dtype)
    if FUSED:
        ds_s.store(ds16)
    if LATE:
        dv, dv_1 = add_product(p16, do0, do1, dv, dv_1, D1, WARPS)
    if FUSED:
        fence_async_shared()  # waits for the stores of dS; the tensor cores work meanwhile
    return ds16, dv, dv_1


@gluon.jit
def half_of(x, h: gl.constexpr):
    """Return half h of the rows of a tile in shared memory."""
    ROWS: gl.constexpr = x.shape[0] // 2
    return x.slice(h * ROWS, ROWS)


@gluon.jit
def _product_of_half(x0, x1, y0, y1, h: gl.constexpr, ones, stats, zeros, D1: gl.constexpr, IN_PRODUCTS: gl.constexpr):
    """Issue x y^T for half h of y's rows. IN_PRODUCTS, subtract a statistic of these rows."""
    product = _transposed_product(x0, x1, half_of(y0, h), half_of(y1, h), zeros, D1)
    if IN_PRODUCTS:
        product = warpgroup_mma(ones, half_of(stats, h).permute([1, 0]), product, is_async=True)
    return product


@gluon.jit
def _statistic(stats, row: gl.constexpr, h: gl.constexpr, SL: gl.constexpr, IN_PRODUCTS: gl.constexpr):
    """Return what remains to subtract from S or dP of half h: a statistic of its queries, [1, M / 2], or 0."""
    if IN_PRODUCTS:
        return 0.0
    else:
        return half_of(stats[row], h).load(gl.SliceLayout(0, SL))[None, :]


@gluon.jit
def both_halves(
    keys, queries, stats, ds_s, q_full, q_phase, do_full, do_phase, dk, dk_1, dv, dv_1, j, i, masked, scale_log2,
    SL: gl.constexpr, D1: gl.constexpr, WARPS: gl.constexpr, CAUSAL: gl.constexpr, BANDED: gl.constexpr,
    IN_PRODUCTS: gl.constexpr,
):  # fmt: skip
    """Return the second half's dS^T, rounded, and dK and dV; the caller issues dK += dS^T Q of the second half.

    The second half's softmax runs under products of both halves. M is half of the query tile here. stats: views of the
    tiles of logsumexp and delta, or the same tile twice if IN_PRODUCTS.
    """
    k0, k1, v0, v1 = keys  # [N, D]
    q0, q1, do0, do1 = queries  # [2 M, D]
    M: gl.constexpr = q0.shape[0] // 2
    N: gl.constexpr = k0.shape[0]
    PARTS: gl.constexpr = 2 if D1 else 1
    dtype: gl.constexpr = q0.dtype
    zeros = gl.zeros([N, M], gl.float32, SL)
    of_lse, of_delta = 0, 0
    if IN_PRODUCTS:
        of_lse = ones_at(0, N, gl.DotOperandLayout(0, SL, 2))
        of_delta = ones_at(3, N, gl.DotOperandLayout(0, SL, 2))
    S_PARTS: gl.constexpr = PARTS + 1 if IN_PRODUCTS else PARTS  # products of S, and of dP
    # First half: S^T = K Q^T, dP^T = V dO^T, P^T, dS^T  [N, M]
    mbarrier.wait(q_full, q_phase)
    s_t = _product_of_half(k0, k1, q0, q1, 0, of_lse, stats[0], zeros, D1, IN_PRODUCTS)
    mbarrier.wait(do_full, do_phase)
    dp_t = _product_of_half(v0, v1, do0, do1, 0, of_delta, stats[0], zeros, D1, IN_PRODUCTS)
    s_t = warpgroup_mma_wait(S_PARTS, deps=(s_t,))
    lse = _statistic(stats, 0, 0, SL, IN_PRODUCTS)
    p_t = _probabilities(s_t, lse, j, i, masked, scale_log2, CAUSAL, BANDED)
    p16 = p_t.to(dtype)
    dp_t = warpgroup_mma_wait(0, deps=(dp_t,))
    ds16 = (p_t * (dp_t - _statistic(stats, 1, 0, SL, IN_PRODUCTS))).to(dtype)
    ds_s.slice(0, M, 1).store(ds16)
    # First half's dV += P^T dO, second half's S^T and dP^T, first half's dK += dS^T Q
    dv, dv_1 = add_product(p16, half_of(do0, 0), half_of(do1, 0), dv, dv_1, D1, WARPS)
    s_t = _product_of_half(k0, k1, q0, q1, 1, of_lse, stats[0], zeros, D1, IN_PRODUCTS)
    dp_t = _product_of_half(v0, v1, do0, do1, 1, of_delta, stats[0], zeros, D1, IN_PRODUCTS)
    dk, dk_1 = add_product(ds16, half_of(q0, 0), half_of(q1, 0), dk, dk_1, D1, WARPS)
    # Second half: P^T, dS^T, dV += P^T dO
    s_t = warpgroup_mma_wait(S_PARTS + PARTS, deps=(s_t,))
    lse = _statistic(stats, 0, 1, SL, IN_PRODUCTS)
    p_t = _probabilities(s_t, lse, j, i + M, masked, scale_log2, CAUSAL, BANDED)
    p16 = p_t.to(dtype)
    dp_t = warpgroup_mma_wait(PARTS, deps=(dp_t,))
    ds16 = (p_t * (dp_t - _statistic(stats, 1, 1, SL, IN_PRODUCTS))).to(dtype)
    ds_s.slice(M, M, 1).store(ds16)
    dv, dv_1 = add_product(p16, half_of(do0, 1), half_of(do1, 1), dv, dv_1, D1, WARPS)
    fence_async_shared()  # for both halves of dS^T; waits for their stores; the tensor cores work meanwhile
    return ds16, dk, dk_1, dv, dv_1
