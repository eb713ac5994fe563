"""The host side of the Hopper backward: TMA descriptors, buffers and launches."""

from functools import cache

import torch
from torch import Tensor

from kernels.common.launching import launch_kernel, strides
from kernels.flash2.hopper_backward.finish import finish_kernel
from kernels.flash2.hopper_backward.main_loop import is_transposed, main_kernel, rows_of_warps
from kernels.flash2.hopper_backward.statistics import delta_kernel
from kernels.flash2.options import Options
from kernels.flash2.tiles import HopperBackwardConfig, in_halves, split_head_dim
from kernels.hopper.warpgroups import blocks_of, multiprocessors

_LOADER_REGISTERS = 24  # the minimum
DOCUMENT_HEADS, WINDOW_HEADS = 8, 4  # dealt out together; WINDOW_HEADS if additions to dQ are ordered


@cache
def _section(key_tiles: int, resident: int, mask: tuple[bool, bool, bool], ordered: bool, device: torch.device) -> int:
    """Return how many heads to deal out together. mask is options.masks.

    Under a causal mask, deal out all heads whose programs run at the same time, because their tiles are not equally
    long. Do so too if additions to dQ are ordered. The programs of one head then start some time after each other, so
    they do not reach the same query tile at once and wait. With documents on an H200, heads of 64, 96 and 128 are up to
    7 % faster with 8 heads than with one.
    """
    causal, window, documents = mask
    if documents:
        return DOCUMENT_HEADS
    if window and ordered:
        return WINDOW_HEADS
    if ordered or (causal and not window):
        return max(resident * multiprocessors(device) // key_tiles, 1)
    return 1


def statistics_for(tiles: int, q: Tensor, options: Options, config: HopperBackwardConfig) -> Tensor:
    """Return an empty tensor for the statistics of the query tiles. Its dtype decides how the kernel uses them.

    With bf16, the matrix products subtract logsumexp and delta from S and dP: the statistics are a tile of 16 extra
    columns beside Q and dO. With fp32, the threads load the statistics.

    For heads of 128 and heads in halves, these loads would wait behind the operands of the products. There, bf16 makes
    the backward 2 to 7 % faster on an H200. For other sizes the extra columns cost more than they save. fp16 lacks the
    range, and dropout needs delta by itself.
    """
    in_products = q.shape[3] == 128 or in_halves(config.queries, q.shape[3])
    if in_products and q.dtype == torch.bfloat16 and options.dropout_p == 0:
        return torch.empty((tiles * config.queries, 16), dtype=q.dtype, device=q.device)
    rows = (3 if options.dropout_p > 0 else 2) * tiles
    return torch.empty((rows, config.queries), dtype=torch.float32, device=q.device)


def arguments_of(
    accumulator: Tensor | None, turns: Tensor | None, stats, dk, dv, dout, q, k, v,
    options: Options, section: int, config: HopperBackwardConfig,
) -> tuple[tuple, tuple, tuple]:  # fmt: skip
    """Return the tensors, scalars and constants of main_kernel.

    Without an accumulator it leaves dQ out. Without turns the additions to dQ have no order.
    """
    batch, seq_q, heads, head_dim = q.shape
    d0, d1 = split_head_dim(head_dim)
    m, n = config.queries, config.keys
    fused, dropout = accumulator is not None, options.dropout_p > 0

    def parts(x: Tensor, rows: int) -> tuple:
        return blocks_of(x, 1, rows, 1, d0), blocks_of(x, 1, rows, 1, d1) if d1 else None

    floats = accumulator.view(-1, 256) if fused else None
    dq0 = blocks_of(floats, m * d0 // 256, 256) if fused else None
    dq1 = blocks_of(floats, m * d1 // 256, 256) if fused and d1 else None
    stats_block = (1 if stats.dtype == torch.float32 else m), stats.shape[1]
    tensors = (
        *(*parts(q, m), *parts(k, n), *parts(v, n), *parts(dout, m)),
        *(blocks_of(stats, *stats_block), dq0, dq1, *parts(dk, n), *parts(dv, n)),
        *(options.numbers, options.documents, turns),
    )
    sizes = batch, heads, heads // k.shape[2], seq_q, k.shape[1], section, options.window
    constants = d1, config.warps, config.stages, *options.masks, dropout, fused, _LOADER_REGISTERS
    return tensors, (*sizes, *options.factors), constants


def backward_into(
    dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    dlogsumexp: Tensor | None, sums: Tensor | None, options: Options, config: HopperBackwardConfig, deterministic: bool,
) -> Tensor | None:  # fmt: skip
    """Write the gradients of O = attention(q, k, v) into dq, dk and dv, which may be views of a packed gradient.

    The tensors q, dq, out and dout are (B, T, H, D), and k, v, dk and dv are (B, S, G, D). All have the same 16-bit
    dtype and a head size in the table. The stride along D is 1. The other strides and the addresses are multiples of
    16 bytes, and no stride is zero. The tensors logsumexp and dlogsumexp are (B, H, T) fp32, natural, contiguous. The
    options have no blocks.

    If given, sums (3, H, D) fp32 receives the sums of the gradients over B and T. It requires seq_q = seq_k, H = G,
    config.fused, no dropout and no dlogsumexp. If config is not fused, leave dq out and return the deltas (B, H, T).
    The plain kernel computes dq from them. If deterministic, dq has the same bits in every run. With documents, a
    fused config then requires a causal mask.
    """
    (batch, seq_q, heads, head_dim), (seq_k, kv_heads) = q.shape, k.shape[1:3]
    m, fused, dropout = config.queries, config.fused, options.dropout_p > 0
    tiles, key_tiles = batch * heads * -(-seq_q // m), -(-seq_k // config.keys)
    with torch.cuda.device_of(q):
        stats = statistics_for(tiles, q, options, config)
        accumulator, turns, deltas, parts = None, None, None, (None, None)
        if sums is not None:
            parts = torch.empty((2, tiles // heads, heads * head_dim), dtype=torch.float32, device=q.device)
        if fused:
            accumulator = torch.empty(tiles * m * head_dim, dtype=torch.float32, device=q.device)
            turns = torch.empty(tiles, dtype=torch.int32, device=q.device) if deterministic else None
        else:
            deltas = torch.empty_like(logsumexp)
        key = q.dtype, q.device, head_dim, config, deterministic, sums is None
        tensors = out, dout, logsumexp, dlogsumexp, options.numbers, stats, accumulator, turns, deltas, parts[1]
        scalars = *strides(out, dout), heads, seq_q, seq_k, 1 - options.dropout_p, options.scale
        constants = m, *split_head_dim(head_dim), dlogsumexp is not None, dropout, fused
        launch_kernel(delta_kernel, key, tiles, tensors, scalars, constants, num_warps=m // 16)
        section = _section(key_tiles, config.resident, options.masks, turns is not None, q.device)
        arguments = arguments_of(accumulator, turns, stats, dk, dv, dout, q, k, v, options, section, config)
        launch_kernel(main_kernel, key, batch * kv_heads * key_tiles, *arguments, **config.compiler_options)
        if fused:
            warps_m = rows_of_warps(m, config.warps)
            warps = warps_m, config.warps // warps_m
            constants = m, *split_head_dim(head_dim), *warps, is_transposed(config.keys, head_dim)
            scalars = *strides(dq), heads, seq_q, options.scale / (1 - options.dropout_p)
            launch_kernel(finish_kernel, key, tiles, (accumulator, dq, parts[0]), scalars, constants, num_warps=m // 16)
        if sums is not None:
            torch.sum(parts, 1, out=sums.flatten(1)[::2])
            sums[1].zero_()
    return deltas
