"""Copy tiles asynchronously, two stages deep.

In steps 4 to 7, a thread loads a tile into registers, waits, and stores it. `cp.async` copies to shared memory without
registers, and the thread goes on. While the program multiplies one tile of K and V, the next one is under way.

Expected: the latency of memory hides behind the products.
Counter: stalls that wait for global memory (long scoreboard), which fall; stores to shared memory, which vanish.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kernels.hopper.gluon_versions import cp_async

TILE: gl.constexpr = gl.constexpr(64)  # queries of a program, and keys of a step of its loop
PRODUCT: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))  # warps split rows
A: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, PRODUCT.value, 2))
B: gl.constexpr = gl.constexpr(gl.DotOperandLayout(1, PRODUCT.value, 2))
SHARED: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
STAGES: gl.constexpr = gl.constexpr(2)
COPIES: gl.constexpr = gl.constexpr(STAGES.value - 1)  # that are under way during a step of the loop


@gluon.jit
def start_copy(x, row, tile, D: gl.constexpr):
    """Start to copy 64 rows of D elements from memory to a tile in shared memory, 16 bytes a thread at a time."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    o_m, o_d = gl.arange(0, TILE, gl.SliceLayout(1, COPY)), gl.arange(0, D, gl.SliceLayout(0, COPY))
    cp_async(tile, x + o_m[:, None] * row + o_d[None, :])


@gluon.jit
def start_keys(k, v, row, k_tiles, v_tiles, j, stop, D: gl.constexpr):
    """Start to copy K and V of the keys j to j + 64 as one group, which is empty from `stop` on."""
    if j < stop:
        slot = j // TILE % STAGES
        start_copy(k + j * row, row, k_tiles.index(slot), D)
        start_copy(v + j * row, row, v_tiles.index(slot), D)
    async_copy.commit_group()


@gluon.jit
def kernel(q, k, v, out, row, heads, tokens, scale, D: gl.constexpr, CAUSAL: gl.constexpr):
    """Compute 64 rows of O."""
    bh, i = gl.program_id(1).to(gl.int64), gl.program_id(0) * TILE
    first = bh // heads * tokens * row + bh % heads * D  # of this head in Q, K and V
    dtype: gl.constexpr = q.dtype.element_ty
    q_tile = gl.allocate_shared_memory(dtype, [TILE, D], SHARED)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE, D], SHARED)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE, D], SHARED)
    stop = i + TILE if CAUSAL else tokens
    start_copy(q + first + i * row, row, q_tile, D)
    for j in gl.static_range(0, COPIES * TILE, TILE):
        start_keys(k + first, v + first, row, k_tiles, v_tiles, j, stop, D)
    o_i = i + gl.arange(0, TILE, gl.SliceLayout(1, PRODUCT))
    o_j = gl.arange(0, TILE, gl.SliceLayout(0, PRODUCT))
    m = gl.full([TILE], -float("inf"), gl.float32, gl.SliceLayout(1, PRODUCT))
    l = gl.zeros([TILE], gl.float32, gl.SliceLayout(1, PRODUCT))
    acc = gl.zeros([TILE, D], gl.float32, PRODUCT)
    for j in range(0, stop, TILE):
        async_copy.wait_group(COPIES - 1)  # Q and this tile have arrived
        start_keys(k + first, v + first, row, k_tiles, v_tiles, j + COPIES * TILE, stop, D)
        slot = j // TILE % STAGES
        # S = scale log2(e) Q K^T
        zero = gl.zeros([TILE, TILE], gl.float32, PRODUCT)
        s = mma_v2(q_tile.load(A), k_tiles.index(slot).permute([1, 0]).load(B), zero) * scale
        if CAUSAL:
            s = gl.where((j + o_j)[None, :] <= o_i[:, None], s, -float("inf"))
        # softmax
        m_new = gl.maximum(m, gl.max(s, 1))
        p = gl.exp2(s - m_new[:, None])
        alpha = gl.exp2(m - m_new)
        l = l * alpha + gl.sum(p, 1)
        # O = alpha O + P V
        acc = mma_v2(gl.convert_layout(p.to(dtype), A), v_tiles.index(slot).load(B), acc * alpha[:, None])
        m = m_new
    o_d = bh % heads * D + gl.arange(0, D, gl.SliceLayout(0, PRODUCT))
    p_out = out + (bh // heads * tokens + o_i)[:, None] * heads * D + o_d[None, :]
    gl.store(p_out, (acc / l[:, None]).to(dtype))


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return attention's output (B, T, H, D) for q, k and v (B, T, H, D) with one row stride; T a multiple of 128."""
    batch, tokens, heads, head_dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    sizes = q.stride(1), heads, tokens, 1.4426950408889634 * head_dim**-0.5, head_dim, causal
    kernel[(tokens // TILE.value, batch * heads)](q, k, v, out, *sizes, num_warps=4)
    return out
