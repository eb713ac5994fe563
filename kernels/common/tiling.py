"""Attention in plain PyTorch: the parts that the definitions of flash1, flash2 and fused_softmax share.

B batch, T query length, S key length, H query heads, G key/value heads, D head size.
"""

import torch
from torch import Tensor

from kernels.common.dtypes import accumulator

NEG_INF = float("-inf")


def heads_first(x: Tensor, heads: int) -> Tensor:
    """Return x (B, length, G, D) as (B, H, length, D) in the accumulator's dtype, with each key/value head repeated."""
    x = x.transpose(1, 2).to(accumulator(x.dtype))
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def tiles(length: int, size: int) -> list[range]:
    """Return the rows of each tile; the last tile may be smaller."""
    return [range(start, min(start + size, length)) for start in range(0, length, size)]


def cut(x: Tensor, rows: range) -> Tensor:
    """Return a view of these rows of the matrices x (..., length, D)."""
    return x[..., rows.start : rows.stop, :]


class Visibility:
    """The keys [first, end) that each query sees; both bounds are (B or 1, T)."""

    def __init__(
        self, seq_q: int, seq_k: int, device: torch.device, documents: Tensor | None, causal: bool, window: int = 0
    ):
        own = torch.arange(seq_q, device=device)[None] + seq_k - seq_q  # the key at the query's own position
        self.first, self.end = torch.zeros_like(own), torch.full_like(own, seq_k)
        if documents is not None:
            self.first, self.end = documents.long().unbind(1)
        if causal:
            self.end = torch.minimum(self.end, own + 1)
        if window:
            self.first = torch.maximum(self.first, own + 1 - window)

    def overlap(self, rows: range, cols: range) -> bool:
        """Return whether the tile may hold a pair of a query and a key that it sees."""
        first, end = self.first[:, rows.start : rows.stop], self.end[:, rows.start : rows.stop]
        return cols.start < end.max() and cols.stop > first.min()

    def hide(self, x: Tensor, rows: range, cols: range, value: float) -> Tensor:
        """Write `value` to the elements of x (B, H, rows, cols) that the query does not see, and return x."""
        first, end = (bound[:, None, rows.start : rows.stop, None] for bound in (self.first, self.end))
        if first.max() <= cols.start and cols.stop <= end.min():
            return x
        j = torch.arange(cols.start, cols.stop, device=x.device)
        return x.masked_fill_((j < first) | (j >= end), value)
