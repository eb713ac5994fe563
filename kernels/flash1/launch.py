"""Launches of flash1's kernels, and their tiles."""

import torch
from torch import Tensor

from kernels.common.dropout import threshold
from kernels.common.launching import arch_of, launch_kernel, strides
from kernels.flash1.triton_kernels import backward_kernel, forward_kernel
from kernels.flash2.tiles import LARGE, TileConfig, check_arch, padded_head_dim


def tiles_for(arch: str, head_dim: int, dtype: torch.dtype) -> tuple[TileConfig, TileConfig]:
    """Return the tiles of the forward and of the backward kernel.

    GPUs with much shared memory get the fastest tiles on an H200, although some spill. The others get tiles that fit in
    96 KiB.
    """
    check_arch(arch)
    if arch not in LARGE:
        if dtype != torch.float32 and head_dim <= 128:
            return TileConfig(64, 64, 8, 1), TileConfig(32, 64, 8, 1)
        if dtype == torch.float32 and head_dim > 128:
            return TileConfig(16, 16, 8, 1), TileConfig(16, 16, 8, 1)
    if dtype == torch.float32 or head_dim > 128:
        return TileConfig(32, 32, 8, 1), TileConfig(32, 32, 8, 1)
    if head_dim <= 64:
        return TileConfig(128, 128, 8, 2), TileConfig(128, 128, 8, 1)
    return TileConfig(128, 128, 8, 2), TileConfig(32, 128, 8, 1)


def constants_of(
    tile: TileConfig, head_dim: int, causal: bool, documents: bool, dropout: bool, interpreted: bool
) -> tuple:
    """Return a kernel's constants: M, N, HEAD_DIM, D, CAUSAL, DOCUMENTS, DROPOUT, UPCAST."""
    return tile.queries, tile.keys, head_dim, padded_head_dim(head_dim), causal, documents, dropout, interpreted


def _run(kernel, tile: TileConfig, programs: int, q: Tensor, k: Tensor, tensors, strides, causal, scale, dropout_p):
    """Launch a kernel. The last two tensors are numbers and documents."""
    (seq_q, heads), (seq_k, kv_heads) = q.shape[1:3], k.shape[1:3]
    sizes = heads, heads // kv_heads, seq_q, seq_k, scale, threshold(dropout_p), 1 / (1 - dropout_p)
    constants = constants_of(tile, q.shape[3], causal, tensors[-1] is not None, dropout_p > 0, not q.is_cuda)
    settings = {"num_warps": tile.warps, "num_stages": tile.stages}
    with torch.cuda.device_of(q):
        launch_kernel(kernel, (q.dtype, q.device), programs, tensors, strides + sizes, constants, **settings)


def forward(q: Tensor, k: Tensor, v: Tensor, *options) -> tuple[Tensor, Tensor, Tensor]:
    """Compute definition.forward, except that m is in base 2."""
    batch, seq_q, heads, head_dim = q.shape
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    l = torch.zeros((batch, heads, seq_q), dtype=torch.float32, device=q.device)
    m = torch.full_like(l, float("-inf"))
    tensors = q, k, v, out, l, m, *options[:2]
    tile, _ = tiles_for(arch_of(q.device), head_dim, q.dtype)
    _run(forward_kernel, tile, batch * heads, q, k, tensors, strides(q, k, v, out), *options[2:])
    return out.to(q.dtype), l, m


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, l: Tensor, m: Tensor, *options
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute definition.backward, for the results of `forward` in this module."""
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    tensors = q, k, v, dout, out, l, m, dq, dk, dv, *options[:2]
    _, tile = tiles_for(arch_of(q.device), q.shape[3], q.dtype)
    programs = k.shape[0] * k.shape[2]
    _run(backward_kernel, tile, programs, q, k, tensors, strides(q, k, v, dout, out, dk), *options[2:])
    return dq.to(q.dtype), dk, dv
