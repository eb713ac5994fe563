"""The options that the operators of flash2 take after their tensors, in order."""

from typing import NamedTuple

from torch import Tensor

from kernels.common.dropout import threshold


class Options(NamedTuple):
    """Which keys a query sees, the scale of the scores, and dropout."""

    numbers: Tensor | None = None  # (B, H, T + S) int32: random numbers of dropout from dropout.draw
    documents: Tensor | None = None  # (B, 2, T) int32: where each token's document starts and ends in its sequence
    blocks: Tensor | None = None  # (2 n or more, 4 + n) int32: the blocks to compute, from block_lists.listed
    causal: bool = False  # query i sees only the keys up to i + seq_k - seq_q
    window: int = 0  # a query sees only the last `window` of these keys; 0 for all
    scale: float = 1.0  # factor of the scores
    dropout_p: float = 0.0  # share of the probabilities that is dropped

    @property
    def masks(self) -> tuple[bool, bool, bool]:
        """CAUSAL, WINDOW and DOCUMENTS of the kernels."""
        return self.causal, self.window > 0, self.documents is not None

    @property
    def factors(self) -> tuple[float, int, float]:
        """scale, threshold (see dropout.threshold) and keep_scale of the kernels."""
        return self.scale, threshold(self.dropout_p), 1 / (1 - self.dropout_p)
