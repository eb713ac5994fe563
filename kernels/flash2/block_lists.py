"""Block-sparse attention: which blocks of 128 queries by 128 keys are computed, and the lists that the kernels walk.

Dao et al., "FlashAttention" (2022), section 3.3: what a block of zeros in the mask would hide is never loaded, so that
time falls with the blocks left. The pattern is one for all sequences and heads; causal order, documents and dropout act
inside the blocks that are kept.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128
HEADER = 4
"""Numbers of a row of `listed` before its list."""


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
    """The pattern (n, n), boolean, as the kernels read it: (2 n or more, 4 + n) int32 on the pattern's device.

    A row for each block of queries, then those of the blocks of keys: a block's number, in how many rows its list is,
    how many of the blocks it is paired with come in the first part of the list, how many in all of it, and the list.
    Blocks of keys that all of a block of queries sees whole come first in the rows of queries, and blocks of queries
    that see it whole come last in those of keys: with documents there are none such. `ragged` says that the last block
    is not filled.

    A block of keys that many queries see, such as the butterfly's first, has its list in several rows, one after the
    other, of which all but the first say 0 for their number; those rows come before all others, and else the longest.
    """
    n = len(pattern)
    i = torch.arange(n, device=pattern.device)
    whole = pattern & (i[:, None] > i) if causal else pattern.clone()
    if documents:
        whole = torch.zeros_like(pattern)
    kept = pattern & (i[:, None] >= i) if causal else pattern
    seen_whole = whole & (i < n - 1) if ragged else whole
    of_queries = _rows(seen_whole, kept & ~seen_whole)
    of_keys = _divided(_rows((kept & ~whole).T, whole.T))
    return Listed(torch.cat([of_queries, of_keys]), causal, documents, ragged)


def _rows(first: Tensor, second: Tensor) -> Tensor:
    """(n, 4 + n) int32: of each row of two disjoint boolean matrices its number, 1, the counts, then the columns of the
    one and of the other, in rising order."""
    rank = torch.where(first, 0, torch.where(second, 1, 2))
    columns = rank.sort(dim=1, stable=True).indices
    i = torch.arange(len(rank), device=rank.device)
    header = i, torch.ones_like(i), first.sum(1), (first | second).sum(1)
    return torch.cat([torch.stack(header, 1), columns], 1).to(torch.int32)


def longest_piece(counts: Tensor) -> int:
    """Longer lists are divided. One program walks down a list: of three times the mean it hardly ends after the others,
    and what pieces cost, a sum in memory, is little beside 16 blocks."""
    return max(16, math.ceil(3 * counts.float().mean()))


def _divided(rows: Tensor) -> Tensor:
    """The rows, those with long lists in several of about the same length, and in the order that `listed` tells."""
    n = len(rows)
    pieces = (rows[:, 3] / longest_piece(rows[:, 3])).ceil().long().clamp(min=1)
    length = (rows[:, 3] / pieces).ceil().long()
    order = torch.argsort(length + n * (pieces > 1), descending=True, stable=True)
    source = order.repeat_interleave(pieces[order])
    piece = torch.arange(len(source), device=rows.device)
    piece -= (pieces[order].cumsum(0) - pieces[order]).repeat_interleave(pieces[order])
    rows, start = rows[source], piece * length[source]
    stop = torch.minimum(start + length[source], rows[:, 3])
    counts = (rows[:, 2] - start).clamp(min=0).minimum(stop - start), stop - start
    columns = (start[:, None] + torch.arange(n, device=rows.device)).clamp(max=n - 1)
    header = rows[:, 0], torch.where(piece == 0, pieces[source], 0), *counts
    return torch.cat([torch.stack(header, 1), rows[:, HEADER:].gather(1, columns)], 1).to(torch.int32)
