"""Linear attention: Katharopoulos et al., "Transformers are RNNs" (2020)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.lra.approximate.softmax import wide
from bench.lra.config import EncoderConfig


class LinearAttention(nn.Module):
    """Equations 4 to 7 of the paper, without causality: exp(q k) becomes phi(q) phi(k), with phi(x) = elu(x) + 1.

    The scores are not scaled, as in the paper.
    """

    def __init__(self, config: EncoderConfig):
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return phi(q) (phi(k)^T v) / (phi(q) sum phi(k))."""
        return kernel_attention(F.elu(q) + 1, F.elu(k) + 1, v)


def kernel_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return q (k^T v) / (q sum k) of positive features q, k (B, T, H, F) and values v (B, T, H, D), in v's dtype.

    The features are multiplied in v's dtype.
    """
    q, k = q.to(v.dtype), k.to(v.dtype)
    sums = wide(k).sum(1).to(v.dtype)
    norms = wide(torch.einsum("bthf,bhf->bth", q, sums))
    out = torch.einsum("bthf,bhfd->bthd", q, torch.einsum("bthf,bthd->bhfd", k, v))
    return (out / norms[..., None]).to(v.dtype)
