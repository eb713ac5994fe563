"""Multiply with wgmma, Hopper's instruction of a whole warpgroup.

`wgmma` multiplies [64, 16] by [16, N] with four warps together. It reads Q, K and V from shared memory, so they take no
registers and no load instructions; P comes from registers. The fence shows the tensor cores what cp.async wrote.

Expected: about 1.5 times the speed, because mma.sync reaches about two thirds of Hopper's peak. The softmax stays.
Counter: load instructions from shared memory, which vanish. Tensor pipe activity hardly changes.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from kernels.hopper.gluon_versions import cp_async

TILE: gl.constexpr = gl.constexpr(64)  # queries of a program, and keys of a step of its loop
PRODUCT: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # warps split rows
A: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, PRODUCT.value, 2))
SHARED: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def start_copy(x, row, tile, D: gl.constexpr):
    """Start to copy 64 rows of D elements from memory to a tile in shared memory, 16 bytes a thread at a time."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    o_m, o_d = gl.arange(0, TILE, gl.SliceLayout(1, COPY)), gl.arange(0, D, gl.SliceLayout(0, COPY))
    cp_async(tile, x + o_m[:, None] * row + o_d[None, :])


@gluon.jit
def walk(start, end, stop, k, v, row, tiles, o_i, acc, m, l, scale, D: gl.constexpr, MASKED: gl.constexpr):
    """Return O, m and l after the keys `start` to `end`. The program goes on to the key `stop`."""
    q_tile, k_tiles, v_tiles = tiles
    for j in range(start, end, TILE):
        async_copy.wait_group(0)  # this tile has arrived
        fence_async_shared()
        if j + TILE < stop:
            slot = (j // TILE + 1) % 2
            start_copy(k + (j + TILE) * row, row, k_tiles.index(slot), D)
            start_copy(v + (j + TILE) * row, row, v_tiles.index(slot), D)
        async_copy.commit_group()
        # S = scale log2(e) Q K^T
        s = gl.zeros([TILE, TILE], gl.float32, PRODUCT)
        s = warpgroup_mma(q_tile, k_tiles.index(j // TILE % 2).permute([1, 0]), s, use_acc=False) * scale
        if MASKED:
            o_j = j + gl.arange(0, TILE, gl.SliceLayout(0, PRODUCT))
            s = gl.where(o_j[None, :] <= o_i[:, None], s, -float("inf"))
        # softmax
        m_new = gl.maximum(m, gl.max(s, 1))
        p, alpha = gl.exp2(s - m_new[:, None]), gl.exp2(m - m_new)
        l = l * alpha + gl.sum(p, 1)
        # O = alpha O + P V
        p = gl.convert_layout(p.to(v.dtype.element_ty), A)
        acc, m = warpgroup_mma(p, v_tiles.index(j // TILE % 2), acc * alpha[:, None]), m_new
    return acc, m, l


@gluon.jit
def kernel(q, k, v, out, row, heads, tokens, scale, D: gl.constexpr, CAUSAL: gl.constexpr):
    """Compute 64 rows of O."""
    bh, i = gl.program_id(1).to(gl.int64), (gl.num_programs(0) - 1 - gl.program_id(0)) * TILE
    first = bh // heads * tokens * row + bh % heads * D  # of this head in Q, K and V
    k, v, stop = k + first, v + first, i + TILE if CAUSAL else tokens
    q_tile = gl.allocate_shared_memory(q.dtype.element_ty, [TILE, D], SHARED)
    k_tiles = gl.allocate_shared_memory(q.dtype.element_ty, [2, TILE, D], SHARED)
    v_tiles = gl.allocate_shared_memory(q.dtype.element_ty, [2, TILE, D], SHARED)
    start_copy(q + first + i * row, row, q_tile, D)
    start_copy(k, row, k_tiles.index(0), D)
    start_copy(v, row, v_tiles.index(0), D)
    async_copy.commit_group()
    o_i = i + gl.arange(0, TILE, gl.SliceLayout(1, PRODUCT))
    acc, l = gl.zeros([TILE, D], gl.float32, PRODUCT), gl.zeros([TILE], gl.float32, gl.SliceLayout(1, PRODUCT))
    m = gl.full([TILE], -float("inf"), gl.float32, gl.SliceLayout(1, PRODUCT))
    seen, tiles = i if CAUSAL else tokens, (q_tile, k_tiles, v_tiles)  # all queries of the tile see these keys
    acc, m, l = walk(0, seen, stop, k, v, row, tiles, o_i, acc, m, l, scale, D, False)
    if CAUSAL:
        acc, m, l = walk(seen, stop, stop, k, v, row, tiles, o_i, acc, m, l, scale, D, True)
    p_out = out + (bh // heads * tokens + o_i)[:, None] * heads * D + bh % heads * D
    gl.store(p_out + gl.arange(0, D, gl.SliceLayout(0, PRODUCT))[None, :], (acc / l[:, None]).to(out.dtype.element_ty))


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return attention's output (B, T, H, D) for q, k and v (B, T, H, D) with one row stride; T a multiple of 128."""
    batch, tokens, heads, head_dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    sizes = q.stride(1), heads, tokens, 1.4426950408889634 * head_dim**-0.5, head_dim, causal
    kernel[(tokens // TILE.value, batch * heads)](q, k, v, out, *sizes, num_warps=4)
    return out
