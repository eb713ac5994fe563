"""Linear attention: Katharopoulos et al., "Transformers are RNNs" (2020)."""

import torch.nn.functional as F
from torch import Tensor, nn

from bench.lra.approximate.softmax import wide, wide_type
from bench.lra.config import EncoderConfig


class LinearAttention(nn.Module):
    """Equations 4 to 7 of the paper, without causality: exp(q k) becomes phi(q) phi(k), with phi(x) = elu(x) + 1.

    The scores are not scaled, as in the paper.
    """

    def __init__(self, config: EncoderConfig):
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return phi(q) (phi(k)^T v) / (phi(q) sum phi(k))."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        q, k = (F.elu(wide(x)) + 1 for x in (q, k))  # in bf16 a small phi would become 0
        return kernel_attention(q, k, v).transpose(1, 2)


def kernel_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return q (k^T v) / (q sum k) of positive features q, k (B, H, T, F) and values v (B, H, T, D), in v's dtype.

    The features are multiplied in v's dtype. The mean of v is set apart, because the weights of a query sum to 1.
    With the mean, the gradient of q would be the difference of two large products, and bf16 would lose the difference.
    """
    q, k = q.to(v.dtype), k.to(v.dtype)
    mean = v.mean(2, keepdim=True)
    sums = k.sum(2, keepdim=True, dtype=wide_type(k)).to(v.dtype).mT
    return ((q @ (k.mT @ (v - mean))) / wide(q @ sums)).to(v.dtype) + mean
