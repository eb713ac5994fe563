"""Performer: Choromanski et al., "Rethinking Attention with Performers" (2021)."""

import torch
from torch import Tensor, nn

from bench.lra.approximate.linear import kernel_attention
from bench.lra.approximate.softmax import wide
from bench.lra.config import EncoderConfig

EPSILON = 1e-6  # as in the paper's code: a query whose features are all far from the keys' must not divide by 0


class Performer(nn.Module):
    """FAVOR+: softmax's exp(q k) becomes phi(q) phi(k) with positive orthogonal random features.

    phi(x) = exp(W x' - |x'|^2 / 2) for x' = x D**-0.25 (lemma 1 of the paper). The factor 1 / sqrt(features) cancels in
    the ratio and is left out. The rows of W (features, D) are drawn once; they are not redrawn during training.
    """

    def __init__(self, config: EncoderConfig, features: int = 256):
        super().__init__()
        self.register_buffer("W", orthogonal_features(features, config.head_dim))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return phi(q) (phi(k)^T v) / (phi(q) sum phi(k)).

        For stability, the largest exponent is subtracted: for queries, the largest of each query; for keys, the largest
        of all keys of a head. These factors of phi cancel in the ratio, and so does exp(-|q|^2 / 2).
        """
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        q, k = (wide(x) * x.shape[3] ** -0.25 for x in (q, k))
        W = self.W.to(q.dtype).T
        of_q, of_k, half = q @ W, k @ W, k.square().sum(3, keepdim=True) / 2
        largest_q = of_q.detach().amax(3, keepdim=True)
        largest_k = (of_k.detach().amax(3, keepdim=True) - half.detach()).amax(2, keepdim=True)
        phi = ((x - shift).exp().to(v.dtype) + EPSILON for x, shift in ((of_q, largest_q), (of_k, half + largest_k)))
        return kernel_attention(*phi, v).transpose(1, 2)


def orthogonal_features(features: int, head_dim: int) -> Tensor:
    """Return random rows (features, head_dim), orthogonal to each other within each block of head_dim rows.

    Each row alone is a standard normal vector: a uniform direction with the norm of another normal vector.
    """
    blocks = -(-features // head_dim)
    directions, triangular = torch.linalg.qr(torch.randn(blocks, head_dim, head_dim))
    directions = directions * triangular.diagonal(dim1=1, dim2=2).sign()[:, None]  # otherwise not uniform
    norms = torch.randn(features, head_dim).norm(dim=1, keepdim=True)
    return directions.mT.flatten(0, 1)[:features] * norms
