"""Compute dK and dV in one kernel and dQ in another: FlashAttention-2's Algorithm 2, split in two.

dK and dV are sums over queries, and dQ is a sum over keys. A program owns a tile of a sum, adds it up on chip and
writes it once. The price: both kernels compute S and dP, so a pair of tiles takes 7 products instead of 5.

Expected: 5/7 of the speed that 5 products would have at the same use of the tensor cores. The kernels need no
    atomics: a program writes each result once, and every run gives the same bits.
Counter: activity of the tensor pipe. It counts 7 products per pair of tiles, the TFLOP/s of a backward pass count 5.
"""

import torch
import triton
import triton.language as tl

from kernels.ladder.delta import delta_of

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def head_of(x, T, H, stride, D: tl.constexpr):
    """Return pointers to the first row of this program's head, [1, D]. Rows are `stride` apart, heads are D apart."""
    bh = tl.program_id(1)
    return x + (bh // H).to(tl.int64) * T * stride + bh % H * D + tl.arange(0, D)[None, :]


@triton.jit
def key_kernel(
    q, k, v, dout, logsumexp, delta, dk, dv, T, H, stride, scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of N keys: loop over the queries that see them."""
    j, bh = tl.program_id(0) * N, tl.program_id(1)
    o_n = j + tl.arange(0, N)
    b_k = tl.load(head_of(k, T, H, stride, D) + o_n[:, None] * stride)  # [N, D]
    b_v = tl.load(head_of(v, T, H, stride, D) + o_n[:, None] * stride)  # [N, D]
    b_dk, b_dv = tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32)
    for i in range(j // M * M if CAUSAL else 0, T, M):
        o_m = i + tl.arange(0, M)
        b_q = tl.load(head_of(q, T, H, stride, D) + o_m[:, None] * stride)  # [M, D]
        b_do = tl.load(head_of(dout, T, H, H * D, D) + o_m[:, None] * (H * D))  # [M, D]
        b_lse = tl.load(logsumexp + bh * T + o_m) * LOG2_E  # here: after S, the exponentials would wait for it
        # S^T = K Q^T, dP^T = V dO^T  [N, M]: both before the exponentials, which run under the second product
        b_st = tl.dot(b_k, tl.trans(b_q))
        b_dpt = tl.dot(b_v, tl.trans(b_do))
        b_pt = tl.exp2(b_st * (scale * LOG2_E) - b_lse[None, :])
        if CAUSAL:
            b_pt = tl.where(o_m[None, :] >= o_n[:, None], b_pt, 0.0)
        # dV += P^T dO  [N, D]
        b_dv = tl.dot(b_pt.to(b_do.dtype), b_do, b_dv)
        # dS^T = P^T o (dP^T - delta), dK += dS^T Q  [N, D]
        b_dst = b_pt * (b_dpt - tl.load(delta + bh * T + o_m)[None, :])
        b_dk = tl.dot(b_dst.to(b_q.dtype), b_q, b_dk)
    tl.store(head_of(dk, T, H, H * D, D) + o_n[:, None] * (H * D), b_dk * scale)
    tl.store(head_of(dv, T, H, H * D, D) + o_n[:, None] * (H * D), b_dv)


@triton.jit
def query_kernel(
    q, k, v, dout, logsumexp, delta, dq, T, H, stride, scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Compute dQ of M queries: loop over the keys that they see. Program 0 has the last queries, the longest loop."""
    i, bh = (tl.num_programs(0) - 1 - tl.program_id(0)) * M, tl.program_id(1)
    o_m = i + tl.arange(0, M)
    b_q = tl.load(head_of(q, T, H, stride, D) + o_m[:, None] * stride)  # [M, D]
    b_do = tl.load(head_of(dout, T, H, H * D, D) + o_m[:, None] * (H * D))  # [M, D]
    b_lse, b_delta = tl.load(logsumexp + bh * T + o_m) * LOG2_E, tl.load(delta + bh * T + o_m)
    b_dq = tl.zeros([M, D], tl.float32)
    for j in range(0, i + M if CAUSAL else T, N):
        o_n = j + tl.arange(0, N)
        b_k = tl.load(head_of(k, T, H, stride, D) + o_n[:, None] * stride)  # [N, D]
        b_v = tl.load(head_of(v, T, H, stride, D) + o_n[:, None] * stride)  # [N, D]
        # S = Q K^T, dP = dO V^T, P = exp(S - logsumexp), dQ += dS K  [M, D]
        b_s, b_dp = tl.dot(b_q, tl.trans(b_k)), tl.dot(b_do, tl.trans(b_v))  # [M, N]
        b_p = tl.exp2(b_s * (scale * LOG2_E) - b_lse[:, None])
        if CAUSAL:
            b_p = tl.where(o_m[:, None] >= o_n[None, :], b_p, 0.0)
        b_dq = tl.dot((b_p * (b_dp - b_delta[:, None])).to(b_k.dtype), b_k, b_dq)
    tl.store(head_of(dq, T, H, H * D, D) + o_m[:, None] * (H * D), b_dq * scale)


def backward(dout, q, k, v, out, logsumexp, causal):
    (batch, length, heads, head_dim), delta = q.shape, delta_of(dout, out)
    dq, dk, dv = (torch.empty_like(out) for _ in range(3))
    inputs, sizes = (q, k, v, dout, logsumexp, delta), (length, heads, q.stride(1), head_dim**-0.5)
    grid, m = (length // 64, batch * heads), 64 if head_dim == 64 else 32
    key_kernel[grid](*inputs, dk, dv, *sizes, m, 64, head_dim, causal, num_warps=4, num_stages=3)
    query_kernel[grid](*inputs, dq, *sizes, 64, 64, head_dim, causal, num_warps=4, num_stages=3)
    return dq, dk, dv
