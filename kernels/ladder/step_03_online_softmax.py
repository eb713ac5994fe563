"""Fuse the three kernels into one with the online softmax, so that S and P never go to memory.

A program owns 64 queries and walks over the keys, 64 at a time. It keeps the row maxima m, the row sums l and the
normalised O on chip (Algorithm 1 of the FlashAttention paper, with the loops swapped), and corrects them for each tile.
P [64, 64] passes through shared memory, because a thread computes a part of a row of P, but needs the whole row for O.
A causal program stops at the diagonal.

Expected: six transfers of a T x T matrix vanish (S is stored and loaded three times, P is stored and loaded). Each
thread reads its operands from L1 by itself, so the load instructions become the limit.
Counter: bytes read from and written to DRAM, which fall by a factor of about 3 T / D; then the throughput of L1.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE: gl.constexpr = gl.constexpr(64)  # queries of a program, and keys of a step of its loop
CHUNK: gl.constexpr = gl.constexpr(16)  # columns of A, and rows of B, that a thread holds at a time
THREADS: gl.constexpr = gl.constexpr(gl.BlockedLayout([4, 4], [8, 4], [2, 4], [1, 0]))  # of S [64, 64] and O [64, D]
A: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, THREADS.value, 0))
B: gl.constexpr = gl.constexpr(gl.DotOperandLayout(1, THREADS.value, 0))


@gluon.jit
def multiply_rows(q, k, row, D: gl.constexpr):
    """Return Q K^T, [64, 64], of 64 rows of Q and of K in memory."""
    o_m, a_d = gl.arange(0, TILE, gl.SliceLayout(1, A)), gl.arange(0, CHUNK, gl.SliceLayout(0, A))
    b_d, o_n = gl.arange(0, CHUNK, gl.SliceLayout(1, B)), gl.arange(0, TILE, gl.SliceLayout(0, B))
    s = gl.zeros([TILE, TILE], gl.float32, THREADS)
    for d in range(0, D, CHUNK):
        b_q = gl.load(q + d + o_m[:, None] * row + a_d[None, :])  # [64, CHUNK]
        b_k = gl.load(k + d + b_d[:, None] + o_n[None, :] * row)  # [CHUNK, 64]
        s = gl.dot_fma(b_q.to(gl.float32), b_k.to(gl.float32), s)
    return s


@gluon.jit
def add_product(p_tile, v, row, acc, D: gl.constexpr):
    """Return acc + P V, [64, D], for P in shared memory and V in memory."""
    b_n, o_d = gl.arange(0, CHUNK, gl.SliceLayout(1, B)), gl.arange(0, D, gl.SliceLayout(0, B))
    for n in gl.static_range(0, TILE, CHUNK):
        b_v = gl.load(v + (n + b_n)[:, None] * row + o_d[None, :])  # [CHUNK, D]
        acc = gl.dot_fma(p_tile.slice(n, CHUNK, dim=1).load(A), b_v.to(gl.float32), acc)
    return acc


@gluon.jit
def kernel(q, k, v, out, row, heads, tokens, scale, D: gl.constexpr, CAUSAL: gl.constexpr):
    """Compute 64 rows of O."""
    bh, i = gl.program_id(1).to(gl.int64), gl.program_id(0) * TILE
    first = bh // heads * tokens * row + bh % heads * D  # of this head in Q, K and V
    p_tile = gl.allocate_shared_memory(gl.float32, [TILE, TILE], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    o_i = i + gl.arange(0, TILE, gl.SliceLayout(1, THREADS))
    o_j = gl.arange(0, TILE, gl.SliceLayout(0, THREADS))
    m = gl.full([TILE], -float("inf"), gl.float32, gl.SliceLayout(1, THREADS))
    l = gl.zeros([TILE], gl.float32, gl.SliceLayout(1, THREADS))
    acc = gl.zeros([TILE, D], gl.float32, THREADS)
    for j in range(0, i + TILE if CAUSAL else tokens, TILE):
        # S = scale Q K^T
        s = multiply_rows(q + first + i * row, k + first + j * row, row, D) * scale
        if CAUSAL:
            s = gl.where((j + o_j)[None, :] <= o_i[:, None], s, -float("inf"))
        # softmax
        m_new = gl.maximum(m, gl.max(s, 1))
        p = gl.exp(s - m_new[:, None])
        l_old = l * gl.exp(m - m_new)
        l = l_old + gl.sum(p, 1)
        # O = (l_old O + P V) / l
        p_tile.store(p / l[:, None])
        acc = add_product(p_tile, v + first + j * row, row, acc * (l_old / l)[:, None], D)
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
