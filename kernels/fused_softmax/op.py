"""Attention by two matrix products and a fused softmax, as Megatron-LM computed it before FlashAttention.

Shoeybi et al., "Megatron-LM" (2019); its fused kernel is the baseline of FlashAttention's Table 2. Scores and
probabilities go to memory in the inputs' dtype. The probabilities stay there for the backward pass. cuBLAS computes the
products.
"""

import torch
from torch import Tensor, library

from kernels.common import dropout
from kernels.common.checks import check_inputs, document_bounds
from kernels.common.registering import define, no_second_derivative

LONGEST_ROW = 16384  # keys; a program holds a row of scores on chip, as in Megatron-LM's kernel

_OPTIONS = "Tensor? numbers, Tensor? documents, bool causal, float scale, float dropout_p"
_library = define(
    "fused_softmax",
    "triton_kernels",
    forward=f"(Tensor scores, {_OPTIONS}) -> (Tensor, Tensor)",
    backward=f"(Tensor dkept, Tensor probabilities, {_OPTIONS}) -> Tensor",
)


@library.register_fake("fused_softmax::forward")
def _(scores, numbers, documents, causal, scale, dropout_p):
    return torch.empty_like(scores), torch.empty_like(scores) if dropout_p else scores.new_empty(0)


@library.register_fake("fused_softmax::backward")
def _(dkept, probabilities, *options):
    return torch.empty_like(probabilities)


class _FusedSoftmax(torch.autograd.Function):
    """Softmax and dropout of scores (B, H, T, S)."""

    @staticmethod
    def forward(ctx, scores, numbers, documents, *options):
        probabilities, kept = torch.ops.fused_softmax.forward(scores, numbers, documents, *options)
        ctx.save_for_backward(probabilities, numbers, documents)
        ctx.options = options
        return kept if numbers is not None else probabilities

    @staticmethod
    @no_second_derivative("fused_softmax", "attention=sdpa attention.backend=math")
    def backward(ctx, dkept):
        probabilities, numbers, documents = ctx.saved_tensors
        dscores = torch.ops.fused_softmax.backward(dkept.contiguous(), probabilities, numbers, documents, *ctx.options)
        return dscores, *[None] * 5


def fused_softmax(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, dropout_p: float = 0.0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return softmax(Q K^T scale) V, with scores and probabilities in memory in the inputs' dtype.

    q is (B, T, H, D), k and v are (B, S, G, D) with H a multiple of G; the output is (B, T, H, D). Inputs, masks and
    errors are as in flash2. Autocast has no effect.

    Raises:
        ValueError: more than 16384 keys.
    """
    check_inputs("fused_softmax", q, k, v, scale, dropout_p, cu_seqlens)
    (batch, seq_q, heads, head_dim), (seq_k, kv_heads) = q.shape, k.shape[1:3]
    if seq_k > LONGEST_ROW:
        raise ValueError(
            f"seq_k={seq_k} exceeds the {LONGEST_ROW} scores of a row that fused_softmax holds on chip; use "
            "attention=flash2"
        )
    numbers = dropout.draw(batch, heads, seq_q, seq_k, q.device) if dropout_p else None
    documents = None if cu_seqlens is None else document_bounds(cu_seqlens, batch, seq_q)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    rows = heads // kv_heads * seq_q  # the queries of all heads of a group, head by head
    with torch.autocast(q.device.type, enabled=False):
        scores = q.reshape(batch, kv_heads, rows, head_dim) @ k.mT
        scores = scores.view(batch, heads, seq_q, seq_k)
        kept = _FusedSoftmax.apply(scores, numbers, documents, causal, scale, float(dropout_p))
        out = kept.view(batch, kv_heads, rows, seq_k) @ v
    return out.view(batch, heads, seq_q, head_dim).transpose(1, 2)
