"""How flash1's kernels are launched, whatever the GPU."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.common.dropout import threshold
from kernels.common.launching import launch, strides
from kernels.flash1.triton_kernels import backward_kernel, forward_kernel
from kernels.flash2.tiles import Tile, padded_head_dim


class Tiles(NamedTuple):
    """Tiles of the two kernels."""

    forward: Tile
    backward: Tile


def tiles_for(head_dim: int, dtype: torch.dtype) -> Tiles:
    """The fastest on an H200 of those that fit; that some spill registers costs less than more tiles of keys would,
    for each of which all of O or dQ is read and written."""
    if dtype == torch.float32 or head_dim > 128:
        return Tiles(*[Tile(32, 32, 8, 1)] * 2)
    if head_dim <= 64:
        return Tiles(Tile(128, 128, 8, 2), Tile(128, 128, 8, 1))
    return Tiles(Tile(128, 128, 8, 2), Tile(32, 128, 8, 1))


def constants(tile: Tile, head_dim: int, causal: bool, documents: bool, dropout: bool, interpreted: bool) -> tuple:
    """M, N, HEAD_DIM, D, CAUSAL, DOCUMENTS, DROPOUT, UPCAST: what a kernel is compiled for."""
    return tile.m, tile.n, head_dim, padded_head_dim(head_dim), causal, documents, dropout, interpreted


def _run(kernel, tile: Tile, programs: int, q: Tensor, k: Tensor, tensors: tuple, scalars: tuple, *options) -> None:
    """A kernel whose last two tensors are numbers and documents."""
    causal, scale, dropout_p = options
    (seq_q, heads), (seq_k, kv_heads) = q.shape[1:3], k.shape[1:3]
    sizes = heads, heads // kv_heads, seq_q, seq_k, scale, threshold(dropout_p), 1 / (1 - dropout_p)
    compiled_for = constants(tile, q.shape[3], causal, tensors[-1] is not None, dropout_p > 0, not q.is_cuda)
    launched = {"num_warps": tile.warps, "num_stages": tile.stages}
    with torch.cuda.device_of(q):
        launch(kernel, (q.dtype, q.device), programs, tensors, scalars + sizes, compiled_for, **launched)


def forward(
    q: Tensor, k: Tensor, v: Tensor, numbers: Tensor | None, documents: Tensor | None, *options
) -> tuple[Tensor, Tensor, Tensor]:
    """Same contract as definition.forward, but that m is in base 2."""
    batch, seq_q, heads, head_dim = q.shape
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    l = torch.zeros((batch, heads, seq_q), dtype=torch.float32, device=q.device)
    m = torch.full_like(l, float("-inf"))
    tensors = q, k, v, out, l, m, numbers, documents
    tile = tiles_for(head_dim, q.dtype).forward
    _run(forward_kernel, tile, batch * heads, q, k, tensors, strides(q, k, v, out), *options)
    return out.to(q.dtype), l, m


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    l: Tensor,
    m: Tensor,
    numbers: Tensor | None,
    documents: Tensor | None,
    *options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Same contract as definition.backward, for what forward here gave."""
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    tensors = q, k, v, dout, out, l, m, dq, dk, dv, numbers, documents
    tile = tiles_for(q.shape[3], q.dtype).backward
    programs = k.shape[0] * k.shape[2]
    _run(backward_kernel, tile, programs, q, k, tensors, strides(q, k, v, dout, out, dk), *options)
    return dq.to(q.dtype), dk, dv
