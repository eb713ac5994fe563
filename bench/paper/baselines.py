"""What the papers' figures compare with, and nobody trains with here.

B batch, T sequence length, H heads, D head size.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.common.launching import arch_of
from kernels.flash2 import launch
from kernels.flash2.options import Options
from kernels.flash2.tiles import Tiles, length_bucket, tiles_for


def pytorch(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Attention as the papers time it of PyTorch: an operation a kernel, and all that is T x T in the inputs' dtype.

    q, k, v (B, T, H, D) and what is returned alike; FlashAttention-2's benchmarks have the same operations.
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
        out, logsumexp = launch.forward(q, k, v, *ctx.options, tiles=plain_tiles(q, causal))
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        tensors, tiles = ctx.saved_tensors, plain_tiles(ctx.saved_tensors[0], ctx.options.causal)
        return *launch.backward(dout, *tensors, None, False, *ctx.options, tiles=tiles), None, None


def plain_tiles(q: Tensor, causal: bool) -> Tiles:
    """Those of flash2's plain kernels for q (B, T, H, D) and as many keys."""
    return tiles_for(arch_of(q.device), q.shape[3], q.dtype, causal, length_bucket(q.shape[1]), False)


def triton(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """flash2's kernels in plain Triton, also where it has others: q, k, v (B, T, H, D), on a GPU or interpreted."""
    return _PlainTriton.apply(q, k, v, causal, scale)


BASELINES = {"pytorch": pytorch, "triton": triton}
