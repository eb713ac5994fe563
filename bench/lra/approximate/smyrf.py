"""SMYRF: Daras et al., "SMYRF: Efficient Attention using Asymmetric Clustering" (2020)."""

import torch
from torch import Tensor, nn

from bench.lra.approximate.clusters import clustered_attention
from bench.lra.approximate.softmax import wide
from bench.lra.config import EncoderConfig


class Smyrf(nn.Module):
    """Asymmetric LSH into balanced clusters: the keys with the largest inner products should join a query's cluster.

    Queries and keys become F(q) = [q; 0; sqrt(M - |q|^2)] and G(k) = [k; sqrt(M - |k|^2); 0] with M = max |q|^2 + max
    |k|^2 over a sequence and head. Then |F(q) - G(k)|^2 = 2 M - 2 q k, so near vectors have large products.

    E2LSH, floor((a x + b) / r), hashes both. As in the paper's code, clusters of `size` queries and `size` keys are cut
    from the order of a x. The clusters are balanced, and b, r and the rounding are not needed.
    """

    def __init__(self, config: EncoderConfig, size: int = 128, rounds: int = 2):
        super().__init__()
        self.size = size
        self.register_buffer("a", torch.randn(config.n_head, config.head_dim + 2, rounds))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention inside the clusters."""
        q_order, k_order = (x.argsort(dim=-1, stable=True) for x in self.hashes(q, k))
        return clustered_attention(q, k, v, q_order, k_order, self.size)

    @torch.no_grad()
    def hashes(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return a F(q) and a G(k), (B, H, R, T) in fp32 or more."""
        q, k = (wide(x).transpose(1, 2) for x in (q, k))
        q_norms, k_norms = (x.square().sum(3) for x in (q, k))
        bound = q_norms.amax(2, keepdim=True) + k_norms.amax(2, keepdim=True)
        a = self.a.to(q.dtype)
        return self._hash(q, (bound - q_norms).sqrt(), a[:, -1]), self._hash(k, (bound - k_norms).sqrt(), a[:, -2])

    def _hash(self, x: Tensor, extra: Tensor, weight: Tensor) -> Tensor:
        """Return a [x; extra] for x (B, H, T, D), extra (B, H, T) and extra's weight in a (H, R)."""
        return torch.einsum("bhtd,hdr->bhrt", x, self.a[:, :-2].to(x.dtype)) + weight[..., None] * extra[:, :, None]
