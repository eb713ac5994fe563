"""flash1 as one PyTorch operator: Triton kernels on CUDA and ROCm, the tiled PyTorch definition on CPU."""

import torch
from torch import Tensor, library

from kernels.common import dropout
from kernels.common.checks import check_inputs, document_bounds, readable
from kernels.common.dtypes import accumulator
from kernels.common.registering import define, no_second_derivative

_INPUTS = "Tensor q, Tensor k, Tensor v"
_OPTIONS = "Tensor? numbers, Tensor? documents, bool causal, float scale, float dropout_p"
_library = define(
    "flash1",
    forward=f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    backward=f"(Tensor dout, {_INPUTS}, Tensor out, Tensor l, Tensor m, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)


@library.register_fake("flash1::forward")
def _(q, k, v, *options):
    batch, seq_q, heads, _ = q.shape
    l = q.new_empty((batch, heads, seq_q), dtype=accumulator(q.dtype))
    return q.new_empty(q.shape), l, torch.empty_like(l)


@library.register_fake("flash1::backward")
def _(dout, q, k, v, *rest):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _Flash1(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, numbers, documents, *options):
        out, l, m = torch.ops.flash1.forward(q, k, v, numbers, documents, *options)
        ctx.save_for_backward(q, k, v, out, l, m, numbers, documents)
        ctx.options = options
        return out

    @staticmethod
    @no_second_derivative("flash1", "attention=sdpa attention.backend=math")
    def backward(ctx, dout):
        dout = readable(dout)
        return *torch.ops.flash1.backward(dout, *ctx.saved_tensors, *ctx.options), *[None] * 5


def flash1(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, dropout_p: float = 0.0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return softmax(Q K^T scale) V by FlashAttention (Dao et al., 2022, Algorithms 1, 2 and 4).

    Neither pass stores the scores. q is (B, T, H, D). k and v are (B, S, G, D), and H is a multiple of G. The output is
    (B, T, H, D), contiguous. The docstring of flash2 explains the inputs and the masks.

    Raises:
        ValueError: a shape, dtype, device or option that flash2 refuses too.
    """
    check_inputs("flash1", q, k, v, scale, dropout_p, cu_seqlens)
    numbers = dropout.draw(q.shape[0], q.shape[2], q.shape[1], k.shape[1], q.device) if dropout_p else None
    documents = None if cu_seqlens is None else document_bounds(cu_seqlens, *q.shape[:2])
    q, k, v = readable(q), readable(k), readable(v)
    return _Flash1.apply(q, k, v, numbers, documents, causal, scale, float(dropout_p))
