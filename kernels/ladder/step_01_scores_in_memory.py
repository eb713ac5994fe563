"""Write the scores to memory, with threads that read and write columns.

Standard attention (Algorithm 0 of the FlashAttention paper) has three kernels with T x T matrices in HBM. Neighbouring
threads own neighbouring rows here. Rows are far apart: a warp touches 32 sectors of 32 bytes and uses 4 bytes of each.

Expected: below 1 % of the tensor cores' peak, because every kernel waits for memory.
Counter: sectors per request. Stores have 32, the worst value. Loads have fewer: many threads read the same address.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE: gl.constexpr = gl.constexpr(64)
CHUNK: gl.constexpr = gl.constexpr(16)  # columns of A, and rows of B, that a thread holds at a time


@gluon.constexpr_function
def threads():
    """Return which thread owns which elements of a [64, 64] tile: neighbours own rows."""
    return gl.BlockedLayout([1, 1], [32, 1], [1, 8], [0, 1])


@gluon.jit
def multiply(a, b, row_a, row_b, column_b, K, acc):
    """Return acc + A B for A [64, K] and B [K, 64] in memory. Elements of a row of A are neighbours."""
    A: gl.constexpr = gl.DotOperandLayout(0, threads(), 0)
    B: gl.constexpr = gl.DotOperandLayout(1, threads(), 0)
    o_m, a_k = gl.arange(0, TILE, gl.SliceLayout(1, A)), gl.arange(0, CHUNK, gl.SliceLayout(0, A))
    b_k, o_n = gl.arange(0, CHUNK, gl.SliceLayout(1, B)), gl.arange(0, TILE, gl.SliceLayout(0, B))
    p_a = a + o_m[:, None].to(gl.int64) * row_a + a_k[None, :]
    p_b = b + b_k[:, None].to(gl.int64) * row_b + o_n[None, :].to(gl.int64) * column_b
    for start in range(0, K, CHUNK):
        b_a, b_b = gl.load(p_a + start), gl.load(p_b + start.to(gl.int64) * row_b)  # [64, CHUNK], [CHUNK, 64]
        acc = gl.dot_fma(b_a.to(gl.float32), b_b.to(gl.float32), acc)
    return acc


@gluon.jit
def scores_kernel(q, k, scores, row, heads, tokens, scale, D: gl.constexpr, CAUSAL: gl.constexpr):
    """Write the tile (i, j) of S = scale Q K^T, [64, 64]."""
    bh, i, j = gl.program_id(0).to(gl.int64), gl.program_id(1) * TILE, gl.program_id(2) * TILE
    first = bh // heads * tokens * row + bh % heads * D  # of this head in Q and K
    zero = gl.zeros([TILE, TILE], gl.float32, threads())
    s = multiply(q + first + i * row, k + first + j * row, row, 1, row, D, zero) * scale
    o_i = i + gl.arange(0, TILE, gl.SliceLayout(1, threads()))
    o_j = j + gl.arange(0, TILE, gl.SliceLayout(0, threads()))
    if CAUSAL:
        s = gl.where(o_j[None, :] <= o_i[:, None], s, -float("inf"))
    gl.store(scores + (bh * tokens + o_i)[:, None] * tokens + o_j[None, :], s)


@gluon.jit
def softmax_kernel(scores, tokens):
    """Replace 64 rows of S by their softmax, in three passes over the rows."""
    o_i = gl.program_id(1) * TILE + gl.arange(0, TILE, gl.SliceLayout(1, threads()))
    o_j = gl.arange(0, TILE, gl.SliceLayout(0, threads()))
    p_rows = scores + (gl.program_id(0).to(gl.int64) * tokens + o_i)[:, None] * tokens + o_j[None, :]
    m = gl.full([TILE], -float("inf"), gl.float32, gl.SliceLayout(1, threads()))
    for j in range(0, tokens, TILE):
        m = gl.maximum(m, gl.max(gl.load(p_rows + j), 1))
    l = gl.zeros([TILE], gl.float32, gl.SliceLayout(1, threads()))
    for j in range(0, tokens, TILE):
        l += gl.sum(gl.exp(gl.load(p_rows + j) - m[:, None]), 1)
    for j in range(0, tokens, TILE):
        gl.store(p_rows + j, gl.exp(gl.load(p_rows + j) - m[:, None]) / l[:, None])


@gluon.jit
def output_kernel(scores, v, out, row, heads, tokens, D: gl.constexpr):
    """Write 64 rows and 64 columns of O = P V."""
    bh, i, d = gl.program_id(0).to(gl.int64), gl.program_id(1) * TILE, gl.program_id(2) * TILE
    first = bh // heads * tokens * row + bh % heads * D
    zero = gl.zeros([TILE, TILE], gl.float32, threads())
    o = multiply(scores + (bh * tokens + i) * tokens, v + first + d, tokens, row, 1, tokens, zero)
    o_i = i + gl.arange(0, TILE, gl.SliceLayout(1, threads()))
    o_d = bh % heads * D + d + gl.arange(0, TILE, gl.SliceLayout(0, threads()))
    gl.store(out + (bh // heads * tokens + o_i)[:, None] * heads * D + o_d[None, :], o.to(out.dtype.element_ty))


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return attention's output (B, T, H, D) for q, k and v (B, T, H, D) with one row stride; T a multiple of 128."""
    batch, tokens, heads, head_dim = q.shape
    scores = torch.empty(batch * heads, tokens, tokens, device=q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    n, shape = tokens // TILE.value, (q.stride(1), heads, tokens)
    scores_kernel[(batch * heads, n, n)](q, k, scores, *shape, head_dim**-0.5, head_dim, causal, num_warps=8)
    softmax_kernel[(batch * heads, n)](scores, tokens, num_warps=8)
    output_kernel[(batch * heads, n, head_dim // TILE.value)](scores, v, out, *shape, head_dim, num_warps=8)
    return out
