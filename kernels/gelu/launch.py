"""What a linear layer with GELU launches on a GPU: Hopper's fused products, or cuBLAS's with GELU by plain Triton."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.gelu import triton_kernels
from kernels.launcher import arch_of, are_aligned, triton_version

TILE = 128, 256  # rows and columns, of hopper.py
MULTIPROCESSORS = 132  # of an H200 or an H100 SXM


def is_fused(rows: int, columns: int, depth: int, dtype: torch.dtype, arch: str) -> bool:
    """Whether hopper.py multiplies (rows, depth) by (depth, columns).

    It does on sm_90 under Triton 3.6 or later, in 16 bits, for whole tiles of columns, rows that TMA can read, and a
    tile for every multiprocessor: any GPT-2 from 1281 tokens a micro-batch on.
    """
    if arch != "sm_90" or triton_version() < (3, 6) or dtype.itemsize != 2:
        return False
    whole = columns % TILE[1] == 0 and depth % 8 == 0
    return whole and -(-rows // TILE[0]) * (columns // TILE[1]) >= MULTIPROCESSORS


def _fuses(rows: int, columns: int, x: Tensor, *others: Tensor) -> bool:
    """is_fused of x (rows, depth) and the other tensors that the product reads."""
    fits = is_fused(rows, columns, x.shape[1], x.dtype, arch_of(x.device))
    return fits and are_aligned(x, *others) and all(tensor.is_contiguous() for tensor in (x, *others))


def forward(x: Tensor, weight: Tensor, bias: Tensor, keep_output: bool) -> tuple[Tensor, Tensor]:
    """Same contract as definition.forward."""
    if _fuses(len(x), len(weight), x, weight, bias):
        from kernels.gelu import hopper  # Gluon, which is for no other GPU

        return hopper.forward(x, weight, bias, keep_output)
    pre = F.linear(x, weight, bias.to(x.dtype))
    return pre, triton_kernels.forward_(pre, keep_output)


def backward(dout: Tensor, weight: Tensor, saved: Tensor, keep_output: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Same contract as definition.backward."""
    if _fuses(*saved.shape, dout, weight, saved):
        from kernels.gelu import hopper

        return hopper.backward(dout, weight, saved, keep_output)
    return triton_kernels.backward(dout @ weight, saved, keep_output)
