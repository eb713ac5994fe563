"""The host side of the plain Triton kernels: TMA descriptors, arguments and launches."""

import torch
from torch import Tensor

from kernels.common.launching import descriptor, launch_kernel, strides, uses_tma
from kernels.flash2.block_lists import BLOCK, HEADER
from kernels.flash2.options import Options
from kernels.flash2.tiles import PlainTiles, TileConfig, padded_head_dim
from kernels.flash2.triton_kernels.forward import forward_kernel
from kernels.flash2.triton_kernels.key_gradient import add_pieces_kernel, key_gradient_kernel
from kernels.flash2.triton_kernels.query_gradient import delta_kernel, query_gradient_kernel


def constants_of(tile: TileConfig, head_dim: int, options: Options, interpreted: bool, tma: bool) -> tuple:
    """Return M, N, HEAD_DIM, D, CAUSAL, WINDOW, DOCUMENTS, BLOCKS, DROPOUT, UPCAST and TMA."""
    sizes = tile.queries, tile.keys, head_dim, padded_head_dim(head_dim)
    return *sizes, *options.masks, options.blocks is not None, options.dropout_p > 0, interpreted, tma


def sizes_of(q_shape: torch.Size, k_shape: torch.Size, options: Options) -> tuple:
    """Return heads, groups, seq_q, seq_k, window, scale, threshold and keep_scale."""
    (seq_q, heads), (seq_k, kv_heads) = q_shape[1:3], k_shape[1:3]
    return heads, heads // kv_heads, seq_q, seq_k, options.window, *options.factors


def _read(x: Tensor, rows: int, tma: bool):
    """Return x as a kernel reads it, `rows` of one head at a time."""
    return descriptor(x, [1, rows, 1, padded_head_dim(x.shape[3])]) if tma else x


def forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, tile: TileConfig, tma: bool, programs: int,
    scalars: tuple, constants: tuple,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return O (B, T, H, D) contiguous and the logsumexp (B, H, T) fp32."""
    batch, seq_q, heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    logsumexp = torch.empty((batch, heads, seq_q), dtype=torch.float32, device=q.device)
    reads = _read(q, tile.queries, tma), _read(k, tile.keys, tma), _read(v, tile.keys, tma)
    tensors = *reads, out, logsumexp, *options[:3]
    launched = {"num_warps": tile.warps, "num_stages": tile.stages}
    with torch.cuda.device_of(q):
        launch_kernel(forward_kernel, (q.dtype, q.device), programs, tensors, scalars, constants, **launched)
    return out, logsumexp


def backward_into(
    dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    dlogsumexp: Tensor | None, options: Options, tiles: PlainTiles, delta: Tensor | None,
) -> None:  # fmt: skip
    """Write dq, dk and dv; or only dq, if delta is given. The kernels use no atomics and are deterministic."""
    (batch, seq_q, heads, head_dim), (seq_k, kv_heads) = q.shape, k.shape[1:3]
    tma = uses_tma(q, k, v, dout)
    key, read_strides, sizes = (q.dtype, q.device), strides(q, k, v, dout), sizes_of(q.shape, k.shape, options)

    def run(kernel, tile: TileConfig, programs: int, outputs: tuple, extra_scalars=(), extra_constants=()) -> None:
        m, n = tile.queries, tile.keys
        reads = _read(q, m, tma), _read(k, n, tma), _read(v, n, tma), _read(dout, m, tma)
        tensors = *reads, logsumexp, delta, *outputs, *options[:3]
        scalars = *read_strides, *strides(outputs[0]), *sizes, *extra_scalars
        constants = *constants_of(tile, head_dim, options, not q.is_cuda, tma), *extra_constants
        launch_kernel(kernel, key, programs, tensors, scalars, constants, num_warps=tile.warps, num_stages=tile.stages)

    with torch.cuda.device_of(q):
        if delta is None:
            # delta
            delta, rows = torch.empty_like(logsumexp), 64
            constants = rows, head_dim, padded_head_dim(head_dim), dlogsumexp is not None
            scalars = *strides(out, dout), heads, seq_q, 1 - options.dropout_p
            programs = batch * heads * -(-seq_q // rows)
            launch_kernel(delta_kernel, key, programs, (out, dout, dlogsumexp, delta), scalars, constants, num_warps=4)
            # dK and dV
            tile, key_lists, early, pieces = tiles.key_gradient, 0, 0, None
            programs, step = batch * kv_heads * -(-seq_k // tile.keys), tile.queries
            if options.blocks is not None:
                key_lists, early = _lists_of_keys(options.blocks)
                programs, step = batch * kv_heads * key_lists * (BLOCK // tile.keys), BLOCK
                pieces = logsumexp.new_empty((2, early, batch * kv_heads, BLOCK, padded_head_dim(head_dim)))
            # The last constant is BOUNDED.
            run(key_gradient_kernel, tile, programs, (dk, dv, pieces), (key_lists, early), (seq_q % step != 0,))
            if early:
                tensors, scalars = (pieces, dk, dv, options.blocks), (*strides(dk), kv_heads, seq_k, early)
                constants = rows, head_dim, padded_head_dim(head_dim), not q.is_cuda
                programs = early * batch * kv_heads * (BLOCK // rows)
                launch_kernel(add_pieces_kernel, key, programs, tensors, scalars, constants, num_warps=4)
        # dQ
        tile = tiles.query_gradient
        run(query_gradient_kernel, tile, batch * heads * -(-seq_q // tile.queries), (dq,))


def _lists_of_keys(blocks: Tensor) -> tuple[int, int]:
    """Return how many rows block_lists.listed has for keys, and how many of the first may belong to divided lists.

    A list in p rows, p >= 2, adds p - 1 rows to the n. So divided lists have at most twice the added rows.
    """
    n = blocks.shape[1] - HEADER
    key_lists = len(blocks) - n
    return key_lists, min(2 * (key_lists - n), key_lists)
