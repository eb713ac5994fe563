"""Multiply on the tensor cores.

`mma_v2` multiplies [16, 16] by [16, 8] in one instruction of a warp, from 16-bit operands with fp32 sums. The rest is
FlashAttention's first version: the four warps split the keys of S and the columns of O, so each row of S is spread over
the warps. Row maxima, row sums and P go through shared memory, with barriers for all warps. O is normalised for each
tile.

Expected: several times the speed of step 5. The tensor cores work for less than a quarter of the time.
Counter: tensor pipe activity, which rises from 0, and the stalls at barriers, which rise a little.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

TILE: gl.constexpr = gl.constexpr(64)  # queries of a program, and keys of a step of its loop
PRODUCT: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8]))  # warps split columns
A: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, PRODUCT.value, 2))
B: gl.constexpr = gl.constexpr(gl.DotOperandLayout(1, PRODUCT.value, 2))
SHARED: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))


@gluon.jit
def load_tile(x, row, D: gl.constexpr):
    """Return 64 rows of D elements from memory. Neighbouring threads read neighbouring elements, 16 bytes each."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    o_m, o_d = gl.arange(0, TILE, gl.SliceLayout(1, COPY)), gl.arange(0, D, gl.SliceLayout(0, COPY))
    return gl.load(x + o_m[:, None] * row + o_d[None, :])


@gluon.jit
def kernel(q, k, v, out, row, heads, tokens, scale, D: gl.constexpr, CAUSAL: gl.constexpr):
    """Compute 64 rows of O."""
    bh, i = gl.program_id(1).to(gl.int64), gl.program_id(0) * TILE
    first = bh // heads * tokens * row + bh % heads * D  # of this head in Q, K and V
    dtype: gl.constexpr = q.dtype.element_ty
    q_tile = gl.allocate_shared_memory(dtype, [TILE, D], SHARED, load_tile(q + first + i * row, row, D))
    k_tile = gl.allocate_shared_memory(dtype, [TILE, D], SHARED)
    v_tile = gl.allocate_shared_memory(dtype, [TILE, D], SHARED)
    o_i = i + gl.arange(0, TILE, gl.SliceLayout(1, PRODUCT))
    o_j = gl.arange(0, TILE, gl.SliceLayout(0, PRODUCT))
    m = gl.full([TILE], -float("inf"), gl.float32, gl.SliceLayout(1, PRODUCT))
    l = gl.zeros([TILE], gl.float32, gl.SliceLayout(1, PRODUCT))
    acc = gl.zeros([TILE, D], gl.float32, PRODUCT)
    for j in range(0, i + TILE if CAUSAL else tokens, TILE):
        k_tile.store(load_tile(k + first + j * row, row, D))
        v_tile.store(load_tile(v + first + j * row, row, D))
        # S = scale Q K^T
        zero = gl.zeros([TILE, TILE], gl.float32, PRODUCT)
        s = mma_v2(q_tile.load(A), k_tile.permute([1, 0]).load(B), zero) * scale
        if CAUSAL:
            s = gl.where((j + o_j)[None, :] <= o_i[:, None], s, -float("inf"))
        # softmax
        m_new = gl.maximum(m, gl.max(s, 1))
        p = gl.exp(s - m_new[:, None])
        l_old = l * gl.exp(m - m_new)
        l = l_old + gl.sum(p, 1)
        # O = (l_old O + P V) / l
        p = gl.convert_layout((p / l[:, None]).to(dtype), A)
        acc = mma_v2(p, v_tile.load(B), acc * (l_old / l)[:, None])
        m = m_new
    o_d = bh % heads * D + gl.arange(0, D, gl.SliceLayout(0, PRODUCT))
    p_out = out + (bh // heads * tokens + o_i)[:, None] * heads * D + o_d[None, :]
    gl.store(p_out, acc.to(dtype))


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return attention's output (B, T, H, D) for q, k and v (B, T, H, D) with one row stride; T a multiple of 128."""
    batch, tokens, heads, head_dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    sizes = q.stride(1), heads, tokens, head_dim**-0.5, head_dim, causal
    kernel[(tokens // TILE.value, batch * heads)](q, k, v, out, *sizes, num_warps=4)
    return out
