"""Linear attention: Katharopoulos et al., "Transformers are RNNs" (2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from bench.lra.encoder import EncoderConfig


class LinearAttention(nn.Module):
    """Equations 4 to 7 of the paper, without causality: softmax's exp(q k) becomes phi(q) phi(k), phi(x) = elu(x) + 1.

    No score is scaled, as in the paper. Time and memory are linear in T.
    """

    def __init__(self, config: EncoderConfig):
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return phi(q) (phi(k)^T v) / (phi(q) sum phi(k)) for each head."""
        return kernel_attention(F.elu(q) + 1, F.elu(k) + 1, v)


def kernel_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return q (k^T v) / (q sum k) of positive features q, k (B, T, H, F) and values v (B, T, H, D), in v's dtype.

    The features are multiplied in v's dtype.
    """
    q, k = q.to(v.dtype), k.to(v.dtype)
    accumulator = torch.promote_types(v.dtype, torch.float32)
    sums = k.sum(1, dtype=accumulator).to(v.dtype)
    norms = torch.einsum("bthf,bhf->bth", q, sums).to(accumulator)
    out = torch.einsum("bthf,bhfd->bthd", q, torch.einsum("bthf,bthd->bhfd", k, v))
    return (out / norms[..., None]).to(v.dtype)
