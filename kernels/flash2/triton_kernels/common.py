"""Functions that the plain Triton kernels share: the logsumexp, block lists, and the keys of a query tile."""

import triton
import triton.language as tl

from kernels.common.head_rows import keys_of
from kernels.flash2 import block_lists

BLOCK: tl.constexpr = tl.constexpr(block_lists.BLOCK)
HEADER: tl.constexpr = tl.constexpr(block_lists.HEADER)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
LN_2_REST: tl.constexpr = tl.constexpr(7.348693098485626e-09)  # 1 / LOG2_E - LN_2, for both as rounded to fp32


@triton.jit
def natural_logsumexp(m, l):
    """Return m / log2(e) + ln(l) for a maximum m in base 2. A row that sees no key has m = -inf, l = 0.

    With LN_2_REST the backward, which multiplies by log2(e), gets m back exactly enough for scores of 10^4.
    """
    rest = tl.maximum(m, -1e30) * LN_2_REST
    return tl.math.fma(m, LN_2, tl.math.fma(tl.math.log2(l), LN_2, rest))


@triton.jit
def row_of_blocks(blocks, row, seq_len):
    """Return a pointer to a row of block_lists.listed."""
    return blocks + tl.cast(row, tl.int64) * (tl.cdiv(seq_len, BLOCK) + HEADER)


@triton.jit
def kept_blocks(blocks, row, seq_len, BLOCKS: tl.constexpr):
    """Return a pointer to a row's list, and how many queries or keys its first part and all of it have.

    Without BLOCKS the results are placeholders.
    """
    if BLOCKS:
        p_row = row_of_blocks(blocks, row, seq_len)
        return p_row + HEADER, tl.load(p_row + 2) * BLOCK, tl.load(p_row + 3) * BLOCK
    else:
        return row, row, row


@triton.jit
def row_at(p_list, at, BLOCKS: tl.constexpr):
    """Return the query or key at place `at` of a loop: `at` itself, or with BLOCKS its place in the listed blocks."""
    if BLOCKS:
        at = tl.cast(at, tl.int32)  # the interpreter counts in Python's integers
        return tl.load(p_list + at // BLOCK) * BLOCK + at % BLOCK
    else:
        return at


@triton.jit
def keys_of_tile(
    i, o_m, documents, blocks, batch, offset, seq_q, seq_k, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return start, full_start, full and stop of the keys of the queries i + o_m, one tile; and what each query sees.

    Some of the queries see the keys [start, stop), all of them see the keys [full_start, full). With BLOCKS, these
    numbers are places in the listed blocks; see row_at. The last result is (list of blocks, first [M], end [M]): each
    query sees the keys [first, end).
    """
    last = tl.minimum(i + o_m.shape[0], seq_q) - 1
    # fmt: off
    start, full = keys_of(i, documents, batch, offset, seq_q, seq_k, window, CAUSAL, WINDOW, DOCUMENTS)
    full_start, stop = keys_of(last, documents, batch, offset, seq_q, seq_k, window, CAUSAL, WINDOW, DOCUMENTS)
    first, end = keys_of(i + o_m, documents, batch, offset, seq_q, seq_k, window, CAUSAL, WINDOW, DOCUMENTS)
    # fmt: on
    p_list, whole, kept = kept_blocks(blocks, i // BLOCK, seq_q, BLOCKS)
    if BLOCKS:
        start, full_start, full, stop = 0, 0, whole, kept
    return start, full_start, full, stop, (p_list, first, end)
