"""Dropout of attention probabilities in PyTorch. The Triton kernels compute the same mask.

Every query and every key of a head draws a random odd 32-bit number r. Probability (i, j) survives if the product
r_i r_j modulo 2^32, which is uniform too, is at least dropout_p 2^32. This is multiplicative hashing (Dietzfelbinger et
al., "A reliable randomized algorithm for the closest-pair problem", 1997): any three decisions are independent, and
their matrix has the spectrum of a random one. A decision costs one multiplication; Philox costs forty instructions. The
mask does not depend on the tiling, so both passes and every implementation drop the same elements.

B batch, H query heads, T query length, S key length.
"""

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF


def draw(batch: int, heads: int, seq_q: int, seq_k: int, device: torch.device) -> Tensor:
    """Draw the numbers of all queries, then of all keys, (B, H, T + S) int32, from torch's generator."""
    return torch.randint(-(2**31), 2**31, (batch, heads, seq_q + seq_k), dtype=torch.int32, device=device) | 1


def threshold(dropout_p: float) -> int:
    """Return dropout_p 2^32 as the signed 32-bit integer with the same bits as the unsigned one."""
    unsigned = min(round(dropout_p * 2**32), MASK32)
    return unsigned - 2**32 if unsigned >= 2**31 else unsigned


def keep_mask(numbers: Tensor, seq_q: int, rows: range, cols: range, dropout_p: float) -> Tensor:
    """Return (B, H, rows, cols) boolean, True for probabilities that survive; `numbers` come from `draw`."""
    of_queries, of_keys = numbers.long().tensor_split([seq_q], dim=-1)
    product = of_queries[:, :, rows.start : rows.stop, None] * of_keys[:, :, None, cols.start : cols.stop]
    return (product & MASK32) >= (threshold(dropout_p) & MASK32)
