"""Reformer's attention: Kitaev et al., "Reformer: The Efficient Transformer" (2020)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.lra.approximate.clusters import clustered_attention
from bench.lra.approximate.softmax import wide, wide_type
from bench.lra.config import EncoderConfig


class Reformer(nn.Module):
    """LSH attention (section 2 of the paper): tokens are sorted by bucket, and chunks attend to themselves and back.

    The keys are the queries, scaled to the same length, so a query and its key fall into the same bucket. A token sees
    itself only if it sees nothing else. The length of the keys is D**0.5, as in the authors' code, so that the usual
    scale D**-0.5 gives q q' / |q'|.

    A chunk of queries sees the keys of its own chunk and of the chunk before, whatever their buckets, as in the Hugging
    Face code that Xiong et al. use. A chunk has twice the tokens of an average bucket. The default is 2 rounds of
    hashing, as in Xiong et al.
    """

    def __init__(self, config: EncoderConfig, chunk: int = 64, rounds: int = 2):
        super().__init__()
        self.chunk = chunk
        self.factors = bucket_factors(config.context_length, chunk)
        columns = sum(self.factors) // 2
        self.register_buffer("rotations", torch.randn(config.n_head, config.head_dim, rounds, columns))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention inside the chunks. k has no effect."""
        order = self.buckets(q).argsort(dim=-1, stable=True)
        k = F.rms_norm(wide(q), q.shape[3:], eps=1e-6).to(q.dtype)
        return clustered_attention(q, k, v, order, order, self.chunk, previous=True, itself=False)

    @torch.no_grad()
    def buckets(self, x: Tensor) -> Tensor:
        """Return the bucket of each token in each round, (B, H, R, T) int32: argmax of [x W; -x W] (section 2).

        With two factors of the number of buckets, a bucket is a pair of such hashes.
        """
        rotated = torch.einsum("bthd,hdrn->bhrtn", wide(x), self.rotations.to(wide_type(x)))
        bucket = 0
        for factor, part in zip(self.factors, rotated.split([n // 2 for n in self.factors], 4), strict=True):
            bucket = bucket * factor + torch.cat([part, -part], 4).argmax(4)
        return bucket.to(torch.int32)


def bucket_factors(length: int, chunk: int) -> list[int]:
    """Return the factors of the number of buckets: one or two powers of two whose product is about 2 length / chunk.

    More than 64 buckets are the product of two factors, so that hashing stays cheap.
    """
    power = max(1, round(math.log2(2 * length / chunk)))
    return [2**power] if power <= 6 else [2 ** (power // 2), 2 ** (power - power // 2)]
