"""Which tiles each program of the Hopper backward computes, and when its turn comes to add to dQ.

Legend: M rows of a query tile, N rows of a key tile, j first key of the program, shape (heads, groups, seq_q, seq_k).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.common.head_rows import queries_of


@gluon.jit
def place(all_heads, key_tiles, section, ORDERED: gl.constexpr):
    """Return this program's batch and key/value head, in one number, and its key tile.

    In each section of heads the first key tiles come first: under a causal mask they are the longest. If ORDERED, the
    last ones come first, because they add to dQ first.
    """
    program = gl.program_id(0)
    first = program // (section * key_tiles) * section
    program -= first * key_tiles
    width = gl.minimum(section, all_heads - first)
    tile = program // width
    return first + program % width, key_tiles - 1 - tile if ORDERED else tile


@gluon.jit
def query_tiles(
    j, documents, batch, shape, window,
    M: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """Return first, stop, full and full_end of the keys [j, j + N).

    The query tiles [first, stop) see some of these keys. The queries [full, full_end) see all of them.
    """
    _, _, seq_q, seq_k = shape
    tiles = gl.cdiv(seq_q, M)
    first, stop, full, full_end = 0, tiles, 0, seq_q
    if CAUSAL:
        first = gl.maximum(j - (seq_k - seq_q), 0) // M
        full = gl.maximum(j + N - 1 - (seq_k - seq_q), 0)
    if WINDOW or DOCUMENTS:
        offset, last = seq_k - seq_q, gl.minimum(j + N, seq_k) - 1
        start, full_end = queries_of(j, documents, batch, offset, seq_q, seq_k, window, CAUSAL, WINDOW, DOCUMENTS)
        full, end = queries_of(last, documents, batch, offset, seq_q, seq_k, window, CAUSAL, WINDOW, DOCUMENTS)
        # One tile at least, because the consumers wait for V, which the first tile brings. It may be all masked.
        first = gl.minimum(gl.maximum(start, 0) // M, tiles - 1)
        stop = gl.maximum(gl.cdiv(end, M), first + 1)
    full = gl.where(j + N > seq_k, seq_q, full)  # mask every tile if there are keys past seq_k
    return first, stop, full, full_end


@gluon.jit
def turn_of(tile, m, shape, M: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr):
    """Return how many key tiles add to dQ of query tile m before this key tile does.

    The last key tile that sees a query of m adds first, and the others follow one by one. Under a causal mask, the key
    tile after this one reached m earlier, by N / M rounds, so a program seldom waits. With documents, the turns are
    right only under a causal mask.

    A program waits only for programs with lower ids. This relies on the GPU starting programs in the order of their
    ids, which CUDA does not promise.
    """
    _, _, seq_q, seq_k = shape
    last = gl.cdiv(seq_k, N) - 1
    if CAUSAL:
        last = gl.minimum(last, (m * M + M - 1 + seq_k - seq_q) // N)
    return last - tile
