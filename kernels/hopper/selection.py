"""Which matrix products are Hopper's own (product.py), with the work on their results in the epilogue."""

import torch
from torch import Tensor

from kernels.common.launching import arch_of, are_aligned, triton_version

TILE = 128, 256  # rows and columns, of product.py
MULTIPROCESSORS = 132  # of an H200 or an H100 SXM


def is_fused(rows: int, columns: int, depth: int, dtype: torch.dtype, arch: str) -> bool:
    """Whether product.py multiplies (rows, depth) by (depth, columns).

    It does on sm_90 under Triton 3.6 or later, in 16 bits, for rows that are read and written 16 bytes at a time, and a
    tile for every multiprocessor.
    """
    if arch != "sm_90" or triton_version() < (3, 6) or dtype.itemsize != 2:
        return False
    return columns % 8 == 0 and depth % 8 == 0 and -(-rows // TILE[0]) * -(-columns // TILE[1]) >= MULTIPROCESSORS


def fuses(rows: int, columns: int, x: Tensor, *others: Tensor) -> bool:
    """is_fused of x (rows, depth) and the other tensors that the product reads."""
    fits = is_fused(rows, columns, x.shape[1], x.dtype, arch_of(x.device))
    return fits and are_aligned(x, *others) and all(tensor.is_contiguous() for tensor in (x, *others))


def fuses_whole_tiles(rows: int, columns: int, x: Tensor, *others: Tensor) -> bool:
    """fuses, where a row is one of whole tiles, as in any GPT-2 but the widest."""
    return columns % TILE[1] == 0 and fuses(rows, columns, x, *others)
