"""The backward of attention on Hopper in Gluon, warp-specialised, with dQ fused: five products a tile, not seven.

The scheme is FlashAttention-3's (Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and
Low-precision", 2024, section 3.1 and appendix B.2). Three launches: delta_kernel prepares the statistics and zeroes an
fp32 accumulator of dQ; main_kernel computes dK and dV, a program owning N keys of one key/value head, and adds what its
keys give to dQ to the accumulator; finish_kernel rounds the accumulator to dQ. In the main kernel one warp loads tiles
by TMA, one sends tiles of dQ off by TMA's reduce-add, and the other warps compute. Additions to dQ come in no fixed
order, so dQ may differ in its last bits from call to call; dK and dV do not. Where that must not be, the main kernel
leaves dQ to the plain one (FUSED is false).

The gradient of a bias that q, k and v have in them is the sum of theirs over the tokens. Of dQ finish_kernel has it in
hand. Of dV = P^T dO it is that of dO, which delta_kernel reads, since the rows of P add up to one. And of dK it is
zero: what a key's bias adds is the same for all scores of a query, of which the softmax sees the differences alone.

M rows of a query tile, N rows of a key tile. Columns come in a part 0 and a part 1, 64 + 16 for heads of 80, so that
no product is padded; part 1 is empty for 64 and 128. Suffixes: _t transposed, [N, M]; _s in shared memory; 16 rounded
to the inputs' dtype. Statistics of a query are its logsumexp in base 2, delta = rowsum(dO o O) and, in dropout, its
random number. Where _statistics says so, logsumexp and delta come off in the products instead.
"""

import itertools
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.common.dropout import threshold
from kernels.common.launching import descriptor, launch, strides
from kernels.flash2.options import Options
from kernels.flash2.tiles import SpecialisedBackward, in_halves, split_head_dim
from kernels.hopper.warpgroups import barrier, hide, multiprocessors, release, signature_of

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_in_halves = gluon.constexpr_function(in_halves)


@builtin
def _tma_add(tensor_desc, coord, src, _semantic=None):
    """Adds a tile of shared memory to global memory by TMA: an instruction Gluon had no function for before 3.8."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    add = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(add, tensor_desc.handle, coord, src.handle)


@triton.jit
def _rows(x, batch, head, o_m, s_batch, s_row, s_head):
    """Pointers to the rows o_m of one head, [M, 1]; strides are multiples of 16 bytes, as TMA asks."""
    head_start = tl.cast(batch, tl.int64) * s_batch + tl.cast(head, tl.int64) * s_head
    return x + tl.multiple_of(head_start, 8) + tl.multiple_of(tl.cast(o_m, tl.int64) * s_row, 8)[:, None]


@triton.jit
def _parts(x, y):
    """x and y, [M] fp32, in columns 0 to 2 and 3 to 5 of [M, 16] in bf16: each the sum of three, of its 24 bits."""
    o_c = tl.arange(0, 16)[None, :]
    parts = tl.zeros([x.shape[0], 16], tl.float32)
    for i in tl.static_range(3):
        x_i, y_i = x.to(tl.bfloat16).to(tl.float32), y.to(tl.bfloat16).to(tl.float32)
        parts += tl.where(o_c == i, x_i[:, None], 0.0) + tl.where(o_c == 3 + i, y_i[:, None], 0.0)
        x, y = x - x_i, y - y_i
    return parts.to(tl.bfloat16)


@triton.jit
def _delta_of_part(p_out, p_dout, p_sums, visible, D: tl.constexpr):
    """rowsum(dO o O) over D columns, [M] fp32; and where they are wanted dO's sums over the rows."""
    o_d = tl.arange(0, D)
    b_out = tl.load(p_out + o_d[None, :], mask=visible[:, None], other=0.0)
    b_dout = tl.load(p_dout + o_d[None, :], mask=visible[:, None], other=0.0).to(tl.float32)
    if p_sums is not None:
        tl.store(p_sums + o_d, tl.sum(b_dout, 0))
    return tl.sum(b_out.to(tl.float32) * b_dout, 1)


@triton.jit(do_not_specialize=["so_b", "so_t", "so_h", "sdo_b", "sdo_t", "sdo_h", "heads", "seq_q", "seq_k"])
def delta_kernel(
    out,
    dout,
    logsumexp,
    dlogsumexp,
    numbers,
    stats,
    accumulator,
    deltas,
    sums,
    so_b,
    so_t,
    so_h,
    sdo_b,
    sdo_t,
    sdo_h,
    heads,
    seq_q,
    seq_k,
    keep,
    scale,
    M: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    LOGSUMEXP: tl.constexpr,
    DROPOUT: tl.constexpr,
    FUSED: tl.constexpr,
):
    """The statistics of a tile of M queries, stats (B * heads * tiles * STATS, M) fp32; STATS is 3 in dropout, else 2.

    Queries past seq_q, and those that see no key, get a logsumexp of +inf there, so that their P is zero. Stats of
    bf16, (B * heads * tiles * M, 16), get the _parts of -logsumexp / scale and -delta, for the products to add to S and
    dP. A query that sees no key is masked there; one past seq_q has a P of no effect, as its Q and dO are zero.

    Where the LOGSUMEXP has a gradient too, it comes off delta, which is stored times `keep`, as in the plain kernels.
    Where FUSED the accumulator of dQ is zeroed; elsewhere deltas, (B, heads, seq_q), is written for the plain kernel.
    Sums, if given, (B * tiles, heads, D0 + D1) fp32, are dO's over each tile.
    Grid: B * heads * cdiv(seq_q, M).
    """
    STATS: tl.constexpr = 3 if DROPOUT else 2
    tiles = tl.cdiv(seq_q, M)
    tile = tl.program_id(0)
    bh = tile // tiles
    batch, head = bh // heads, bh % heads
    o_m = tile % tiles * M + tl.arange(0, M)
    p_out = _rows(out, batch, head, o_m, so_b, so_t, so_h)
    p_dout = _rows(dout, batch, head, o_m, sdo_b, sdo_t, sdo_h)
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
    lse = tl.load(logsumexp + row, mask=o_m < seq_q, other=float("-inf"))
    if stats.dtype.element_ty == tl.bfloat16:
        lse = tl.where(lse == float("-inf"), 0.0, lse)
        p_stats = stats + (tl.cast(tile, tl.int64) * M + tl.arange(0, M)[:, None]) * 16 + tl.arange(0, 16)[None, :]
        tl.store(p_stats, _parts(-lse / scale, -delta * keep))
    else:
        lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
        p_stats = stats + tl.cast(tile, tl.int64) * (STATS * M) + tl.arange(0, M)
        tl.store(p_stats, lse)
        tl.store(p_stats + M, delta * keep)
    if DROPOUT:
        p_numbers = numbers + tl.cast(bh, tl.int64) * (seq_q + seq_k) + o_m
        tl.store(p_stats + 2 * M, tl.load(p_numbers, mask=o_m < seq_q, other=0).to(tl.float32, bitcast=True))
    if FUSED:
        p_zeros = accumulator + tl.cast(tile, tl.int64) * (M * (D0 + D1)) + tl.arange(0, 1024)
        for chunk in tl.static_range(M * (D0 + D1) // 1024):
            tl.store(p_zeros + chunk * 1024, tl.zeros([1024], tl.float32))
    else:
        tl.store(deltas + row, delta * keep, mask=o_m < seq_q)


@gluon.jit
def _in_register_order(x, M: gl.constexpr, D: gl.constexpr, WARPS_M: gl.constexpr, WARPS_N: gl.constexpr):
    """x [M, D] as [M * D] in the order of the registers that hold it: four floats a thread, 32 threads, the warps.

    Stores of it are wide and free of bank conflicts, and how the accumulator is laid out only finish_kernel need know.
    """
    x = x.reshape([M // (16 * WARPS_M), WARPS_M, 2, 8, WARPS_N, D // WARPS_N // 8, 4, 2])
    x = x.permute([0, 5, 4, 1, 3, 6, 2, 7]).reshape([M * D])
    return gl.convert_layout(x, gl.BlockedLayout([4], [32], [WARPS_M * WARPS_N], [0]), assert_trivial=True)


@triton.jit
def _finish_part(
    p_part, p_dq, p_sums, visible, scale,
    M: tl.constexpr, D: tl.constexpr, WARPS_M: tl.constexpr, WARPS_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Undoes _in_register_order for D columns of M rows, or for their transpose, and sums them where that is wanted."""
    ROWS: tl.constexpr = D if TRANSPOSED else M
    COLUMNS: tl.constexpr = M if TRANSPOSED else D
    x = tl.load(p_part + tl.arange(0, M * D)) * scale
    x = tl.reshape(x, [ROWS // (16 * WARPS_M), COLUMNS // WARPS_N // 8, WARPS_N, WARPS_M, 8, 4, 2, 2])
    x = tl.reshape(tl.permute(x, [0, 3, 6, 4, 2, 1, 5, 7]), [ROWS, COLUMNS])
    x = tl.trans(x) if TRANSPOSED else x
    if p_sums is not None:
        tl.store(p_sums + tl.arange(0, D), tl.sum(x, 0))  # rows past the last are zero
    tl.store(p_dq + tl.arange(0, D)[None, :], x.to(p_dq.dtype.element_ty), mask=visible[:, None])


@triton.jit(do_not_specialize=["sdq_b", "sdq_t", "sdq_h", "heads", "seq_q"])
def finish_kernel(
    accumulator,
    dq,
    sums,
    sdq_b,
    sdq_t,
    sdq_h,
    heads,
    seq_q,
    scale,
    M: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    WARPS_M: tl.constexpr,
    WARPS_N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """dQ from its accumulator, which may hold it TRANSPOSED, scaled and rounded.

    Sums, if given, (B * tiles, heads, D0 + D1) fp32, are dQ's over each tile. Grid: B * heads * cdiv(seq_q, M).
    """
    tiles = tl.cdiv(seq_q, M)
    tile = tl.program_id(0)
    bh = tile // tiles
    o_m = tile % tiles * M + tl.arange(0, M)
    p_dq = _rows(dq, bh // heads, bh % heads, o_m, sdq_b, sdq_t, sdq_h)
    p_tile = accumulator + tl.cast(tile, tl.int64) * (M * (D0 + D1))
    p_sums, p_sums_1 = sums, sums
    if sums is not None:
        p_sums = sums + ((bh // heads * tiles + tile % tiles) * heads + bh % heads) * (D0 + D1)
        p_sums_1 = p_sums + D0
    _finish_part(p_tile, p_dq, p_sums, o_m < seq_q, scale, M, D0, WARPS_M, WARPS_N, TRANSPOSED)
    if D1:
        p_tile += M * D0
        _finish_part(p_tile, p_dq + D0, p_sums_1, o_m < seq_q, scale, M, D1, WARPS_M, WARPS_N, TRANSPOSED)


@gluon.jit
def _load(x0, x1, x0_s, x1_s, bar, batch, row, head, BYTES: gl.constexpr, D1: gl.constexpr):
    """One tile of x (B, length, heads, D0 + D1) by TMA; BYTES counts all that the barrier is to wait for."""
    mbarrier.expect(bar, BYTES)
    tma.async_copy_global_to_shared(x0, [batch, row, head, 0], bar, x0_s)
    if D1:
        tma.async_copy_global_to_shared(x1, [batch, row, head, 64], bar, x1_s)


@gluon.constexpr_function
def _rows_of_warps(m, warps):
    """How many warps lie one below the other on dQ, of m rows; the others lie beside them."""
    return warps if m >= 16 * warps else 4


@gluon.constexpr_function
def _is_transposed(n, head_dim):
    """Whether dQ is computed as K^T dS, with K^T, and V, held in registers all along."""
    return n == head_dim == 64


@gluon.constexpr_function
def _each(warps):
    """Whether each thread gives a slot of dO back for itself, see warpgroups.release: those of two warpgroups.

    Head 128, causal, at 8k on an H200 is 3 to 4 % faster by it. One warpgroup has but few warps to wait for: 1 to 4 %
    slower.
    """
    return warps > 4


@gluon.jit
def _producer(inputs, stats, buffers, stats_s, bars, batch, kv_head, j, heads, groups, tiles, first, D1: gl.constexpr):
    """One warp: K and V once, then Q, its statistics and dO through rings of tiles.

    A slot of Q needs no barrier that tells when it is free. The consumers free dO of a tile when all are done with Q of
    the tile before. So once dO of tile t - OS is free, for which this warp waits at tile t, Q of tile t - 1 - OS is:
    with one slot more than of dO that is the wanted one, if it waits before it loads Q, with two if it does so after.
    """
    q0, q1, k0, k1, v0, v1, do0, do1 = inputs
    q0_s, q1_s, k0_s, k1_s, v0_s, v1_s, do0_s, do1_s = buffers
    k_full, q_full, do_full, do_empty, _ = bars
    M: gl.constexpr = q0.block_type.shape[1]
    QS: gl.constexpr = q0_s.shape[0]
    OS: gl.constexpr = do0_s.shape[0]
    STATS: gl.constexpr = stats_s.shape[0] // QS
    ROWS: gl.constexpr = stats.block_type.shape[0]
    K_BYTES: gl.constexpr = k0.block_type.nbytes + (k1.block_type.nbytes if D1 else 0)
    DO_BYTES: gl.constexpr = q0.block_type.nbytes + (q1.block_type.nbytes if D1 else 0)
    Q_BYTES: gl.constexpr = DO_BYTES + STATS * stats.block_type.nbytes
    _load(k0, k1, k0_s, k1_s, k_full.index(0), batch, j, kv_head, K_BYTES, D1)
    t = 0
    for g in range(groups):
        for m in range(first, tiles):
            head = kv_head * groups + g
            row = STATS * ROWS * ((batch * heads + head) * tiles + m)
            s, o = t % QS, t % OS
            bar = q_full.index(s)
            if QS == OS + 1:
                mbarrier.wait(do_empty.index(o), (t // OS & 1) ^ 1)
            _load(q0, q1, q0_s.index(s), q1_s.index(s), bar, batch, m * M, head, Q_BYTES, D1)
            for i in gl.static_range(STATS):
                tma.async_copy_global_to_shared(stats, [row + i, 0], bar, stats_s.index(STATS * s + i))
            if t == 0:  # S needs K and Q first
                _load(v0, v1, v0_s, v1_s, k_full.index(1), batch, j, kv_head, K_BYTES, D1)
            if QS == OS + 2:
                mbarrier.wait(do_empty.index(o), (t // OS & 1) ^ 1)
            _load(do0, do1, do0_s.index(o), do1_s.index(o), do_full.index(o), batch, m * M, head, DO_BYTES, D1)
            t += 1


@gluon.jit
def _reducer(dq0, dq1, dq0_s, dq1_s, bars, batch, kv_head, heads, groups, tiles, first, D1: gl.constexpr):
    """One warp: adds each finished tile of dQ to the accumulator. A tile of dQ is done when the dO it used is free."""
    _, _, _, do_empty, dq_empty = bars
    ROWS: gl.constexpr = dq0.block_type.shape[0] + (dq1.block_type.shape[0] if D1 else 0)
    OS: gl.constexpr = do_empty.shape[0]
    t = 0
    for g in range(groups):
        for m in range(first, tiles):
            row = ((batch * heads + kv_head * groups + g) * tiles + m) * ROWS
            mbarrier.wait(do_empty.index(t % OS), t // OS & 1)
            _tma_add(dq0, [row, 0], dq0_s)
            if D1:
                _tma_add(dq1, [row + dq0.block_type.shape[0], 0], dq1_s)
            tma.store_wait(0)
            mbarrier.arrive(dq_empty, count=1)
            t += 1


@gluon.jit
def _transposed_product(x0, x1, y0, y1, zeros, D1: gl.constexpr):
    """x y^T [N, M], not waited for; x [N, D0 + D1] and y [M, D0 + D1] in shared memory, or x in registers."""
    product = warpgroup_mma(x0, y0.permute([1, 0]), zeros, use_acc=False, is_async=True)
    if D1:
        product = warpgroup_mma(x1, y1.permute([1, 0]), product, is_async=True)
    return product


@gluon.constexpr_function
def _gradient_layout(columns, warps):
    """Of dK or dV [N, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon.jit
def _add_product(x, y0, y1, z0, z1, D1: gl.constexpr, WARPS: gl.constexpr):
    """z + x y [N, D0 + D1], not waited for; x [N, M], rounded, in registers, y [M, D0 + D1] in shared memory."""
    A0L: gl.constexpr = gl.DotOperandLayout(0, _gradient_layout(y0.shape[1], WARPS), 2)
    z0 = warpgroup_mma(gl.convert_layout(x, A0L), y0, z0, is_async=True)
    if D1:
        A1L: gl.constexpr = gl.DotOperandLayout(0, _gradient_layout(D1, WARPS), 2)
        z1 = warpgroup_mma(gl.convert_layout(x, A1L), y1, z1, is_async=True)
    return z0, z1


@gluon.jit
def _ones(first: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """[ROWS, 16] in bf16, one in the three columns from a first one on: times _parts, transposed, it is a statistic."""
    o_c = gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    ones = gl.full([ROWS, 16], 1.0, gl.float32, LAYOUT)
    return gl.where((o_c >= first) & (o_c < first + 3), ones, 0.0).to(gl.bfloat16)


@gluon.jit
def _mask(s_t, j, i, seq_k, offset, CAUSAL: gl.constexpr):
    """S^T with -inf where query i + m may not see key j + n. Under the causal mask no query sees past seq_k."""
    LAYOUT: gl.constexpr = s_t.type.layout
    o_n = gl.arange(0, s_t.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    if CAUSAL:
        return hide(s_t, o_n + (j - i - offset), False)
    else:
        return gl.where((j + o_n < seq_k)[:, None], s_t, float("-inf"))


@gluon.jit
def _probabilities(s_t, lse, j, i, masked, scale_log2, CAUSAL: gl.constexpr):
    """P^T of the keys from j on and the queries from i on, masked where there are queries before `full`."""
    full, seq_k, offset = masked
    if i < full:
        s_t = _mask(s_t, j, i, seq_k, offset, CAUSAL)
    return gl.exp2(s_t * scale_log2 - lse)


@gluon.jit
def _whole_tile(
    keys, queries, stats_s, row, ds_s, q_full, q_phase, do_full, do_phase, dv, dv_1, ones,
    j, i, masked, scale_log2, dropout,
    SL: gl.constexpr, D1: gl.constexpr, WARPS: gl.constexpr, CAUSAL: gl.constexpr, DROPOUT: gl.constexpr,
    FUSED: gl.constexpr,
):  # fmt: skip
    """dS^T of a tile of queries, rounded, and stored where FUSED, and dV with P^T dO issued.

    Two warpgroups have that wait until dS is stored, LATE, see _consumer. Statistics are in stats_s from `row` on.
    """
    k0, k1, v0, v1 = keys
    q0, q1, do0, do1 = queries
    of_lse, of_delta = ones
    p_keys, mask, threshold = dropout
    M: gl.constexpr = q0.shape[0]
    PARTS: gl.constexpr = 2 if D1 else 1
    ROW: gl.constexpr = gl.SliceLayout(0, SL)
    dtype: gl.constexpr = q0.dtype
    IN_PRODUCTS: gl.constexpr = stats_s.dtype == gl.bfloat16
    LATE: gl.constexpr = FUSED and WARPS > 4 and not IN_PRODUCTS
    N: gl.constexpr = v0.shape[0]
    zeros = gl.zeros([N, M], gl.float32, SL)
    mbarrier.wait(q_full, q_phase)
    s_t = _transposed_product(k0, k1, q0, q1, zeros, D1)
    if IN_PRODUCTS:
        b_stats = stats_s.index(row).permute([1, 0])
        s_t = warpgroup_mma(of_lse, b_stats, s_t, is_async=True)
    mbarrier.wait(do_full, do_phase)
    dp_t = _transposed_product(v0, v1, do0, do1, zeros, D1)
    if IN_PRODUCTS:
        dp_t = warpgroup_mma(of_delta, b_stats, dp_t, is_async=True)
        s_t = warpgroup_mma_wait(2, deps=(s_t,))
        lse, delta = 0.0, 0.0
    else:
        s_t = warpgroup_mma_wait(PARTS, deps=(s_t,))
        # Read no sooner: these registers are wanted until S is done. So for delta.
        lse = stats_s.index(row).reshape([M]).load(ROW)[None, :]
    p_t = _probabilities(s_t, lse, j, i, masked, scale_log2, CAUSAL)
    if DROPOUT:
        of_keys = gl.load(p_keys, mask=mask, other=0)
        of_keys = of_keys.to(gl.uint32, bitcast=True)
        of_queries = stats_s.index(row + 2).reshape([M]).load(ROW).to(gl.uint32, bitcast=True)
        kept = of_keys[:, None] * of_queries[None, :] >= threshold.to(gl.uint32, bitcast=True)
        p_t = gl.where(kept, p_t, -p_t)
        p16 = gl.maximum(p_t, 0.0).to(dtype)
    else:
        p16 = p_t.to(dtype)
    if not LATE:
        dv, dv_1 = _add_product(p16, do0, do1, dv, dv_1, D1, WARPS)
    dp_t = warpgroup_mma_wait(0 if LATE else PARTS, deps=(dp_t,))
    if not IN_PRODUCTS:
        delta = stats_s.index(row + 1).reshape([M]).load(ROW)[None, :]
    if DROPOUT:
        ds16 = (p_t * gl.where(p_t > 0.0, dp_t - delta, delta)).to(dtype)
    else:
        ds16 = (p_t * (dp_t - delta)).to(dtype)
    if FUSED:
        ds_s.store(ds16)
        fence_async_shared()
    if LATE:
        dv, dv_1 = _add_product(p16, do0, do1, dv, dv_1, D1, WARPS)
    return ds16, dv, dv_1


@gluon.jit
def _half(x, h: gl.constexpr):
    """The first or the second half of the rows of a tile in shared memory."""
    ROWS: gl.constexpr = x.shape[0] // 2
    return x.slice(h * ROWS, ROWS)


@gluon.jit
def _product_of_half(x0, x1, y0, y1, h: gl.constexpr, ones, stats, zeros, D1: gl.constexpr, IN_PRODUCTS: gl.constexpr):
    """_transposed_product of one half of y's rows, less a statistic of theirs where that comes IN_PRODUCTS."""
    product = _transposed_product(x0, x1, _half(y0, h), _half(y1, h), zeros, D1)
    if IN_PRODUCTS:
        product = warpgroup_mma(ones, _half(stats, h).permute([1, 0]), product, is_async=True)
    return product


@gluon.jit
def _statistic(stats, row: gl.constexpr, h: gl.constexpr, SL: gl.constexpr, IN_PRODUCTS: gl.constexpr):
    """What is still to be taken off S or dP of one half: a statistic of its queries, for all keys."""
    if IN_PRODUCTS:
        return 0.0
    else:
        return _half(stats[row], h).load(gl.SliceLayout(0, SL))[None, :]


@gluon.jit
def _both_halves(
    keys, queries, stats, ds_s, q_full, q_phase, do_full, do_phase, dk, dk_1, dv, dv_1, j, i, masked, scale_log2,
    SL: gl.constexpr, D1: gl.constexpr, WARPS: gl.constexpr, CAUSAL: gl.constexpr, IN_PRODUCTS: gl.constexpr,
):  # fmt: skip
    """dS^T of the second half of a tile of queries, rounded, and dK, dV with all but the second half's dS^T Q issued.

    The second half's softmax runs under products of both.
    """
    k0, k1, v0, v1 = keys
    q0, q1, do0, do1 = queries
    M: gl.constexpr = q0.shape[0] // 2
    N: gl.constexpr = k0.shape[0]
    PARTS: gl.constexpr = 2 if D1 else 1
    dtype: gl.constexpr = q0.dtype
    zeros = gl.zeros([N, M], gl.float32, SL)
    of_lse, of_delta = 0, 0
    if IN_PRODUCTS:
        of_lse = _ones(0, N, gl.DotOperandLayout(0, SL, 2))
        of_delta = _ones(3, N, gl.DotOperandLayout(0, SL, 2))
    S_PARTS: gl.constexpr = PARTS + 1 if IN_PRODUCTS else PARTS  # products of S, and of dP
    mbarrier.wait(q_full, q_phase)
    s_t = _product_of_half(k0, k1, q0, q1, 0, of_lse, stats[0], zeros, D1, IN_PRODUCTS)
    mbarrier.wait(do_full, do_phase)
    dp_t = _product_of_half(v0, v1, do0, do1, 0, of_delta, stats[0], zeros, D1, IN_PRODUCTS)
    s_t = warpgroup_mma_wait(S_PARTS, deps=(s_t,))
    p_t = _probabilities(s_t, _statistic(stats, 0, 0, SL, IN_PRODUCTS), j, i, masked, scale_log2, CAUSAL)
    p16 = p_t.to(dtype)
    dp_t = warpgroup_mma_wait(0, deps=(dp_t,))
    ds16 = (p_t * (dp_t - _statistic(stats, 1, 0, SL, IN_PRODUCTS))).to(dtype)
    ds_s.slice(0, M, 1).store(ds16)
    dv, dv_1 = _add_product(p16, _half(do0, 0), _half(do1, 0), dv, dv_1, D1, WARPS)
    s_t = _product_of_half(k0, k1, q0, q1, 1, of_lse, stats[0], zeros, D1, IN_PRODUCTS)
    dp_t = _product_of_half(v0, v1, do0, do1, 1, of_delta, stats[0], zeros, D1, IN_PRODUCTS)
    dk, dk_1 = _add_product(ds16, _half(q0, 0), _half(q1, 0), dk, dk_1, D1, WARPS)
    s_t = warpgroup_mma_wait(S_PARTS + PARTS, deps=(s_t,))
    p_t = _probabilities(s_t, _statistic(stats, 0, 1, SL, IN_PRODUCTS), j, i + M, masked, scale_log2, CAUSAL)
    p16 = p_t.to(dtype)
    dp_t = warpgroup_mma_wait(PARTS, deps=(dp_t,))
    ds16 = (p_t * (dp_t - _statistic(stats, 1, 1, SL, IN_PRODUCTS))).to(dtype)
    ds_s.slice(M, M, 1).store(ds16)
    fence_async_shared()
    dv, dv_1 = _add_product(p16, _half(do0, 1), _half(do1, 1), dv, dv_1, D1, WARPS)
    return ds16, dk, dk_1, dv, dv_1


@gluon.jit
def _write(outputs, buffers, dk, dk_1, dv, dv_1, scale, keep_scale, batch, j, kv_head, D1: gl.constexpr):
    """Writes dK and dV, scaled and rounded, by TMA out of the shared memory of K and V, which nobody reads any more."""
    dk0, dk1, dv0, dv1 = outputs
    k0_s, k1_s, v0_s, v1_s = buffers
    dtype: gl.constexpr = k0_s.dtype
    if D1:
        dk, dv, dk_1, dv_1 = warpgroup_mma_wait(0, deps=(dk, dv, dk_1, dv_1))
    else:
        dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
    barrier()
    v0_s.reshape(dv.shape).store((dv * keep_scale).to(dtype))
    k0_s.reshape(dk.shape).store((dk * (scale * keep_scale)).to(dtype))
    if D1:
        v1_s.reshape(dv_1.shape).store((dv_1 * keep_scale).to(dtype))
        k1_s.reshape(dk_1.shape).store((dk_1 * (scale * keep_scale)).to(dtype))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(dv0, [batch, j, kv_head, 0], v0_s)
    tma.async_copy_shared_to_global(dk0, [batch, j, kv_head, 0], k0_s)
    if D1:
        tma.async_copy_shared_to_global(dv1, [batch, j, kv_head, 64], v1_s)
        tma.async_copy_shared_to_global(dk1, [batch, j, kv_head, 64], k1_s)
    tma.store_wait(0)


@gluon.jit
def _consumer(
    outputs, buffers, stats_s, ds_s, dq0_s, dq1_s, bars,
    batch, kv_head, j, shape, tiles, first, full, scale, dropout,
    WARPS: gl.constexpr, D1: gl.constexpr, CAUSAL: gl.constexpr, DROPOUT: gl.constexpr, FUSED: gl.constexpr,
):  # fmt: skip
    """The computing warps: dK and dV of one key tile stay in registers over all the query tiles that see it.

    Both S^T = K Q^T and dP^T = V dO^T are issued before the exponential, which hides under the second; and dQ is sent
    off while dS^T Q runs. One warpgroup hides dS under P^T dO. Two have P^T dO wait until dS is stored, as
    FlashAttention-3's do: exponentials and dS then run into one another, and 128 x 128 tiles of heads of 64 fit in the
    registers. Where statistics come IN_PRODUCTS there are registers enough, and no load that dS waits for. P^T and dS^T
    are multiplied from registers; dS^T goes to shared memory too, to be read there as the dS of dQ = dS K. In dropout
    the sign of P tells from there on what is dropped.

    Heads of 80 have tiles of 128 queries at long lengths, computed IN_HALVES up to their dQ, of which then each
    warpgroup has 64 rows and all columns. Of 64 queries it would have all rows and half of the columns, and both would
    read all of dS; of 64 keys and queries twice as much would be added to dQ. In sustained load on an H200, where the
    board's power is the limit, their backward at 8k is 6.6 % faster than by the latter, and the products beside it too.

    A product of 64 columns reads its operands as fast as shared memory gives them. So 64 keys have V in registers, and
    where there is no part 1, K and K^T too: dQ is then computed as its transpose, K^T dS^T. Not where dQ is left
    out: there ptxas 12.8 gives P the registers of K, which the next tile needs.
    """
    heads, groups, seq_q, seq_k = shape
    numbers, threshold, keep_scale = dropout
    offset = seq_k - seq_q
    q0_s, q1_s, k0_s, k1_s, v0_s, v1_s, do0_s, do1_s = buffers
    k_full, q_full, do_full, do_empty, dq_empty = bars
    M: gl.constexpr = q0_s.shape[2]
    N: gl.constexpr = k0_s.shape[1]
    D0: gl.constexpr = k0_s.shape[3]
    QS: gl.constexpr = q0_s.shape[0]
    OS: gl.constexpr = do0_s.shape[0]
    STATS: gl.constexpr = stats_s.shape[0] // QS
    PARTS: gl.constexpr = 2 if D1 else 1
    IN_PRODUCTS: gl.constexpr = stats_s.dtype == gl.bfloat16
    IN_HALVES: gl.constexpr = FUSED and _in_halves(M, D0 + D1) and not DROPOUT
    WM: gl.constexpr = _rows_of_warps(M, WARPS)
    WN: gl.constexpr = WARPS // WM
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, M // 2 if IN_HALVES else M, 16])
    K0L: gl.constexpr = _gradient_layout(D0, WARPS)
    Q0L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WM, WN], [16, D0 // WN, 16])
    if D1:
        K1L: gl.constexpr = _gradient_layout(D1, WARPS)
        Q1L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WM, WN], [16, D1 // WN, 16])
    V_HELD: gl.constexpr = FUSED and N == 64 and D0 == 64
    HELD: gl.constexpr = FUSED and _is_transposed(N, D0 + D1)
    QTL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, M, 16])

    b_k0, b_v0 = k0_s.reshape([N, D0]), v0_s.reshape([N, D0])
    b_k1, b_v1 = b_k0, b_v0
    dk = warpgroup_mma_init(gl.zeros([N, D0], gl.float32, K0L))
    dv = warpgroup_mma_init(gl.zeros([N, D0], gl.float32, K0L))
    dk_1, dv_1 = 0, 0
    if D1:
        b_k1, b_v1 = k1_s.reshape([N, D1]), v1_s.reshape([N, D1])
        dk_1 = warpgroup_mma_init(gl.zeros([N, D1], gl.float32, K1L))
        dv_1 = warpgroup_mma_init(gl.zeros([N, D1], gl.float32, K1L))
    scale_log2 = scale * LOG2_E
    masked = (full, seq_k, offset)
    if DROPOUT:
        o_j = j + gl.arange(0, N, layout=gl.SliceLayout(1, SL))
        p_keys = numbers + (batch * heads + kv_head * groups).to(gl.int64) * (seq_q + seq_k) + seq_q + o_j
    of_lse, of_delta = 0, 0
    if IN_PRODUCTS and not IN_HALVES:
        of_lse = _ones(0, N, gl.DotOperandLayout(0, SL, 2))
        of_delta = _ones(3, N, gl.DotOperandLayout(0, SL, 2))
    mbarrier.wait(k_full.index(0), 0)
    mbarrier.wait(k_full.index(1), 0)
    a_k0, a_v0 = b_k0, b_v0
    if V_HELD:
        a_v0 = b_v0.load(gl.DotOperandLayout(0, SL, 2))
    if HELD:
        a_k0 = b_k0.load(gl.DotOperandLayout(0, SL, 2))
        a_kt = b_k0.permute([1, 0]).load(gl.DotOperandLayout(0, QTL, 2))
    t = 0
    for g in range(groups):
        for m in range(first, tiles):
            s, o = t % QS, t % OS
            b_ds = ds_s.index(t % ds_s.shape[0]) if FUSED else ds_s
            b_q0, b_do0 = q0_s.index(s).reshape([M, D0]), do0_s.index(o).reshape([M, D0])
            b_q1, b_do1 = b_q0, b_do0
            if D1:
                b_q1, b_do1 = q1_s.index(s).reshape([M, D1]), do1_s.index(o).reshape([M, D1])
            if FUSED and _each(WARPS) and ds_s.shape[0] == 1:
                # Until both warpgroups have given back dO of the tile before, and so are done with its dS too.
                mbarrier.wait(do_empty.index((t + OS - 1) % OS), (t + 2 * OS - 1) // OS & 1)
            if IN_HALVES:
                b_lse, b_delta = stats_s.index(STATS * s), stats_s.index(STATS * s)  # one tile of both IN_PRODUCTS
                if not IN_PRODUCTS:
                    b_lse, b_delta = b_lse.reshape([M]), stats_s.index(STATS * s + 1).reshape([M])
                ds16, dk, dk_1, dv, dv_1 = _both_halves(
                    (a_k0, b_k1, a_v0, b_v1), (b_q0, b_q1, b_do0, b_do1), (b_lse, b_delta), b_ds,
                    q_full.index(s), t // QS & 1, do_full.index(o), t // OS & 1, dk, dk_1, dv, dv_1,
                    j, m * M, masked, scale_log2, SL, D1, WARPS, CAUSAL, IN_PRODUCTS,
                )  # fmt: skip
                b_q0, b_q1 = _half(b_q0, 1), _half(b_q1, 1)
            else:
                dropped = (0, 0, threshold)
                if DROPOUT:
                    dropped = (p_keys + g * (seq_q + seq_k), o_j < seq_k, threshold)
                ds16, dv, dv_1 = _whole_tile(
                    (a_k0, b_k1, a_v0, b_v1), (b_q0, b_q1, b_do0, b_do1), stats_s, STATS * s, b_ds,
                    q_full.index(s), t // QS & 1, do_full.index(o), t // OS & 1, dv, dv_1, (of_lse, of_delta),
                    j, m * M, masked, scale_log2, dropped,
                    SL, D1, WARPS, CAUSAL, DROPOUT, FUSED,
                )  # fmt: skip
            if FUSED:
                barrier()
            if HELD:
                dq = gl.zeros([D0, M], gl.float32, QTL)
                dq = warpgroup_mma(a_kt, b_ds, dq, use_acc=False, is_async=True)
            elif FUSED:
                dq = gl.zeros([M, D0], gl.float32, Q0L)
                dq = warpgroup_mma(b_ds.permute([1, 0]), b_k0, dq, use_acc=False, is_async=True)
                if D1:
                    dq_1 = gl.zeros([M, D1], gl.float32, Q1L)
                    dq_1 = warpgroup_mma(b_ds.permute([1, 0]), b_k1, dq_1, use_acc=False, is_async=True)
            dk, dk_1 = _add_product(ds16, b_q0, b_q1, dk, dk_1, D1, WARPS)
            if D1:
                dv, dv_1 = warpgroup_mma_wait(PARTS, deps=(dv, dv_1))
                dv_1 = warpgroup_mma_init(dv_1)
            else:
                dv = warpgroup_mma_wait(PARTS, deps=(dv,))
            dv = warpgroup_mma_init(dv)
            if FUSED:
                mbarrier.wait(dq_empty, (t & 1) ^ 1)
                dq = warpgroup_mma_wait(PARTS, deps=(dq,))
                if HELD:
                    dq0_s.reshape([M * D0]).store(_in_register_order(dq, D0, M, WARPS, 1))
                else:
                    dq0_s.reshape([M * D0]).store(_in_register_order(dq, M, D0, WM, WN))
                if D1:
                    dq_1 = warpgroup_mma_wait(PARTS, deps=(dq_1,))
                    dq1_s.reshape([M * D1]).store(_in_register_order(dq_1, M, D1, WM, WN))
                fence_async_shared()
            release(do_empty.index(o), _each(WARPS))
            if D1:
                dk, dk_1 = warpgroup_mma_wait(0, deps=(dk, dk_1))
                dk_1 = warpgroup_mma_init(dk_1)
            else:
                dk = warpgroup_mma_wait(0, deps=(dk,))
            dk = warpgroup_mma_init(dk)
            t += 1

    _write(outputs, (k0_s, k1_s, v0_s, v1_s), dk, dk_1, dv, dv_1, scale, keep_scale, batch, j, kv_head, D1)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(COUNT):
        mbarrier.init(bars.index(s), count=ARRIVALS)
    return bars


@gluon.jit
def _shared(x, STAGES: gl.constexpr):
    shape: gl.constexpr = [STAGES] + x.block_type.shape  # noqa: RUF005 (Gluon knows no starred lists)
    return gl.allocate_shared_memory(x.dtype, shape, x.layout)


@gluon.jit
def _place(all_heads, key_tiles, section):
    """This program's head and key tile: one section of heads before the next, and in it the first tiles of keys first.

    Under a causal mask those take longest.
    """
    program = gl.program_id(0)
    first = program // (section * key_tiles) * section
    program -= first * key_tiles
    width = gl.minimum(section, all_heads - first)
    return first + program % width, program // width


@gluon.jit(do_not_specialize=["batches", "heads", "groups", "seq_q", "seq_k", "section", "threshold"])
def main_kernel(
    q0, q1, k0, k1, v0, v1, do0, do1, stats, dq0, dq1, dk0, dk1, dv0, dv1, numbers,
    batches, heads, groups, seq_q, seq_k, section, scale, threshold, keep_scale,
    D1: gl.constexpr, WARPS: gl.constexpr, OS: gl.constexpr, CAUSAL: gl.constexpr, DROPOUT: gl.constexpr,
    FUSED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dK and dV, and the sum of dQ: WARPS warps compute, and two more, of REGISTERS each, load tiles and add up dQ.

    q0 to do1, dk0 to dv1: descriptors of the two parts of (B, length, heads, HEAD_DIM), None for an empty part 1.
    stats as delta_kernel writes it; dq0, dq1 the accumulator in rows of 256 floats, None where dQ is not FUSED; numbers
    dropout's, or None.
    Grid: B * (heads / groups) * cdiv(seq_k, N), in the order of _place.
    """
    M: gl.constexpr = q0.block_type.shape[1]
    N: gl.constexpr = k0.block_type.shape[1]
    QS: gl.constexpr = OS + 1 if WARPS > 4 else OS + 2  # see _producer
    dtype: gl.constexpr = q0.dtype
    kv_heads = heads // groups
    bg, tile = _place(batches * kv_heads, gl.cdiv(seq_k, N), section)
    batch, kv_head, j = bg // kv_heads, bg % kv_heads, tile * N
    tiles = gl.cdiv(seq_q, M)
    first, full = 0, 0
    if CAUSAL:
        first = gl.maximum(j - (seq_k - seq_q), 0) // M
        full = gl.maximum(j + N - 1 - (seq_k - seq_q), 0)
    full = gl.where(j + N > seq_k, seq_q, full)

    k0_s = gl.allocate_shared_memory(dtype, k0.block_type.shape, k0.layout)
    v0_s = gl.allocate_shared_memory(dtype, v0.block_type.shape, v0.layout)
    q0_s = _shared(q0, QS)
    do0_s = _shared(do0, OS)
    STATS: gl.constexpr = 1 if stats.dtype == gl.bfloat16 else 3 if DROPOUT else 2  # tiles of one query tile
    stats_s = _shared(stats, STATS * QS)
    ds_s, dq0_s, dq1_s = k0_s, stats_s.index(0), stats_s.index(0)
    if FUSED:
        # For its dQ each of two warpgroups reads dS that the other has stored. With a second tile it need not wait for
        # that before it stores the next: heads of 64 at 8k are 3 % faster so, of 128 as fast as without waiting. Beside
        # halves there is no room for it.
        DS: gl.constexpr = 2 if _each(WARPS) and not _in_halves(M, k0.block_type.shape[3] + D1) else 1
        ds_s = gl.allocate_shared_memory(dtype, [DS, N, M], gl.NVMMASharedLayout.get_default_for([N, M], dtype))
        dq0_s = gl.allocate_shared_memory(gl.float32, dq0.block_type.shape, dq0.layout)
        if D1:
            dq1_s = gl.allocate_shared_memory(gl.float32, dq1.block_type.shape, dq1.layout)
        else:
            dq1, dq1_s = dq0, dq0_s
    else:  # no tile of dQ will come
        dq0, dq1 = stats, stats
    if D1:
        k1_s = gl.allocate_shared_memory(dtype, k1.block_type.shape, k1.layout)
        v1_s = gl.allocate_shared_memory(dtype, v1.block_type.shape, v1.layout)
        q1_s = _shared(q1, QS)
        do1_s = _shared(do1, OS)
    else:
        k1_s, v1_s, q1_s, do1_s = k0_s, v0_s, q0_s, do0_s
        q1, k1, v1, do1, dk1, dv1 = q0, k0, v0, do0, dk0, dv0
    do_empty = _barriers(OS, 32 * WARPS if _each(WARPS) else 1)
    bars = (_barriers(2, 1), _barriers(QS, 1), _barriers(OS, 1), do_empty, _barriers(1, 1).index(0))
    inputs = (q0, q1, k0, k1, v0, v1, do0, do1)
    outputs = (dk0, dk1, dv0, dv1)
    buffers = (q0_s, q1_s, k0_s, k1_s, v0_s, v1_s, do0_s, do1_s)
    shape = (heads, groups, seq_q, seq_k)
    dropout = (numbers, threshold, keep_scale)
    added = groups if FUSED else 0
    gl.warp_specialize(
        [
            (
                _consumer,
                (outputs, buffers, stats_s, ds_s, dq0_s, dq1_s, bars, batch, kv_head, j, shape, tiles, first, full,
                 scale, dropout, WARPS, D1, CAUSAL, DROPOUT, FUSED),
            ),
            (
                _producer,
                (inputs, stats, buffers, stats_s, bars, batch, kv_head, j, heads, groups, tiles, first, D1),
            ),
            (
                _reducer,
                (dq0, dq1, dq0_s, dq1_s, bars, batch, kv_head, heads, added, tiles, first, D1),
            ),
        ],
        [1, 1],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


_LOADER_REGISTERS = 24  # the least there is
_GLUON_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    if dtype == torch.float32:
        return gl.NVMMASharedLayout(0, 32, len(block))
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON_TYPES[dtype])


def _tiles_of(x: Tensor, *block: int) -> TensorDescriptor:
    return descriptor(x, list(block), _layout(block, x.dtype))


@cache
def _section(key_tiles: int, resident: int, causal: bool, device: torch.device) -> int:
    """How many heads _place deals out together: as many as run at a time where tiles differ in length, else one."""
    programs = resident * multiprocessors(device)
    return max(programs // key_tiles, 1) if causal else 1


def _statistics(tiles: int, q: Tensor, options: Options, config: SpecialisedBackward) -> Tensor:
    """Room for the statistics of so many tiles of queries, for delta_kernel to fill.

    In heads of 128, and in halves, in bf16 they come off S and dP in the products themselves, from one tile of 16
    columns beside Q and dO: read by the threads they would wait behind the products' operands, for which shared memory
    is just fast enough. The backward at 8k on an H200 is 2.9 and 3.5 % faster by it in two runs with a causal mask, 5.3
    and 6.7 without, at 2k 2.1 and 2.9; that of heads of 80 in halves, in sustained load, 3.3 %. Elsewhere the columns
    cost more than that saves. fp16 has not the range for all there may be, and dropout needs delta by itself.
    """
    in_products = q.shape[3] == 128 or in_halves(config.m, q.shape[3])
    if in_products and q.dtype == torch.bfloat16 and options.dropout_p == 0:
        return torch.empty((tiles * config.m, 16), dtype=q.dtype, device=q.device)
    rows = (3 if options.dropout_p > 0 else 2) * tiles
    return torch.empty((rows, config.m), dtype=torch.float32, device=q.device)


def _main_arguments(
    accumulator: Tensor | None,
    stats,
    dk,
    dv,
    dout,
    q,
    k,
    v,
    options: Options,
    section: int,
    config: SpecialisedBackward,
) -> tuple[tuple, tuple, tuple]:
    """The tensors, scalars and constants of main_kernel; without an accumulator it leaves dQ out."""
    batch, seq_q, heads, head_dim = q.shape
    d0, d1 = split_head_dim(head_dim)
    fused, dropout = accumulator is not None, options.dropout_p > 0

    def parts(x: Tensor, rows: int) -> tuple:
        return _tiles_of(x, 1, rows, 1, d0), _tiles_of(x, 1, rows, 1, d1) if d1 else None

    floats = accumulator.view(-1, 256) if fused else None
    dq0 = _tiles_of(floats, config.m * d0 // 256, 256) if fused else None
    dq1 = _tiles_of(floats, config.m * d1 // 256, 256) if fused and d1 else None
    stats_block = (1 if stats.dtype == torch.float32 else config.m), stats.shape[1]
    tensors = (
        *(*parts(q, config.m), *parts(k, config.n), *parts(v, config.n), *parts(dout, config.m)),
        *(_tiles_of(stats, *stats_block), dq0, dq1, *parts(dk, config.n), *parts(dv, config.n), options.numbers),
    )
    sizes = batch, heads, heads // k.shape[2], seq_q, k.shape[1], section
    scalars = *sizes, options.scale, threshold(options.dropout_p), 1 / (1 - options.dropout_p)
    return tensors, scalars, (d1, config.warps, config.stages, options.causal, dropout, fused, _LOADER_REGISTERS)


def compilation(
    head_dim: int, dtype: torch.dtype, causal: bool, dropout: bool, config: SpecialisedBackward
) -> tuple[dict, dict, dict]:
    """Signature, constants and options of main_kernel, to compile it ahead of time."""
    x = torch.empty((1, config.n, 1, head_dim), dtype=dtype)
    accumulator = torch.empty(config.m * head_dim) if config.fused else None
    options = Options(causal=causal)
    if dropout:
        options = options._replace(numbers=torch.empty(1, dtype=torch.int32), dropout_p=0.1)
    stats = _statistics(1, x, options, config)
    arguments = itertools.chain(*_main_arguments(accumulator, stats, x, x, x, x, x, x, options, 1, config))
    return *signature_of(main_kernel, arguments), config.options


def backward_into(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dlogsumexp: Tensor | None,
    sums: Tensor | None,
    options: Options,
    config: SpecialisedBackward,
) -> Tensor | None:
    """Writes the gradients of O = attention(q, k, v) into dq, dk and dv, which may be views of a packed gradient.

    q, dq, out, dout (B, T, H, D), k, v, dk, dv (B, S, G, D), all of one 16-bit dtype, D one that the table
    has, unit stride along D, other strides and addresses multiples of 16 bytes and no stride zero; logsumexp and its
    gradient, if it has one, (B, H, T) fp32, natural, contiguous. Options without window, documents or blocks. Where
    config is not fused dq is left out, and the deltas (B, H, T) are returned with which the plain kernel computes it.

    Sums, if given, (3, H, D) fp32, are those of the gradients over B and T, with as many keys as queries and heads; not
    without fused, in dropout, or with a gradient of the logsumexp.
    """
    (batch, seq_q, heads, head_dim), (seq_k, kv_heads) = q.shape, k.shape[1:3]
    fused, dropout = config.fused, options.dropout_p > 0
    tiles, key_tiles = batch * heads * -(-seq_q // config.m), -(-seq_k // config.n)
    with torch.cuda.device_of(q):
        stats = _statistics(tiles, q, options, config)
        accumulator, deltas, parts = None, None, (None, None)
        if sums is not None:
            parts = torch.empty((2, tiles // heads, heads * head_dim), dtype=torch.float32, device=q.device)
        if fused:
            accumulator = torch.empty(tiles * config.m * head_dim, dtype=torch.float32, device=q.device)
        else:
            deltas = torch.empty_like(logsumexp)
        key = q.dtype, q.device, head_dim, config, sums is None
        tensors = out, dout, logsumexp, dlogsumexp, options.numbers, stats, accumulator, deltas, parts[1]
        scalars = *strides(out, dout), heads, seq_q, seq_k, 1 - options.dropout_p, options.scale
        constants = config.m, *split_head_dim(head_dim), dlogsumexp is not None, dropout, fused
        launch(delta_kernel, key, tiles, tensors, scalars, constants, num_warps=config.m // 16)
        section = _section(key_tiles, config.resident, options.causal, q.device)
        arguments = _main_arguments(accumulator, stats, dk, dv, dout, q, k, v, options, section, config)
        launch(main_kernel, key, batch * kv_heads * key_tiles, *arguments, **config.options)
        if fused:
            warps = _rows_of_warps(config.m, config.warps)
            parts_of_head, across = split_head_dim(head_dim), config.warps // warps
            constants = config.m, *parts_of_head, warps, across, _is_transposed(config.n, head_dim)
            scalars = *strides(dq), heads, seq_q, options.scale / (1 - options.dropout_p)
            launch(finish_kernel, key, tiles, (accumulator, dq, parts[0]), scalars, constants, num_warps=config.m // 16)
        if sums is not None:
            torch.sum(parts, 1, out=sums.flatten(1)[::2])
            sums[1].zero_()
    return deltas
