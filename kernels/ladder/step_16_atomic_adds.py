"""Compute dK, dV and dQ in one kernel: the owner of a key tile adds its share of dQ to global memory.

S and dP are computed once for all three gradients: 5 products of a pair of tiles instead of 7. Many programs add to one
row of dQ, so they use atomics in fp32. The order of the additions differs from run to run. A last pass rounds the sum.

Expected: 7/5 of the speed of two kernels, less the cost of the atomics. On an H100, the cost is larger. A pair
    of 64 x 64 tiles adds 4,096 floats at head size 64. A thread adds four floats per instruction, so it issues 8
    instructions and computes 8 addresses. To get four neighbours, it exchanges its floats through shared memory.
Counter: throughput of the L2 cache, which executes the atomics, beside activity of the tensor pipe.
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
def backward_kernel(
    q, k, v, dout, logsumexp, delta, dq, dk, dv, T, H, stride, scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of N keys and add to dQ, which is fp32: loop over the queries that see the keys."""
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
        b_dst = (b_pt * (b_dpt - tl.load(delta + bh * T + o_m)[None, :])).to(b_q.dtype)
        b_dk = tl.dot(b_dst, b_q, b_dk)
        # dQ += dS K  [M, D], in global memory
        b_dq = tl.dot(tl.trans(b_dst), b_k)
        tl.atomic_add(head_of(dq, T, H, H * D, D) + o_m[:, None] * (H * D), b_dq * scale, sem="relaxed")
    tl.store(head_of(dk, T, H, H * D, D) + o_n[:, None] * (H * D), b_dk * scale)
    tl.store(head_of(dv, T, H, H * D, D) + o_n[:, None] * (H * D), b_dv)


def backward(dout, q, k, v, out, logsumexp, causal):
    (batch, length, heads, head_dim), delta = q.shape, delta_of(dout, out)
    dq, dk, dv = torch.zeros_like(out, dtype=torch.float32), torch.empty_like(out), torch.empty_like(out)
    sizes = length, heads, q.stride(1), head_dim**-0.5
    grid, m, n, warps = (length // 64, batch * heads), 64, 64, 4
    if head_dim == 128:
        grid, m, n, warps = (length // 128, batch * heads), 64, 128, 8
    tensors = q, k, v, dout, logsumexp, delta, dq, dk, dv
    backward_kernel[grid](*tensors, *sizes, m, n, head_dim, causal, num_warps=warps, num_stages=2)
    return dq.to(q.dtype), dk, dv
