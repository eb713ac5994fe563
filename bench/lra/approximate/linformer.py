"""Linformer: Wang et al., "Linformer: Self-Attention with Linear Complexity" (2020)."""

import torch
from torch import Tensor, nn

from bench.lra.approximate.softmax import attend
from bench.lra.config import EncoderConfig


class Linformer(nn.Module):
    """Equation 7 of the paper: softmax(q (E k)^T D**-0.5) (F v), with learned E and F that shorten the sequence.

    All heads of a layer share E and F ("headwise sharing", section 4). Both are (rank, context_length) and begin with a
    standard deviation of 0.02, as in the code of Xiong et al. Shorter sequences use the first T columns.
    """

    def __init__(self, config: EncoderConfig, rank: int = 256):
        super().__init__()
        shape = min(rank, config.context_length), config.context_length
        self.E, self.F = (nn.Parameter(0.02 * torch.randn(shape)) for _ in range(2))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention to the `rank` projected keys and values."""
        k, v = (_shorten(x, matrix) for x, matrix in ((k, self.E), (v, self.F)))
        return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def _shorten(x: Tensor, matrix: Tensor) -> Tensor:
    """Return matrix (R, context_length) times x (B, T, H, D): (B, R, H, D)."""
    short = matrix[:, : x.shape[1]].to(x.dtype) @ x.flatten(2)
    return short.unflatten(2, x.shape[2:])
