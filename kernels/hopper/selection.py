"""The rules that decide whether a matrix product runs on Hopper's own kernel, product.py."""

import torch
from torch import Tensor

from kernels.common.launching import arch_of, are_aligned, runs_gluon

TILE = 128, 256  # rows and columns that a program of product.py computes at a time
MULTIPROCESSORS = 132  # of an H200 or an H100 SXM


def is_fused(rows: int, columns: int, depth: int, dtype: torch.dtype, arch: str) -> bool:
    """Return whether product.py multiplies (rows, depth) by (depth, columns).

    It needs sm_90, Triton 3.6 or later, a 16-bit dtype, rows in units of 16 bytes, and a tile per multiprocessor.
    """
    if not runs_gluon(arch, dtype):
        return False
    return columns % 8 == 0 and depth % 8 == 0 and -(-rows // TILE[0]) * -(-columns // TILE[1]) >= MULTIPROCESSORS


def fuses(rows: int, columns: int, x: Tensor, *others: Tensor) -> bool:
    """Return is_fused for x (rows, depth), if x and the other tensors that the kernel reads are dense and aligned."""
    fits = is_fused(rows, columns, x.shape[1], x.dtype, arch_of(x.device))
    return fits and are_aligned(x, *others) and all(tensor.is_contiguous() for tensor in (x, *others))


def fuses_whole_tiles(rows: int, columns: int, x: Tensor, *others: Tensor) -> bool:
    """Return `fuses` if the columns fill whole tiles, as in every GPT-2 except the widest."""
    return columns % TILE[1] == 0 and fuses(rows, columns, x, *others)
