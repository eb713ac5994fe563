"""Swizzle the tiles in shared memory, so that a column is spread over the banks.

Only the function `shared` differs from step 4: row r stores its 16-byte pieces in the order piece XOR (r mod 8). So
threads that read the same column of eight neighbouring rows use different banks.

Expected: fewer conflicts of loads. Some remain, because a warp reads every fourth row of K. So the fp32 units, with a
fifteenth of the tensor cores' peak, are not the limit yet.
Counter: bank conflicts of shared loads (`gl.bank_conflicts` computes 1 for K, 0 for Q and P).
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE: gl.constexpr = gl.constexpr(64)  # queries of a program, and keys of a step of its loop
CHUNK: gl.constexpr = gl.constexpr(16)  # columns of A, and rows of B, that a thread holds at a time
THREADS: gl.constexpr = gl.constexpr(gl.BlockedLayout([4, 4], [8, 4], [2, 4], [1, 0]))  # of S [64, 64] and O [64, D]
A: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, THREADS.value, 0))
B: gl.constexpr = gl.constexpr(gl.DotOperandLayout(1, THREADS.value, 0))


@gluon.constexpr_function
def shared(bits):
    """Return the layout of a tile in shared memory: row r has its 16-byte pieces in the order piece XOR (r mod 8)."""
    return gl.SwizzledSharedLayout(128 // bits, 1, 8, [1, 0])


@gluon.jit
def load_tile(x, row, D: gl.constexpr):
    """Return 64 rows of D elements from memory. Neighbouring threads read neighbouring elements, 16 bytes each."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [8, 1], [1, 0])
    o_m, o_d = gl.arange(0, TILE, gl.SliceLayout(1, COPY)), gl.arange(0, D, gl.SliceLayout(0, COPY))
    return gl.load(x + o_m[:, None] * row + o_d[None, :])


@gluon.jit
def multiply(a, b, acc, K: gl.constexpr):
    """Return acc + A B for A [64, K] and B [K, columns] in shared memory."""
    for start in gl.static_range(0, K, CHUNK):
        b_a, b_b = a.slice(start, CHUNK, dim=1).load(A), b.slice(start, CHUNK, dim=0).load(B)
        acc = gl.dot_fma(b_a.to(gl.float32), b_b.to(gl.float32), acc)
    return acc


@gluon.jit
def kernel(q, k, v, out, row, heads, tokens, scale, D: gl.constexpr, CAUSAL: gl.constexpr):
    """Compute 64 rows of O."""
    bh, i = gl.program_id(1).to(gl.int64), gl.program_id(0) * TILE
    first = bh // heads * tokens * row + bh % heads * D  # of this head in Q, K and V
    dtype: gl.constexpr = q.dtype.element_ty
    q_tile = gl.allocate_shared_memory(dtype, [TILE, D], shared(16), load_tile(q + first + i * row, row, D))
    k_tile = gl.allocate_shared_memory(dtype, [TILE, D], shared(16))
    v_tile = gl.allocate_shared_memory(dtype, [TILE, D], shared(16))
    p_tile = gl.allocate_shared_memory(gl.float32, [TILE, TILE], shared(32))
    o_i = i + gl.arange(0, TILE, gl.SliceLayout(1, THREADS))
    o_j = gl.arange(0, TILE, gl.SliceLayout(0, THREADS))
    m = gl.full([TILE], -float("inf"), gl.float32, gl.SliceLayout(1, THREADS))
    l = gl.zeros([TILE], gl.float32, gl.SliceLayout(1, THREADS))
    acc = gl.zeros([TILE, D], gl.float32, THREADS)
    for j in range(0, i + TILE if CAUSAL else tokens, TILE):
        k_tile.store(load_tile(k + first + j * row, row, D))
        v_tile.store(load_tile(v + first + j * row, row, D))
        # S = scale Q K^T
        s = multiply(q_tile, k_tile.permute([1, 0]), gl.zeros([TILE, TILE], gl.float32, THREADS), D) * scale
        if CAUSAL:
            s = gl.where((j + o_j)[None, :] <= o_i[:, None], s, -float("inf"))
        # softmax
        m_new = gl.maximum(m, gl.max(s, 1))
        p = gl.exp(s - m_new[:, None])
        l_old = l * gl.exp(m - m_new)
        l = l_old + gl.sum(p, 1)
        # O = (l_old O + P V) / l
        p_tile.store(p / l[:, None])
        acc = multiply(p_tile, v_tile, acc * (l_old / l)[:, None], TILE)
        m = m_new
    o_d = bh % heads * D + gl.arange(0, D, gl.SliceLayout(0, THREADS))
    gl.store(out + (bh // heads * tokens + o_i)[:, None] * heads * D + o_d[None, :], acc.to(out.dtype.element_ty))


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return attention's output (B, T, H, D) for q, k and v (B, T, H, D) with one row stride; T a multiple of 128."""
    batch, tokens, heads, head_dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    sizes = q.stride(1), heads, tokens, head_dim**-0.5, head_dim, causal
    kernel[(tokens // TILE.value, batch * heads)](q, k, v, out, *sizes, num_warps=8)
    return out
