"""Which attention probabilities dropout keeps: Philox 4x32-10, the generator of the Triton kernels, in PyTorch.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). The bits of probability (b, h, i, j) depend only on
the seed and on (j, i, b H + h), never on the tiling, so both passes and every implementation drop the same ones. A
probability takes 16 bits, and one call gives 128: it serves eight keys, those of a group of 64 that are equal modulo 8.
"""

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
KEY_A, KEY_B = 0x9E3779B9, 0xBB67AE85


def threshold(dropout_p: float) -> int:
    """A probability is dropped where its 16 random bits are below this integer; dropout_p is met to 1 / 131072."""
    return round(dropout_p * 2**16)


def _multiply(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low words of a 32 x 32 bit product, in int64 without overflow (halves of 16 bits)."""
    low = constant * (x & 0xFFFF)
    high = constant * (x >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def random_words(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, ...]:
    """The four words of Philox at the counter (c0, c1, c2, c3), as int64 in [0, 2^32); counters broadcast."""
    c0, c1, c2, c3 = torch.broadcast_tensors(c0, c1, c2, c3)
    key_a, key_b = seed & MASK32, (seed >> 32) & MASK32
    for _ in range(10):
        high_a, low_a = _multiply(ROUND_A, c0)
        high_b, low_b = _multiply(ROUND_B, c2)
        c0, c1, c2, c3 = high_b ^ c1 ^ key_a, low_b, high_a ^ c3 ^ key_b, low_a
        key_a, key_b = (key_a + KEY_A) & MASK32, (key_b + KEY_B) & MASK32
    return c0, c1, c2, c3


def keep_mask(seed: Tensor, batch: int, heads: int, rows: range, cols: range, dropout_p: float) -> Tensor:
    """(B, H, rows, cols) boolean: True where the probability survives. `seed` is one int64 on the mask's device."""
    device = seed.device
    i = torch.arange(rows.start, rows.stop, device=device)[:, None]
    groups = torch.arange(cols.start // 64 * 8, (cols.stop + 63) // 64 * 8, device=device)
    head = torch.arange(batch * heads, device=device)[:, None, None]
    words = torch.stack(random_words(seed.reshape(()), groups, i, head, torch.zeros_like(groups)), dim=-1)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=-2)  # (B H, rows, groups, 2, 4)
    bits = halves.unflatten(2, (-1, 8)).permute(0, 1, 2, 4, 5, 3).flatten(2)  # key = 64 group + 32 half + 8 word + rest
    first = cols.start // 64 * 64
    kept = bits[..., cols.start - first : cols.stop - first] >= threshold(dropout_p)
    return kept.view(batch, heads, len(rows), len(cols))
