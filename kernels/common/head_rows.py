"""Functions that the Triton attention kernels share: rows of one head, products, masks and dropout's numbers.

Tensors are (batch, length, heads, head_dim) with unit stride along head_dim. A tile may start beyond 2^31 elements, so
its start is computed in 64 bits. The offsets inside a tile fit 32 bits; see checks.readable.

Names in the kernels:

- D: head size, padded to a power of two
- p_x: pointer to the first row of one head of x; s_x: stride between its rows; b_x: tile of x; o_x: offsets
- sq_b, sq_t, sq_h: strides of q over batch, tokens and heads; likewise for k, v, o, do, dq and dk
- i, j: first query and first key of a tile
- bh: batch * heads + head; bg: the same for key/value heads
- groups: query heads per key/value head
- keep_scale: 1 / (1 - dropout_p)
"""

import triton
import triton.language as tl

from kernels.common.rounding import to

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def head_of(pointer, batch, head, s_batch, s_head):
    """Return a pointer to the first row of one head."""
    return pointer + tl.cast(batch, tl.int64) * s_batch + tl.cast(head, tl.int64) * s_head


@triton.jit
def at_head(x, batch, head, s_batch, s_head, TMA: tl.constexpr):
    """Return the source for load_rows: with TMA the descriptor of all of x, or else a pointer to the head."""
    if TMA:
        return x
    else:
        return head_of(x, batch, head, s_batch, s_head)


@triton.jit
def load_rows(
    x, batch, head, s_x, start, length,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, BOUNDED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Load rows start to start + ROWS of one head, [ROWS, D]. The padding of D and rows past `length` are zero.

    x comes from at_head. Loads through pointers check the rows only if BOUNDED; loads through TMA always do.
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
    """Store the tile b_x [ROWS, D] to rows start + o_rows of one head, without rows past `length` and the padding."""
    o_d = tl.arange(0, D)
    p_tile = p_x + tl.cast(start, tl.int64) * s_x + o_rows[:, None] * s_x + o_d[None, :]
    mask = (start + o_rows < length)[:, None] & (o_d < HEAD_DIM)[None, :]
    tl.store(p_tile, to(b_x, p_x.dtype.element_ty, UPCAST), mask=mask)


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """Return a @ b + acc in fp32. UPCAST is for the interpreter, whose bf16 arithmetic is wrong.

    "ieee" keeps products of fp32 out of TF32. It does not change 16-bit products.
    """
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def keys_of(
    o_i, documents, batch, offset, seq_q, seq_k, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Return first and end of the keys that each query o_i sees. Both never decrease with i.

    documents (B, 2, seq_q) int32 holds where each token's document starts and ends. A query that sees no key has
    end <= first, and its end may be negative.
    """
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
    o_j, documents, batch, offset, seq_q, seq_k, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Return first and end of the queries that see each key o_j: the inverse of keys_of.

    keys_of explains documents. Masks of documents require seq_q = seq_k.
    """
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
    """Return pointers to dropout's numbers (see dropout.py) of one head's queries and keys; unused without dropout."""
    if DROPOUT:
        p_of_queries = numbers + tl.cast(bh, tl.int64) * (seq_q + seq_k)
        return p_of_queries, p_of_queries + seq_q
    else:
        return bh, bh


@triton.jit
def random_numbers(p_numbers, o_rows, length, BOUNDED: tl.constexpr, DROPOUT: tl.constexpr):
    """Return dropout's numbers of the rows o_rows, unsigned; a placeholder without dropout."""
    if DROPOUT and BOUNDED:
        return tl.load(p_numbers + o_rows, mask=o_rows < length, other=0).to(tl.uint32, bitcast=True)
    elif DROPOUT:
        return tl.load(p_numbers + o_rows).to(tl.uint32, bitcast=True)
    else:
        return o_rows
