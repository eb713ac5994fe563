"""Attention functions for the trainer: flash2's forward kernels, and the backward pass of one step of the ladder.

    python train.py model=gpt2 attention=custom attention.function=kernels.ladder.training:split train.sample_tokens=0

The functions are split, atomics, tma_adds and specialised_warps, in the order of the steps. All need a GPU, and the
last two need a Hopper GPU. The forward pass is the same in all, so a difference in tokens/s comes from the backward
pass.
"""

import os

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.registering import no_second_derivative
from kernels.flash2.options import Options  # the package also defines the operator of the forward pass
from kernels.ladder import BACKWARD, load

TILE = 128  # the steps take multiples of this many tokens


@torch.library.custom_op("ladder::backward", mutates_args=())
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, causal: bool, step: str
) -> tuple[Tensor, Tensor, Tensor]:
    if dout.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("the ladder's kernels need a GPU")
    return load(step).backward(dout, q, k, v, out, logsumexp, causal)


@_backward.register_fake
def _(dout, q, k, v, out, logsumexp, causal, step):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))


class _Attention(torch.autograd.Function):
    """FlashAttention with flash2's forward pass and the backward pass of one step."""

    @staticmethod
    def forward(ctx, q, k, v, causal, step):
        out, logsumexp = torch.ops.flash2.forward(q, k, v, *Options(causal=causal, scale=q.shape[-1] ** -0.5))
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.causal, ctx.step = causal, step
        return out

    @staticmethod
    @no_second_derivative("the ladder", "attention=sdpa attention.backend=math")
    def backward(ctx, dout):
        grads = torch.ops.ladder.backward(dout.contiguous(), *ctx.saved_tensors, ctx.causal, ctx.step)
        return *grads, None, None


def _is_packed(x: Tensor, stride: int) -> bool:
    """Return whether a step can read x (B, T, H, D): rows are `stride` apart, and heads are side by side."""
    _, length, _, head_dim = x.shape
    return x.stride() == (length * stride, stride, head_dim, 1)


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, step: str) -> Tensor:
    """Return softmax(q k^T scale) v, (B, T, H, D). The gradients come from the backward pass of `step`.

    The steps know one scale and whole tiles. So another scale multiplies q, and a causal call gets zeros behind the
    last token, which no query sees.
    """
    length, head_dim = q.shape[1], q.shape[3]
    if q.shape != k.shape or (length % TILE and not causal) or head_dim not in (64, 128):
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} do not suit the ladder; give it equal shapes, head_dim 64 or "
            f"128 and, without a causal mask, multiples of {TILE} tokens"
        )
    if scale != head_dim**-0.5:
        q = q * (scale * head_dim**0.5)
    if length % TILE:
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, -length % TILE)) for x in (q, k, v))
    if not all(_is_packed(x, q.stride(1)) for x in (q, k, v)):
        q, k, v = (x.contiguous() for x in (q, k, v))
    return _Attention.apply(q, k, v, causal, step)[:, :length]


def _function(step: str):
    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
        return attend(q, k, v, causal=causal, scale=scale, step=step)

    return attention


split, atomics, tma_adds, specialised_warps = map(_function, BACKWARD)
