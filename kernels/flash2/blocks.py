"""Block-sparse attention: which blocks of 128 queries by 128 keys are computed, and the lists that the kernels walk.

Dao et al., "FlashAttention" (2022), section 3.3: what a block of zeros in the mask would hide is never loaded, so that
time falls with the blocks left. The pattern is one for all sequences and heads; causal order, documents and dropout act
inside the blocks that are kept.
"""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128


def butterfly(n: int) -> Tensor:
    """(n, n) boolean: block i of queries keeps itself, the blocks i XOR 2^k, and the first block of keys.

    The flat butterfly of Dao et al., "Pixelated Butterfly" (2021), with a global part: a row keeps at most 2 + log2(n)
    blocks, and log2(n) layers connect every block with every other.
    """
    i = torch.arange(n)
    difference = i[:, None] ^ i
    return ((difference & (difference - 1)) == 0) | (i == 0)


class Listed(NamedTuple):
    """A pattern as the kernels read it, and for which calls: see `listed`."""

    lists: Tensor
    causal: bool
    documents: bool
    ragged: bool

    def to(self, device: torch.device | str) -> "Listed":
        """On another device."""
        return self._replace(lists=self.lists.to(device))


def listed(pattern: Tensor, causal: bool, documents: bool, ragged: bool) -> Listed:
    """The pattern (n, n), boolean, as the kernels read it: (2, n, 2 + n) int32 on the pattern's device.

    [0, i] is about the i-th block of queries and [1, j] about the j-th block of keys: how many of the blocks it is
    paired with come in the first part of its list, how many in both parts, then the list. Blocks of keys that all of
    a block of queries sees whole come first in [0], and blocks of queries that see it whole come last in [1]: with
    documents there are none such. `ragged` says that the last block is not filled.
    """
    n = len(pattern)
    i = torch.arange(n, device=pattern.device)
    whole = pattern & (i[:, None] > i) if causal else pattern.clone()
    if documents:
        whole = torch.zeros_like(pattern)
    kept = pattern & (i[:, None] >= i) if causal else pattern
    seen_whole = whole & (i < n - 1) if ragged else whole
    of_queries = _ordered(seen_whole, kept & ~seen_whole)
    of_keys = _ordered((kept & ~whole).T, whole.T)
    return Listed(torch.stack([of_queries, of_keys]), causal, documents, ragged)


def _ordered(first: Tensor, second: Tensor) -> Tensor:
    """(n, 2 + n) int32: of each row of two disjoint boolean matrices the counts, then the columns of the one and of the
    other, in rising order."""
    rank = torch.where(first, 0, torch.where(second, 1, 2))
    columns = rank.sort(dim=1, stable=True).indices
    counts = first.sum(1), (first | second).sum(1)
    return torch.cat([torch.stack(counts, 1), columns], 1).to(torch.int32)
