"""Attention inside clusters of tokens that a hash brings together, which Reformer and SMYRF share.

R rounds of hashing, n clusters of `size` tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.lra.approximate.softmax import attend_with_logsumexp, wide


def clustered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_order: Tensor,
    k_order: Tensor,
    size: int,
    *,
    previous: bool = False,
    itself: bool = True,
) -> Tensor:
    """Return the attention of each cluster's queries to its keys, merged over the rounds.

    Shapes: q, k, v and the result are (B, T, H, D). The permutations q_order and k_order are (B, H, R, T) int64.

    Clusters are runs of `size` tokens of a permutation. The last one may be shorter. With `previous`, queries also see
    the keys of the cluster before theirs; the first cluster sees the last. Without `itself`, a token sees its own key
    only if it sees no other; both orders must then be the same.

    The rounds are merged by their logsumexps (appendix A of the Reformer paper), as if the key sets of all rounds were
    one. A key that meets a query in several rounds counts several times.
    """
    length = q.shape[1]
    q_inverse, k_inverse = inverse(q_order), inverse(k_order)
    size = min(size, length)
    q = _clusters(_permuted(q, q_order, q_inverse), size)
    k, v = (_clusters(_permuted(x, k_order, k_inverse), size) for x in (k, v))
    masked = torch.arange(q.shape[3] * size, device=q.device).view(-1, 1, size) >= length
    own = torch.eye(size, dtype=torch.bool, device=q.device)
    if previous and q.shape[3] > 1:
        k, v = (torch.cat([x.roll(1, 3), x], 4) for x in (k, v))
        masked = torch.cat([masked.roll(1, 0), masked], 2)
        own = F.pad(own, (size, 0))
    results = attend_with_logsumexp(q, k, v, masked if length % size else None, None if itself else own)
    out, logsumexp = (_Permute.apply(x.flatten(3, 4)[:, :, :, :length], q_inverse, q_order) for x in results)
    return (wide(out) * logsumexp.softmax(2)).sum(2).to(v.dtype).transpose(1, 2)


def inverse(order: Tensor) -> Tensor:
    """Return the inverse of permutations (..., T)."""
    positions = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.zeros_like(order).scatter_(-1, order, positions)


def _permuted(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return the tokens of x (B, T, H, D) in the order of each round, (B, H, R, T, D)."""
    rounds = x.transpose(1, 2)[:, :, None].expand(-1, -1, order.shape[2], -1, -1)
    return _Permute.apply(rounds, order, inverse)


def _clusters(x: Tensor, size: int) -> Tensor:
    """Return x (B, H, R, T, D) as clusters (B, H, R, n, size, D). Zeros fill the last cluster."""
    return F.pad(x, (0, 0, 0, -x.shape[3] % size)).unflatten(3, (-1, size))


class _Permute(torch.autograd.Function):
    """Permute the rows of x (..., T, D).

    The backward pass reads the gradient by the inverse permutation. gather's own backward would add with atomics.
    """

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return _rows(x, order)

    @staticmethod
    def backward(ctx, dout: Tensor):
        return _rows(dout, *ctx.saved_tensors), None, None


def _rows(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(-2, order[..., None].expand(*order.shape, x.shape[-1]))
