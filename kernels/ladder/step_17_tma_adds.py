"""Add dQ through TMA, which reduces a whole tile in the L2 cache.

The threads write a tile of dQ to shared memory, and one of them starts a copy that adds instead of storing. The copy
engine computes the addresses and sends whole lines, and the warps go on at once.

Expected: a few percent, but nothing on an H100. A tile of 64 x 64 leaves by one instruction of one thread
    instead of 8 of each of 128 threads. The L2 cache adds the same number of bytes as before.
Counter: stores to shared memory, which rise and have bank conflicts. The bytes that the L2 cache adds stay the same.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

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
    """Compute dK and dV of N keys and add to dQ: loop over the queries that see the keys.

    dq describes a matrix (B * T, H * D), fp32.
    """
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
        dq.atomic_add([bh // H * T + i, bh % H * D], tl.dot(tl.trans(b_dst), b_k) * scale)
    tl.store(head_of(dk, T, H, H * D, D) + o_n[:, None] * (H * D), b_dk * scale)
    tl.store(head_of(dv, T, H, H * D, D) + o_n[:, None] * (H * D), b_dv)


def backward(dout, q, k, v, out, logsumexp, causal):
    (batch, length, heads, head_dim), delta = q.shape, delta_of(dout, out)
    dq, dk, dv = torch.zeros_like(out, dtype=torch.float32), torch.empty_like(out), torch.empty_like(out)
    sizes = length, heads, q.stride(1), head_dim**-0.5
    grid, m, n, warps = (length // 64, batch * heads), 64, 64, 4
    if head_dim == 128:
        grid, m, n, warps = (length // 128, batch * heads), 64, 128, 8
    dq_tiles = TensorDescriptor.from_tensor(dq.view(-1, heads * head_dim), [m, head_dim])
    tensors = q, k, v, dout, logsumexp, delta, dq_tiles, dk, dv
    backward_kernel[grid](*tensors, *sizes, m, n, head_dim, causal, num_warps=warps, num_stages=2)
    return dq.to(q.dtype), dk, dv
