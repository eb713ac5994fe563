"""Give the copies to a warp of their own, and let two warpgroups share the keys.

A producer warp waits for a free slot of a ring and copies the next tile of K and V. Two consumer warpgroups compute 64
queries each, and free the slots. While one consumer computes its softmax, the other one can multiply. The tiles have
128 keys instead of 64, and a consumer keeps Q in registers.

Expected: up to 1.1 times the speed at head size 128. At 64, a loss: a multiprocessor has room for 1 program, not 5.
Counter: tensor pipe activity; bytes read from L2, which halve.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.hopper.gluon_versions import tma_load
from kernels.hopper.warpgroups import release, ring

M: gl.constexpr = gl.constexpr(64)  # queries of a consumer
N: gl.constexpr = gl.constexpr(128)  # queries of a program, and keys of a tile
PRODUCT: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # warps split rows
A: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, PRODUCT.value, 2))


@gluon.jit
def producer(q, k, v, q_tile, k_tiles, v_tiles, full, empty, row, column, i, stop):
    """Copy Q, then each tile of K and V as soon as both consumers have left its slot."""
    mbarrier.expect(full.index(2), q.block_type.nbytes)
    tma_load(q, [row + i, column], full.index(2), q_tile)
    for n in range(stop):
        mbarrier.wait(empty.index(n % 2), n // 2 + 1 & 1)
        mbarrier.expect(full.index(n % 2), 2 * k.block_type.nbytes)
        tma_load(k, [row + n * N, column], full.index(n % 2), k_tiles.index(n % 2))
        tma_load(v, [row + n * N, column], full.index(n % 2), v_tiles.index(n % 2))


@gluon.jit
def consumer(q_tile, first, k_tiles, v_tiles, full, empty, stop, out, heads, scale, CAUSAL: gl.constexpr):
    """Compute 64 rows of O, from row `first` of the program on."""
    D: gl.constexpr = q_tile.shape[1]
    o_i, o_j = first + gl.arange(0, M, gl.SliceLayout(1, PRODUCT)), gl.arange(0, N, gl.SliceLayout(0, PRODUCT))
    acc, l = gl.zeros([M, D], gl.float32, PRODUCT), gl.zeros([M], gl.float32, gl.SliceLayout(1, PRODUCT))
    mbarrier.wait(full.index(2), 0)
    m, b_q = gl.full([M], -float("inf"), gl.float32, gl.SliceLayout(1, PRODUCT)), q_tile.load(A)
    for n in range(stop):
        mbarrier.wait(full.index(n % 2), n // 2 & 1)
        # S = scale log2(e) Q K^T
        s = gl.zeros([M, N], gl.float32, PRODUCT)
        s = warpgroup_mma(b_q, k_tiles.index(n % 2).permute([1, 0]), s, use_acc=False) * scale
        if CAUSAL and n == stop - 1:
            s = gl.where(o_j[None, :] <= o_i[:, None], s, -float("inf"))
        # softmax
        m_new = gl.maximum(m, gl.max(s, 1))
        p, alpha = gl.exp2(s - m_new[:, None]), gl.exp2(m - m_new)
        l = l * alpha + gl.sum(p, 1)
        # O = alpha O + P V
        p = gl.convert_layout(p.to(q_tile.dtype), A)
        acc, m = warpgroup_mma(p, v_tiles.index(n % 2), acc * alpha[:, None]), m_new
        release(empty.index(n % 2), False)
    p_out = out + o_i[:, None] * heads * D + gl.arange(0, D, gl.SliceLayout(0, PRODUCT))[None, :]
    gl.store(p_out, (acc / l[:, None]).to(q_tile.dtype))


@gluon.jit
def kernel(q, k, v, out, heads, tokens, D: gl.constexpr, CAUSAL: gl.constexpr):
    """Compute 128 rows of O."""
    bh, i = gl.program_id(1), (gl.num_programs(0) - 1 - gl.program_id(0)) * N
    row, column, stop = bh // heads * tokens, bh % heads * D, (i + N if CAUSAL else tokens) // N
    q_tile = gl.allocate_shared_memory(q.dtype, [N, D], q.layout)
    k_tiles = gl.allocate_shared_memory(q.dtype, [2, N, D], q.layout)
    v_tiles = gl.allocate_shared_memory(q.dtype, [2, N, D], q.layout)
    full, empty = ring(3, 2)  # the last barrier is for Q
    out, scale = out + (row.to(gl.int64) + i) * heads * D + column, 1.4426950408889634 * D**-0.5
    upper = q_tile.slice(0, M), 0, k_tiles, v_tiles, full, empty, stop, out, heads, scale, CAUSAL
    lower = q_tile.slice(M, M), M, k_tiles, v_tiles, full, empty, stop, out, heads, scale, CAUSAL
    copies = q, k, v, q_tile, k_tiles, v_tiles, full, empty, row, column, i, stop
    gl.warp_specialize([(consumer, upper), (consumer, lower), (producer, copies)], [4, 1], [240, 24])


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return attention's output (B, T, H, D) for q, k and v (B, T, H, D) with one row stride; T a multiple of 128."""
    batch, tokens, heads, head_dim = q.shape
    out, layout = torch.empty_like(q, memory_format=torch.contiguous_format), gl.NVMMASharedLayout(128, 16, 2)
    shape, stride = [batch * tokens, heads * head_dim], [q.stride(1), 1]
    reads = [TensorDescriptor(x, shape, stride, [N.value, head_dim], layout) for x in (q, k, v)]
    kernel[(tokens // N.value, batch * heads)](*reads, out, heads, tokens, head_dim, causal, num_warps=4)
    return out
