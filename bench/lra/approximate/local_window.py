"""Local attention: softmax attention in a two-sided window, the "local attention" of Tay et al. (2021)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.lra.approximate.softmax import attend
from bench.lra.config import EncoderConfig


class LocalWindow(nn.Module):
    """Each token attends to the tokens at a distance of at most `radius` on both sides.

    The sequence is divided into blocks of `radius` tokens. A block of queries multiplies the keys of its own and of the
    two adjacent blocks, which hold every key in its window, and hides the others.
    """

    def __init__(self, config: EncoderConfig, radius: int = 128):
        super().__init__()
        self.radius = radius

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention inside the window."""
        length = q.shape[1]
        q, k, v = (self._blocks(x) for x in (q, k, v))
        out = attend(q, _with_neighbours(k), _with_neighbours(v), self._outside(length, q.device))
        return out.flatten(2, 3)[:, :, :length].transpose(1, 2)

    def _blocks(self, x: Tensor) -> Tensor:
        """Return x (B, T, H, D) as blocks (B, H, n, radius, D). Zeros fill the last block."""
        x = F.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % self.radius))
        return x.unflatten(2, (-1, self.radius))

    def _outside(self, length: int, device: torch.device) -> Tensor:
        """Return which pairs are outside the window or the sequence, (n, radius, 3 radius) boolean."""
        blocks = torch.arange(-(-length // self.radius), device=device)[:, None, None]
        query = torch.arange(self.radius, device=device)[:, None]
        key = torch.arange(-self.radius, 2 * self.radius, device=device)
        position = blocks * self.radius + key
        return ((query - key).abs() > self.radius) | (position < 0) | (position >= length)


def _with_neighbours(x: Tensor) -> Tensor:
    """Return each block of x (B, H, n, S, D) between the blocks before and after it, (B, H, n, 3 S, D)."""
    padded = F.pad(x, (0, 0, 0, 0, 1, 1))
    return torch.cat([padded[:, :, :-2], x, padded[:, :, 2:]], 3)
