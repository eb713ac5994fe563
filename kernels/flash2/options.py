"""What the operators of flash2 take besides their tensors, in their order."""

from typing import NamedTuple

from torch import Tensor


class Options(NamedTuple):
    """Which keys a query sees, the scale of the scores, and dropout."""

    numbers: Tensor | None = None
    """(B, H, T + S) int32: the randomness of dropout, as dropout.draw draws it; None without dropout."""
    documents: Tensor | None = None
    """(B, 2, T) int32: where the document of each token starts and ends in its sequence; None where all is one."""
    blocks: Tensor | None = None
    """(2 n or more, 4 + n) int32: the blocks of queries and keys to compute, by blocks.listed; None for all."""
    causal: bool = False
    """Query i sees the keys up to i + seq_k - seq_q."""
    window: int = 0
    """Of those, it sees the last so many; all of them at 0."""
    scale: float = 1.0
    dropout_p: float = 0.0
