"""The first kernel of the Hopper backward: statistics of the queries, a zeroed accumulator of dQ, and sums of dO.

Legend: B batch, M rows of a query tile, D0 + D1 head size, tiles = cdiv(seq_q, M).
"""

import triton
import triton.language as tl

from kernels.common.head_rows import LOG2_E


@triton.jit
def rows_of(x, batch, head, o_m, s_batch, s_row, s_head):
    """Return pointers to the rows o_m of one head, [M, 1]; strides are multiples of 16 bytes, as TMA requires."""
    head_start = tl.cast(batch, tl.int64) * s_batch + tl.cast(head, tl.int64) * s_head
    return x + tl.multiple_of(head_start, 8) + tl.multiple_of(tl.cast(o_m, tl.int64) * s_row, 8)[:, None]


@triton.jit
def split_in_bf16(x, y):
    """Return x and y, [M] fp32, as [M, 16] bf16: columns 0 to 2 add up to x, columns 3 to 5 to y (24 bits each)."""
    o_c = tl.arange(0, 16)[None, :]
    parts = tl.zeros([x.shape[0], 16], tl.float32)
    for i in tl.static_range(3):
        x_i, y_i = x.to(tl.bfloat16).to(tl.float32), y.to(tl.bfloat16).to(tl.float32)
        parts += tl.where(o_c == i, x_i[:, None], 0.0) + tl.where(o_c == 3 + i, y_i[:, None], 0.0)
        x, y = x - x_i, y - y_i
    return parts.to(tl.bfloat16)


@triton.jit
def _delta_of_part(p_out, p_dout, p_sums, visible, D: tl.constexpr):
    """Return rowsum(dO o O) over D columns, [M] fp32. If p_sums is given, store dO's sums over the rows, [D]."""
    o_d = tl.arange(0, D)
    b_out = tl.load(p_out + o_d[None, :], mask=visible[:, None], other=0.0)  # [M, D]
    b_dout = tl.load(p_dout + o_d[None, :], mask=visible[:, None], other=0.0).to(tl.float32)  # [M, D]
    if p_sums is not None:
        tl.store(p_sums + o_d, tl.sum(b_dout, 0))
    return tl.sum(b_out.to(tl.float32) * b_dout, 1)


@triton.jit(do_not_specialize=["so_b", "so_t", "so_h", "sdo_b", "sdo_t", "sdo_h", "heads", "seq_q", "seq_k"])
def delta_kernel(
    out, dout, logsumexp, dlogsumexp, numbers, stats, accumulator, turns, deltas, sums,
    so_b, so_t, so_h, sdo_b, sdo_t, sdo_h, heads, seq_q, seq_k, keep, scale,
    M: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    LOGSUMEXP: tl.constexpr, DROPOUT: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Compute the statistics of M queries of one head. Grid: B * heads * tiles.

    - stats: (B * heads * tiles * STATS, M) fp32. Rows are logsumexp in base 2, delta and, with dropout, the bits of
      the random numbers. STATS is 3 with dropout, else 2.
    - stats, if products add the statistics to S and dP: (B * heads * tiles * M, 16) bf16. Columns are split_in_bf16 of
      -logsumexp / scale (natural) and of -delta.
    - accumulator: dQ in fp32. This kernel zeroes it if FUSED.
    - turns: (B * heads * tiles) int32, or None. This kernel zeroes them.
    - deltas: (B, heads, seq_q). This kernel writes them for the plain kernel if not FUSED.
    - sums: (B * tiles, heads, D0 + D1) fp32, the sums of dO over each tile, or None.

    If LOGSUMEXP, its gradient is subtracted from delta. As in the plain kernels, delta is stored times keep = 1 - p.
    """
    STATS: tl.constexpr = 3 if DROPOUT else 2
    tiles = tl.cdiv(seq_q, M)
    tile = tl.program_id(0)
    bh = tile // tiles
    batch, head = bh // heads, bh % heads
    o_m = tile % tiles * M + tl.arange(0, M)
    # delta = rowsum(dO o O)  [M]
    p_out = rows_of(out, batch, head, o_m, so_b, so_t, so_h)
    p_dout = rows_of(dout, batch, head, o_m, sdo_b, sdo_t, sdo_h)
    p_sums, p_sums_1 = sums, sums
    if sums is not None:
        p_sums = sums + ((batch * tiles + tile % tiles) * heads + head) * (D0 + D1)
        p_sums_1 = p_sums + D0
    delta = _delta_of_part(p_out, p_dout, p_sums, o_m < seq_q, D0)
    if D1:
        delta += _delta_of_part(p_out + D0, p_dout + D0, p_sums_1, o_m < seq_q, D1)
    row = tl.cast(bh, tl.int64) * seq_q + o_m
    if LOGSUMEXP:
        delta -= tl.load(dlogsumexp + row, mask=o_m < seq_q, other=0.0)
    # Statistics
    lse = tl.load(logsumexp + row, mask=o_m < seq_q, other=float("-inf"))
    if stats.dtype.element_ty == tl.bfloat16:
        # The main kernel masks a query that sees no key. P of a query past seq_q has no effect: its Q and dO are zero.
        lse = tl.where(lse == float("-inf"), 0.0, lse)
        p_stats = stats + (tl.cast(tile, tl.int64) * M + tl.arange(0, M)[:, None]) * 16 + tl.arange(0, 16)[None, :]
        tl.store(p_stats, split_in_bf16(-lse / scale, -delta * keep))
    else:
        # +inf makes P zero for queries past seq_q and for those that see no key.
        lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
        p_stats = stats + tl.cast(tile, tl.int64) * (STATS * M) + tl.arange(0, M)
        tl.store(p_stats, lse)
        tl.store(p_stats + M, delta * keep)
    if DROPOUT:
        p_numbers = numbers + tl.cast(bh, tl.int64) * (seq_q + seq_k) + o_m
        tl.store(p_stats + 2 * M, tl.load(p_numbers, mask=o_m < seq_q, other=0).to(tl.float32, bitcast=True))
    if turns is not None:
        tl.store(turns + tile, 0)
    # dQ = 0
    if FUSED:
        p_zeros = accumulator + tl.cast(tile, tl.int64) * (M * (D0 + D1)) + tl.arange(0, 1024)
        for chunk in tl.static_range(M * (D0 + D1) // 1024):
            tl.store(p_zeros + chunk * 1024, tl.zeros([1024], tl.float32))
    else:
        tl.store(deltas + row, delta * keep, mask=o_m < seq_q)
