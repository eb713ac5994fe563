"""Block-sparse attention: which blocks of 128 queries by 128 keys are computed, and the lists that the kernels read.

Dao et al., "FlashAttention" (2022), section 3.3: blocks that the mask hides are never loaded, so time is proportional
to the number of blocks left. One pattern applies to all sequences and heads. Causal order, documents and dropout act
inside the blocks that are kept.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128
HEADER = 4  # numbers in a row of `listed` before its list


def butterfly(n: int) -> Tensor:
    """Return (n, n) boolean: block i of queries keeps itself, the blocks i XOR 2^k, and the first block of keys.

    This is the flat butterfly of Dao et al., "Pixelated Butterfly" (2021), with a global part. A row keeps at most 2 +
    log2(n) blocks, and log2(n) layers connect every block with every other.
    """
    i = torch.arange(n)
    difference = i[:, None] ^ i
    return ((difference & (difference - 1)) == 0) | (i == 0)


class Listed(NamedTuple):
    """A pattern as the kernels read it, and the kind of calls that it was listed for; see `listed`."""

    lists: Tensor
    causal: bool
    documents: bool
    ragged: bool

    def to(self, device: torch.device | str) -> "Listed":
        """Return the same lists on `device`."""
        return self._replace(lists=self.lists.to(device))


def listed(pattern: Tensor, causal: bool, documents: bool, ragged: bool) -> Listed:
    """Return a boolean pattern (n, n) as the kernels read it: (2 n or more, 4 + n) int32 on the pattern's device.

    The first n rows are for blocks of queries and list blocks of keys. The other rows are for blocks of keys and list
    blocks of queries. A row has: the block's number, the number of rows of its list, the length of the list's first
    part, the length of the list, and the list itself. `ragged` says that the last block is not full.

    "Whole" blocks need no mask. A list of keys has them in its first part, a list of queries in its second part. With
    documents, no block counts as whole.

    A block of keys that many queries see, such as the butterfly's first, has its list in several consecutive rows. All
    except the first of these say 0 for the number of rows. Divided lists come first, then longer before shorter ones.
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
    """Return (n, 4 + n) int32 rows for two disjoint boolean matrices.

    A row has its number, 1, the counts, then the columns of the first and of the second matrix in rising order.
    """
    rank = torch.where(first, 0, torch.where(second, 1, 2))
    columns = rank.sort(dim=1, stable=True).indices
    i = torch.arange(len(rank), device=rank.device)
    header = i, torch.ones_like(i), first.sum(1), (first | second).sum(1)
    return torch.cat([torch.stack(header, 1), columns], 1).to(torch.int32)


def longest_piece(counts: Tensor) -> int:
    """Return the length above which lists are divided.

    A program with up to three times the mean length hardly ends after the others. A division costs a sum in memory,
    which is small compared with 16 blocks.
    """
    return max(16, math.ceil(3 * counts.float().mean()))


def _divided(rows: Tensor) -> Tensor:
    """Return the rows with long lists divided into rows of about the same length, in the order of `listed`."""
    n = len(rows)
    pieces = (rows[:, 3] / longest_piece(rows[:, 3])).ceil().long().clamp(min=1)
    length = (rows[:, 3] / pieces).ceil().long()
    order = torch.argsort(length + n * (pieces > 1), descending=True, stable=True)
    source = order.repeat_interleave(pieces[order])  # the list that each new row is a piece of
    # Number the pieces of each list from 0.
    piece = torch.arange(len(source), device=rows.device)
    piece -= (pieces[order].cumsum(0) - pieces[order]).repeat_interleave(pieces[order])
    rows, start = rows[source], piece * length[source]
    stop = torch.minimum(start + length[source], rows[:, 3])
    counts = (rows[:, 2] - start).clamp(min=0).minimum(stop - start), stop - start
    columns = (start[:, None] + torch.arange(n, device=rows.device)).clamp(max=n - 1)
    header = rows[:, 0], torch.where(piece == 0, pieces[source], 0), *counts
    return torch.cat([torch.stack(header, 1), rows[:, HEADER:].gather(1, columns)], 1).to(torch.int32)
