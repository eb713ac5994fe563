"""The last kernel of the Hopper backward: dQ from its fp32 accumulator, and the layout of this accumulator.

Legend: M rows of a query tile, D0 + D1 head size. WARPS_M by WARPS_N warps held a tile of dQ.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.flash2.hopper_backward.statistics import rows_of


@gluon.jit
def in_register_order(x, M: gl.constexpr, D: gl.constexpr, WARPS_M: gl.constexpr, WARPS_N: gl.constexpr):
    """Return x [M, D] as [M * D] in the order of the registers that hold it: four floats a thread, 32 threads, warps.

    Stores in this order are wide and free of bank conflicts. Only finish_kernel has to know this order.
    """
    # A row is (block of all warps, warp, half, row of 8), a column is (warp, block of 8, thread, column of 2).
    x = x.reshape([M // (16 * WARPS_M), WARPS_M, 2, 8, WARPS_N, D // WARPS_N // 8, 4, 2])
    x = x.permute([0, 5, 4, 1, 3, 6, 2, 7]).reshape([M * D])
    return gl.convert_layout(x, gl.BlockedLayout([4], [32], [WARPS_M * WARPS_N], [0]), assert_trivial=True)


@triton.jit
def _finish_part(
    p_part, p_dq, p_sums, visible, scale,
    M: tl.constexpr, D: tl.constexpr, WARPS_M: tl.constexpr, WARPS_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Write D columns of M rows of dQ; undo in_register_order. If p_sums is given, store their sums over the rows."""
    ROWS: tl.constexpr = D if TRANSPOSED else M
    COLUMNS: tl.constexpr = M if TRANSPOSED else D
    x = tl.load(p_part + tl.arange(0, M * D)) * scale  # [M * D]
    x = tl.reshape(x, [ROWS // (16 * WARPS_M), COLUMNS // WARPS_N // 8, WARPS_N, WARPS_M, 8, 4, 2, 2])
    x = tl.reshape(tl.permute(x, [0, 3, 6, 4, 2, 1, 5, 7]), [ROWS, COLUMNS])
    x = tl.trans(x) if TRANSPOSED else x  # [M, D]
    if p_sums is not None:
        tl.store(p_sums + tl.arange(0, D), tl.sum(x, 0))  # rows past the last are zero
    tl.store(p_dq + tl.arange(0, D)[None, :], x.to(p_dq.dtype.element_ty), mask=visible[:, None])


@triton.jit(do_not_specialize=["sdq_b", "sdq_t", "sdq_h", "heads", "seq_q"])
def finish_kernel(
    accumulator, dq, sums, sdq_b, sdq_t, sdq_h, heads, seq_q, scale,
    M: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    WARPS_M: tl.constexpr, WARPS_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Scale and round the accumulator, which may hold dQ TRANSPOSED, to dQ. Grid: B * heads * cdiv(seq_q, M).

    sums: (B * tiles, heads, D0 + D1) fp32, dQ's sums over each tile, or None.
    """
    tiles = tl.cdiv(seq_q, M)
    tile = tl.program_id(0)
    bh = tile // tiles
    o_m = tile % tiles * M + tl.arange(0, M)
    p_dq = rows_of(dq, bh // heads, bh % heads, o_m, sdq_b, sdq_t, sdq_h)
    p_tile = accumulator + tl.cast(tile, tl.int64) * (M * (D0 + D1))
    p_sums, p_sums_1 = sums, sums
    if sums is not None:
        p_sums = sums + ((bh // heads * tiles + tile % tiles) * heads + bh % heads) * (D0 + D1)
        p_sums_1 = p_sums + D0
    _finish_part(p_tile, p_dq, p_sums, o_m < seq_q, scale, M, D0, WARPS_M, WARPS_N, TRANSPOSED)
    if D1:
        p_tile += M * D0
        _finish_part(p_tile, p_dq + D0, p_sums_1, o_m < seq_q, scale, M, D1, WARPS_M, WARPS_N, TRANSPOSED)
