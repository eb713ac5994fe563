"""Tiled attention in plain PyTorch: what the definitions of the kernels share.

B batch, T query length, S key length, H query heads, G key/value heads, D head size.
"""

import torch
from torch import Tensor

from kernels.flash2.block_lists import BLOCK, HEADER

NEG_INF = float("-inf")


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def heads_first(x: Tensor, heads: int) -> Tensor:
    """(B, length, G, D) -> (B, H, length, D) in the accumulator's dtype, each key/value head repeated for its group."""
    x = x.transpose(1, 2).to(accumulator(x.dtype))
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def tiles(length: int, size: int) -> list[range]:
    """The rows of each tile; the last may be smaller."""
    return [range(start, min(start + size, length)) for start in range(0, length, size)]


class Visibility:
    """The keys [first, end) that each query sees; both (B or 1, T)."""

    def __init__(
        self, q: Tensor, k: Tensor, documents: Tensor | None, blocks: Tensor | None, causal: bool, window: int
    ):
        seq_q, seq_k = q.shape[1], k.shape[1]
        self.kept = None if blocks is None else [row[HEADER : HEADER + row[3]] for row in blocks.tolist()]
        own = torch.arange(seq_q, device=q.device)[None] + seq_k - seq_q  # the key at a query's own place
        self.first, self.end = torch.zeros_like(own), torch.full_like(own, seq_k)
        if documents is not None:
            self.first, self.end = documents.long().unbind(1)
        if causal:
            self.end = torch.minimum(self.end, own + 1)
        if window:
            self.first = torch.maximum(self.first, own + 1 - window)

    def overlap(self, rows: range, cols: range) -> bool:
        """Whether any query of a tile may see any key of it."""
        if self.kept is not None and cols.start // BLOCK not in self.kept[rows.start // BLOCK]:
            return False
        first, end = self.first[:, rows.start : rows.stop], self.end[:, rows.start : rows.stop]
        return cols.start < end.max() and cols.stop > first.min()

    def hide(self, x: Tensor, rows: range, cols: range, value: float) -> Tensor:
        """x (B, H, rows, cols) with `value` in place of what the query does not see."""
        first, end = (bound[:, None, rows.start : rows.stop, None] for bound in (self.first, self.end))
        if first.max() <= cols.start and cols.stop <= end.min():
            return x
        j = torch.arange(cols.start, cols.stop, device=x.device)
        return x.masked_fill_((j < first) | (j >= end), value)


def cut(x: Tensor, rows: range) -> Tensor:
    """Those rows of matrices (..., length, D)."""
    return x[..., rows.start : rows.stop, :]
