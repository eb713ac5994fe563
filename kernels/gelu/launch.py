"""What a linear layer with GELU launches on a GPU: Hopper's fused products, or cuBLAS's with GELU by plain Triton."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.gelu import triton_kernels
from kernels.launcher import arch_of, are_aligned, triton_version

TILE = 128, 256  # of hopper.py
MULTIPROCESSORS = 132  # of an H100 or H200


def is_fused(rows: int, columns: int, depth: int, dtype: torch.dtype, arch: str) -> bool:
    """Whether hopper.py multiplies (rows, depth) by (depth, columns).

    It does on sm_90 under Triton 3.6 or later, in 16 bits, for whole tiles of columns, rows that TMA can read, and a
    tile for every multiprocessor: all widths of GPT-2 in training, none in generation.
    """
    if arch != "sm_90" or triton_version() < (3, 6) or dtype.itemsize != 2:
        return False
    whole = columns % TILE[1] == 0 and depth % 8 == 0
    return whole and -(-rows // TILE[0]) * (columns // TILE[1]) >= MULTIPROCESSORS


def _fuses(rows: int, columns: int, *factors: Tensor) -> bool:
    """is_fused of these factors, the first of which is (rows, depth)."""
    dtype, arch = factors[0].dtype, arch_of(factors[0].device)
    fits = is_fused(rows, columns, factors[0].shape[1], dtype, arch)
    return fits and are_aligned(*factors) and all(x.is_contiguous() for x in factors)


def forward(x: Tensor, weight: Tensor, bias: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """Same contract as definition.forward."""
    if _fuses(len(x), len(weight), x, weight):
        from kernels.gelu import hopper  # Gluon, which is for no other GPU

        return hopper.forward(x, weight, bias, keep)
    pre = F.linear(x, weight, bias.to(x.dtype))
    return pre, triton_kernels.forward_(pre, keep)


def backward(dout: Tensor, weight: Tensor, kept: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Same contract as definition.backward."""
    if _fuses(*kept.shape, dout, weight):
        from kernels.gelu import hopper

        return hopper.backward(dout, weight, kept, keep)
    return triton_kernels.backward(dout @ weight, kept, keep)
