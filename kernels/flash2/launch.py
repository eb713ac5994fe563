"""Launching the Triton kernels of flash2: tile sizes, strides and grids."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels.flash2 import philox
from kernels.flash2.triton_kernels import delta_kernel, forward_kernel, key_gradient_kernel, query_gradient_kernel


class Tile(NamedTuple):
    """Rows of a query tile and of a key tile, warps of a program, depth of the loads' pipeline."""

    m: int
    n: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Tiles of the three loops: forward, dK and dV, dQ."""

    forward: Tile
    key_gradient: Tile
    query_gradient: Tile


# By padded head size: for 2-byte inputs the best of what was tried on an H200, within 96 KiB of shared memory.
TILES = {
    16: Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    32: Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    64: Tiles(Tile(64, 64, 4, 3), Tile(32, 64, 4, 3), Tile(64, 32, 4, 3)),
    128: Tiles(Tile(64, 32, 4, 3), Tile(64, 64, 8, 1), Tile(64, 64, 8, 1)),
    256: Tiles(Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
}
FP32_TILE = Tile(32, 32, 4, 1)


def padded_head_dim(head_dim: int) -> int:
    """The power of two the kernels pad head_dim to."""
    return max(16, triton.next_power_of_2(head_dim))


def tiles_for(head_dim: int, dtype: torch.dtype) -> Tiles:
    """The tiles for a head size (16 to 256) and an input dtype; fp32 takes small ones, having no tensor cores here."""
    return Tiles(*[FP32_TILE] * 3) if dtype == torch.float32 else TILES[padded_head_dim(head_dim)]


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Batch, row and head strides of (batch, length, heads, head_dim) tensors."""
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def _constants(head_dim: int, causal: bool, dropout_p: float, interpreted: bool) -> dict:
    return {
        "HEAD_DIM": head_dim,
        "D": padded_head_dim(head_dim),
        "CAUSAL": causal,
        "DROPOUT": dropout_p > 0,
        "UPCAST": interpreted,
    }


def _options(tile: Tile) -> dict:
    return {"M": tile.m, "N": tile.n, "num_warps": tile.warps, "num_stages": tile.stages}


def _dropout(dropout_p: float) -> tuple[int, float]:
    return philox.threshold(dropout_p), 1 / (1 - dropout_p)


def forward(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, causal: bool, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Same contract as definition.forward: O (B, T, H, D) contiguous, logsumexp (B, H, T) fp32."""
    (batch, seq_q, heads, head_dim), (seq_k, kv_heads) = q.shape, k.shape[1:3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    logsumexp = torch.empty((batch, heads, seq_q), dtype=torch.float32, device=q.device)
    tile = tiles_for(head_dim, q.dtype).forward
    with torch.cuda.device_of(q):
        forward_kernel[(batch * heads * triton.cdiv(seq_q, tile.m),)](
            *(q, k, v, out, logsumexp, seed),
            *_strides(q, k, v, out),
            *(heads, heads // kv_heads, seq_q, seq_k, scale, *_dropout(dropout_p)),
            **_constants(head_dim, causal, dropout_p, interpreted=not q.is_cuda),
            **_options(tile),
        )
    return out, logsumexp


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    seed: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Same contract as definition.backward: contiguous dq, dk and dv."""
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    _backward_into(*grads, dout, q, k, v, out, logsumexp, seed, causal, scale, dropout_p)
    return grads


def backward_packed(dout: Tensor, qkv: Tensor, *args) -> Tensor:
    """As backward, but from qkv (B, T, 3, H, D) to its gradient, contiguous, each part written where it belongs."""
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    _backward_into(*dqkv.unbind(2), dout, *qkv.unbind(2), *args)
    return dqkv


def _backward_into(dq, dk, dv, dout, q, k, v, out, logsumexp, seed, causal, scale, dropout_p) -> None:
    """Three launches, no atomics, hence deterministic. dk and dv share their strides."""
    (batch, seq_q, heads, head_dim), (seq_k, kv_heads) = q.shape, k.shape[1:3]
    tiles = tiles_for(head_dim, q.dtype)
    delta = torch.empty_like(logsumexp)
    sizes = heads, heads // kv_heads, seq_q, seq_k, scale, *_dropout(dropout_p)
    constants = _constants(head_dim, causal, dropout_p, interpreted=not q.is_cuda)
    with torch.cuda.device_of(q):
        delta_kernel[(batch * heads * triton.cdiv(seq_q, 64),)](
            *(out, dout, delta),
            *_strides(out, dout),
            *(heads, seq_q),
            **{"M": 64, "HEAD_DIM": head_dim, "D": padded_head_dim(head_dim)},
        )
        tile = tiles.key_gradient
        key_gradient_kernel[(batch * kv_heads * triton.cdiv(seq_k, tile.n),)](
            *(q, k, v, dout, logsumexp, delta, dk, dv, seed),
            *_strides(q, k, v, dout, dk),
            *sizes,
            **constants,
            BOUNDED=seq_q % tile.m != 0,
            **_options(tile),
        )
        tile = tiles.query_gradient
        query_gradient_kernel[(batch * heads * triton.cdiv(seq_q, tile.m),)](
            *(q, k, v, dout, logsumexp, delta, dq, seed),
            *_strides(q, k, v, dout, dq),
            *sizes,
            **constants,
            **_options(tile),
        )
