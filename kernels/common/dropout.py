"""Which attention probabilities dropout keeps, in PyTorch: the Triton kernels compute the same.

Every query and every key of a head draws a random odd number r of 32 bits; probability (i, j) survives where the
product r_i r_j modulo 2^32, uniform too, reaches dropout_p 2^32. That is multiplicative hashing (Dietzfelbinger et al.,
"A reliable randomized algorithm for the closest-pair problem", 1997): any three of the decisions are independent, and
their matrix has the spectrum of a random one. It costs a multiplication where Philox costs forty instructions, depends
on no tiling, so that both passes and every implementation drop the same, and takes memory linear in the sequence.
"""

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF


def draw(batch: int, heads: int, seq_q: int, seq_k: int, device: torch.device) -> Tensor:
    """The numbers of all queries, then of all keys, (B, H, T + S) int32, from torch's generator."""
    return torch.randint(-(2**31), 2**31, (batch, heads, seq_q + seq_k), dtype=torch.int32, device=device) | 1


def threshold(dropout_p: float) -> int:
    """dropout_p 2^32 as the 32-bit integer, signed, that has the bits of the unsigned one."""
    unsigned = min(round(dropout_p * 2**32), MASK32)
    return unsigned - 2**32 if unsigned >= 2**31 else unsigned


def keep_mask(numbers: Tensor, seq_q: int, rows: range, cols: range, dropout_p: float) -> Tensor:
    """(B, H, rows, cols) boolean: True where the probability survives; `numbers` as drawn."""
    of_queries, of_keys = numbers.long().tensor_split([seq_q], dim=-1)
    product = of_queries[:, :, rows.start : rows.stop, None] * of_keys[:, :, None, cols.start : cols.stop]
    return (product & MASK32) >= (threshold(dropout_p) & MASK32)
