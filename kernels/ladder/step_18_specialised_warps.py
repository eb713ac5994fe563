"""Give the warps different jobs: one warp loads tiles by TMA, and two warpgroups multiply, with 64 keys each.

Expected: a quarter or more. The multiplying warps copy nothing, get 240 registers per thread, and wait for a product
    only before they use it. So exponentials run under the product of dP, and dQ leaves under the product of dK.
Counter: activity of the tensor pipe.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.hopper.gluon_versions import tma_add, tma_store
from kernels.hopper.warpgroups import blocks_of, release, ring
from kernels.ladder.delta import delta_of
from kernels.ladder.shared_tiles import load, store

LOG2_E, M, N = gl.constexpr(1.4426950408889634), gl.constexpr(64), gl.constexpr(128)  # M queries, N keys of a tile


@gluon.jit
def multiply(kv_s, qdo_s, stats_s, full, empty, row_q, row_k, column, steps, dq, dk, dv, scale, MASKED):
    """Keep dK and dV of N keys in registers and add to dQ. The first MASKED query tiles need the causal mask."""
    D: gl.constexpr = kv_s.shape[2]
    ST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, M, 16])  # layout of S^T [N, M]
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])  # of dK [N, D]
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])  # of dQ [M, D]
    A: gl.constexpr = gl.DotOperandLayout(0, DK, 2)  # of P^T and dS^T as operands in registers
    ds_s = gl.allocate_shared_memory(kv_s.dtype, [N, M], gl.NVMMASharedLayout.get_default_for([N, M], kv_s.dtype))
    dq_s = gl.allocate_shared_memory(gl.float32, [M, D], dq.layout)
    o_n, o_m = gl.arange(0, N, layout=gl.SliceLayout(1, ST)), gl.arange(0, M, layout=gl.SliceLayout(0, ST))
    b_dk, b_dv, k_s = gl.zeros([N, D], gl.float32, DK), gl.zeros([N, D], gl.float32, DK), kv_s.index(0)
    mbarrier.wait(full.index(2), 0)
    for t in range(steps):
        slot, b_q, b_do = t % 2, qdo_s.index(t % 2), qdo_s.index(2 + t % 2)  # [M, D]
        mbarrier.wait(full.index(slot), t // 2 & 1)
        # S^T = K Q^T, dP^T = V dO^T  [N, M]
        zeros = gl.zeros([N, M], gl.float32, ST)
        b_st = warpgroup_mma(k_s, b_q.permute([1, 0]), zeros, use_acc=False, is_async=True)
        b_dpt = warpgroup_mma(kv_s.index(1), b_do.permute([1, 0]), zeros, use_acc=False, is_async=True)
        b_st = warpgroup_mma_wait(1, deps=(b_st,))
        if t < MASKED:
            b_st = gl.where(t * M + o_m[None, :] >= o_n[:, None], b_st, -float("inf"))
        b_pt = gl.exp2(b_st * (scale * LOG2_E) - stats_s.index(slot).reshape([M]).load(gl.SliceLayout(0, ST))[None, :])
        # dV += P^T dO, dS^T = P^T o (dP^T - delta)
        b_dv = warpgroup_mma(gl.convert_layout(b_pt.to(kv_s.dtype), A), b_do, b_dv, is_async=True)
        b_dpt = warpgroup_mma_wait(1, deps=(b_dpt,))
        b_dst = b_pt * (b_dpt - stats_s.index(2 + slot).reshape([M]).load(gl.SliceLayout(0, ST))[None, :])
        tma.store_wait(0)  # before the barrier in `store`: dQ of the last tile has left shared memory
        store(b_dst.to(kv_s.dtype), ds_s)
        # dQ = dS K  [M, D], dK += dS^T Q  [N, D]
        b_dq = warpgroup_mma(ds_s.permute([1, 0]), k_s, gl.zeros([M, D], gl.float32, DQ), use_acc=False, is_async=True)
        b_dk = warpgroup_mma(gl.convert_layout(b_dst.to(kv_s.dtype), A), b_q, b_dk, is_async=True)
        b_dv, b_dq = warpgroup_mma_wait(1, deps=(b_dv, b_dq))
        store(b_dq * scale, dq_s)
        tma_add(dq, [row_q + t * M, column], dq_s)
        b_dk = warpgroup_mma_wait(0, deps=(b_dk,))
        release(empty.index(slot), True)
    store((b_dk * scale).to(kv_s.dtype), k_s)
    store(b_dv.to(kv_s.dtype), kv_s.index(1))
    tma_store(dk, [row_k, column], k_s)
    tma_store(dv, [row_k, column], kv_s.index(1))
    tma.store_wait(0)


@gluon.jit
def backward_kernel(q, k, v, dout, stats, dq, dk, dv, T, H, scale, D: gl.constexpr, CAUSAL: gl.constexpr):
    j, bh = gl.program_id(0) * N, gl.program_id(1)
    kv_s = gl.allocate_shared_memory(k.dtype, [2, N, D], k.layout)
    qdo_s = gl.allocate_shared_memory(q.dtype, [4, M, D], q.layout)
    stats_s = gl.allocate_shared_memory(gl.float32, [4, 1, M], stats.layout)
    full, empty = ring(3, 256)
    first, row = j if CAUSAL else 0, bh // H * T
    both = (kv_s, qdo_s, stats_s, full, empty, row + first, row + j, bh % H * D, (T - first) // M)
    results, inputs = (dq, dk, dv, scale, N // M if CAUSAL else 0), (q, k, v, dout, stats, 2 * bh, first)
    gl.warp_specialize([(multiply, both + results), (load, both + inputs)], [1], [24])


def backward(dout, q, k, v, out, logsumexp, causal):
    batch, length, heads, head_dim = q.shape
    dq, dk, dv = torch.zeros_like(out, dtype=torch.float32), torch.empty_like(out), torch.empty_like(out)
    stats = torch.stack((logsumexp * LOG2_E.value, delta_of(dout, out)), 2).view(-1, length)
    matrix, grid = (batch * length, heads * head_dim), (length // 128, batch * heads)
    q, dout = (blocks_of(x.view(matrix), 64, head_dim) for x in (q, dout))
    k, v, dk_t, dv_t = (blocks_of(x.view(matrix), 128, head_dim) for x in (k, v, dk, dv))
    dq_t = TensorDescriptor.from_tensor(dq.view(matrix), [64, head_dim], gl.NVMMASharedLayout(128, 32, 2))
    tensors, sizes = (q, k, v, dout, blocks_of(stats, 1, 64), dq_t, dk_t, dv_t), (length, heads, head_dim**-0.5)
    backward_kernel[grid](*tensors, *sizes, head_dim, causal, num_warps=8, maxnreg=168)
    return dq.to(dk.dtype), dk, dv
