"""Copy tiles by TMA, Hopper's copy engine.

One thread starts the copy of a whole tile from a descriptor. The engine computes the addresses and swizzles the tile.
A barrier in shared memory (mbarrier) counts the bytes that have arrived.

Expected: about a tenth. The copies of step 11 were hidden already, but they took instructions and registers.
Counter: load instructions, which vanish, and registers per thread.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.hopper.gluon_versions import tma_load
from kernels.hopper.warpgroups import ring

TILE: gl.constexpr = gl.constexpr(64)  # queries of a program, and keys of a step of its loop
PRODUCT: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # warps split rows
A: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, PRODUCT.value, 2))


@gluon.jit
def start_copy(k, v, row, column, k_tiles, v_tiles, full, n):
    """Start to copy key tile n of K and V. The barrier of its slot expects the bytes."""
    mbarrier.expect(full.index(n % 2), 2 * k.block_type.nbytes)
    tma_load(k, [row + n * TILE, column], full.index(n % 2), k_tiles.index(n % 2))
    tma_load(v, [row + n * TILE, column], full.index(n % 2), v_tiles.index(n % 2))


@gluon.jit
def walk(start, end, stop, k, v, row, column, tiles, o_i, acc, m, l, scale, MASKED: gl.constexpr):
    """Return O, m and l after the key tiles `start` to `end`. The program goes on to the tile `stop`."""
    q_tile, k_tiles, v_tiles, full = tiles
    for n in range(start, end):
        if n + 1 < stop:
            start_copy(k, v, row, column, k_tiles, v_tiles, full, n + 1)
        mbarrier.wait(full.index(n % 2), n // 2 & 1)
        # S = scale log2(e) Q K^T
        s = gl.zeros([TILE, TILE], gl.float32, PRODUCT)
        s = warpgroup_mma(q_tile, k_tiles.index(n % 2).permute([1, 0]), s, use_acc=False) * scale
        if MASKED:
            o_j = n * TILE + gl.arange(0, TILE, gl.SliceLayout(0, PRODUCT))
            s = gl.where(o_j[None, :] <= o_i[:, None], s, -float("inf"))
        # softmax
        m_new = gl.maximum(m, gl.max(s, 1))
        p, alpha = gl.exp2(s - m_new[:, None]), gl.exp2(m - m_new)
        l = l * alpha + gl.sum(p, 1)
        # O = alpha O + P V
        p = gl.convert_layout(p.to(v.dtype), A)
        acc, m = warpgroup_mma(p, v_tiles.index(n % 2), acc * alpha[:, None]), m_new
    return acc, m, l


@gluon.jit
def kernel(q, k, v, out, heads, tokens, scale, D: gl.constexpr, CAUSAL: gl.constexpr):
    """Compute 64 rows of O."""
    bh, i = gl.program_id(1), (gl.num_programs(0) - 1 - gl.program_id(0)) * TILE
    row, column, stop = bh // heads * tokens, bh % heads * D, (i + TILE if CAUSAL else tokens) // TILE
    q_tile = gl.allocate_shared_memory(q.dtype, [TILE, D], q.layout)
    k_tiles = gl.allocate_shared_memory(q.dtype, [2, TILE, D], q.layout)
    v_tiles = gl.allocate_shared_memory(q.dtype, [2, TILE, D], q.layout)
    full, _ = ring(3, 1)  # of two slots, and of Q
    mbarrier.expect(full.index(2), q.block_type.nbytes)
    tma_load(q, [row + i, column], full.index(2), q_tile)
    start_copy(k, v, row, column, k_tiles, v_tiles, full, 0)
    mbarrier.wait(full.index(2), 0)
    o_i = i + gl.arange(0, TILE, gl.SliceLayout(1, PRODUCT))
    acc = gl.zeros([TILE, D], gl.float32, PRODUCT)
    m = gl.full([TILE], -float("inf"), gl.float32, gl.SliceLayout(1, PRODUCT))
    l = gl.zeros([TILE], gl.float32, gl.SliceLayout(1, PRODUCT))
    seen, tiles = i // TILE if CAUSAL else stop, (q_tile, k_tiles, v_tiles, full)  # all queries see these tiles
    acc, m, l = walk(0, seen, stop, k, v, row, column, tiles, o_i, acc, m, l, scale, False)
    if CAUSAL:
        acc, m, l = walk(seen, stop, stop, k, v, row, column, tiles, o_i, acc, m, l, scale, True)
    p_out = out + (row.to(gl.int64) + o_i)[:, None] * heads * D + column
    gl.store(p_out + gl.arange(0, D, gl.SliceLayout(0, PRODUCT))[None, :], (acc / l[:, None]).to(q.dtype))


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return attention's output (B, T, H, D) for q, k and v (B, T, H, D) with one row stride; T a multiple of 128."""
    batch, tokens, heads, head_dim = q.shape
    out, layout = torch.empty_like(q, memory_format=torch.contiguous_format), gl.NVMMASharedLayout(128, 16, 2)
    shape, stride, block = [batch * tokens, heads * head_dim], [q.stride(1), 1], [TILE.value, head_dim]
    reads = [TensorDescriptor(x, shape, stride, block, layout) for x in (q, k, v)]
    sizes = heads, tokens, 1.4426950408889634 * head_dim**-0.5, head_dim, causal
    kernel[(tokens // TILE.value, batch * heads)](*reads, out, *sizes, num_warps=4)
    return out
