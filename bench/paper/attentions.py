"""The attentions of the tables by name: variants of bench.attention and model.attention, and two papers' baselines.

B batch, T sequence length, H heads, D head size.
"""

import torch
from torch import Tensor

from bench.attention.contenders import available
from errors import check_choice
from kernels.common.launching import arch_of
from kernels.common.registering import no_second_derivative
from kernels.flash2 import dispatch
from kernels.flash2.options import Options
from kernels.flash2.tiles import PlainTiles, TileConfig, plain_tiles_for
from model.attention import VARIANTS, Attention, build_attention


def attention_named(name: str) -> Attention:
    """Return the attention of that name. An unknown name raises a UserError."""
    found = {**available(), "pytorch": pytorch, "triton": triton}
    if name in found:
        return found[name]
    check_choice("attention", name, {**found, **VARIANTS})
    return build_attention(VARIANTS[name]())


def pytorch(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Compute attention as the papers' PyTorch baseline does: one kernel per operation, T x T matrices in q's dtype.

    q, k, v and the result are (B, T, H, D). FlashAttention-2's benchmarks use the same operations.
    """
    batch, length, heads, _ = q.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    scores = torch.baddbmm(q.new_empty(batch * heads, length, length), q, k.transpose(1, 2), beta=0, alpha=scale)
    if causal:
        scores = scores + torch.full((length, length), -float("inf"), dtype=q.dtype, device=q.device).triu(1)
    return (scores.softmax(-1) @ v).unflatten(0, (batch, heads)).transpose(1, 2)


class _PlainTriton(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        ctx.options = Options(causal=causal, scale=scale)
        out, logsumexp = dispatch.forward(q, k, v, *ctx.options, tiles=plain_tiles(q, causal))
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    @no_second_derivative("triton", "math")
    def backward(ctx, dout):
        tensors, tiles = ctx.saved_tensors, plain_tiles(ctx.saved_tensors[0], ctx.options.causal)
        return *dispatch.backward(dout, *tensors, None, False, *ctx.options, tiles=tiles), None, None


def plain_tiles(q: Tensor, causal: bool) -> PlainTiles:
    return plain_tiles_for(arch_of(q.device), q.shape[3], q.dtype, causal, q.shape[1])


def triton(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Run flash2's plain Triton kernels even on a GPU that has specialised ones: q, k, v (B, T, H, D)."""
    return _PlainTriton.apply(q, k, v, causal, scale)


def tiled(tile: TileConfig) -> Attention:
    """Return flash2's plain Triton forward kernel with this tile. It has no backward pass."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
        options = Options(causal=causal, scale=scale)
        return dispatch.forward(q.detach(), k.detach(), v.detach(), *options, tiles=PlainTiles(tile, tile, tile))[0]

    return attend
