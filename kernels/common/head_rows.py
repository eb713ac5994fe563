"""What the attention kernels in Triton share: rows of one head, their products, who sees whom, and dropout's numbers.

Tensors are (batch, length, heads, head_dim) with unit stride along head_dim. A row's byte offset may pass 2^31, so the
start of a tile is computed in 64 bits and only offsets inside it in 32.

D head size padded to a power of two.
Names: p_ pointer to the first row of one head, s_ stride between rows, b_ tile, o_ offsets; sq_b, sq_t and sq_h strides
of q over batch, tokens and heads, and so of k, v, o, do, dq and dk; i and j first query and key of a tile; bh and bg
batch and query head, or key/value head, in one number; groups query heads to a key/value head; keep_scale
1 / (1 - dropout_p).
"""

import triton
import triton.language as tl

from kernels.common.rounding import to

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def head_of(pointer, batch, head, s_batch, s_head):
    """A pointer to the first row of one head."""
    return pointer + tl.cast(batch, tl.int64) * s_batch + tl.cast(head, tl.int64) * s_head


@triton.jit
def at_head(x, batch, head, s_batch, s_head, TMA: tl.constexpr):
    """What load_rows reads one head of x from: a pointer to its first row, or the descriptor of the whole of x."""
    if TMA:
        return x
    else:
        return head_of(x, batch, head, s_batch, s_head)


@triton.jit
def load_rows(
    x,
    batch,
    head,
    s_x,
    start,
    length,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    BOUNDED: tl.constexpr,
    TMA: tl.constexpr,
):
    """Rows start to start + ROWS of one head, [ROWS, D]; the padding of D, and rows past `length`, read zero.

    By pointer the rows are checked only where BOUNDED; by TMA, Hopper's copy engine, they always are.
    """
    if TMA:
        return x.load([batch, start, head, 0]).reshape(ROWS, D)
    else:
        o_rows = tl.arange(0, ROWS)
        o_d = tl.arange(0, D)
        p_tile = x + tl.cast(start, tl.int64) * s_x + o_rows[:, None] * s_x + o_d[None, :]
        if BOUNDED and D != HEAD_DIM:
            return tl.load(p_tile, mask=(start + o_rows < length)[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0)
        elif BOUNDED:
            return tl.load(p_tile, mask=(start + o_rows < length)[:, None], other=0.0)
        elif D != HEAD_DIM:
            return tl.load(p_tile, mask=(o_d < HEAD_DIM)[None, :], other=0.0)
        else:
            return tl.load(p_tile)


@triton.jit
def store_rows(p_x, s_x, start, length, o_rows, b_x, HEAD_DIM: tl.constexpr, D: tl.constexpr, UPCAST: tl.constexpr):
    """Writes the tile [ROWS, D] to the rows start + o_rows of one head, but for those past `length` and the padding."""
    o_d = tl.arange(0, D)
    p_tile = p_x + tl.cast(start, tl.int64) * s_x + o_rows[:, None] * s_x + o_d[None, :]
    mask = (start + o_rows < length)[:, None] & (o_d < HEAD_DIM)[None, :]
    tl.store(p_tile, to(b_x, p_x.dtype.element_ty, UPCAST), mask=mask)


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """a @ b + acc in fp32. UPCAST is for the interpreter, whose arithmetic on bf16 is wrong."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def keys_of(
    o_i,
    documents,
    batch,
    offset,
    seq_q,
    seq_k,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """The keys [first, end) that the queries o_i see. Neither falls from one query to the next; end may be negative."""
    first, end = o_i * 0, o_i * 0 + seq_k
    if DOCUMENTS:
        p_first = documents + tl.cast(batch, tl.int64) * 2 * seq_q + o_i
        first = tl.load(p_first, mask=o_i < seq_q, other=0)
        end = tl.load(p_first + seq_q, mask=o_i < seq_q, other=0)
    if CAUSAL:
        end = tl.minimum(end, o_i + offset + 1)
    if WINDOW:
        first = tl.maximum(first, o_i + offset + 1 - window)
    return first, end


@triton.jit
def queries_of(
    o_j,
    documents,
    batch,
    offset,
    seq_q,
    seq_k,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """The queries [first, end) that see the keys o_j: the other side of keys_of."""
    first, end = o_j * 0, o_j * 0 + seq_q
    if DOCUMENTS:
        p_first = documents + tl.cast(batch, tl.int64) * 2 * seq_k + o_j
        first = tl.load(p_first, mask=o_j < seq_k, other=0)
        end = tl.load(p_first + seq_k, mask=o_j < seq_k, other=0)
    if CAUSAL:
        first = tl.maximum(first, o_j - offset)
    if WINDOW:
        end = tl.minimum(end, o_j - offset + window)
    return first, end


@triton.jit
def numbers_of_head(numbers, bh, seq_q, seq_k, DROPOUT: tl.constexpr):
    """Pointers to the random numbers of one head's queries and keys: see dropout.py. Nothing of use without dropout."""
    if DROPOUT:
        p_of_queries = numbers + tl.cast(bh, tl.int64) * (seq_q + seq_k)
        return p_of_queries, p_of_queries + seq_q
    else:
        return bh, bh


@triton.jit
def random_numbers(p_numbers, o_rows, length, BOUNDED: tl.constexpr, DROPOUT: tl.constexpr):
    """Some of those numbers."""
    if DROPOUT and BOUNDED:
        return tl.load(p_numbers + o_rows, mask=o_rows < length, other=0).to(tl.uint32, bitcast=True)
    elif DROPOUT:
        return tl.load(p_numbers + o_rows).to(tl.uint32, bitcast=True)
    else:
        return o_rows
