"""What a linear layer with GELU launches on a GPU: Hopper's fused products, or cuBLAS's with GELU by plain Triton."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.gelu import triton_kernels
from kernels.launcher import arch_of, are_aligned, triton_version


def is_fused(rows: int, columns: int, depth: int, dtype: torch.dtype, arch: str) -> bool:
    """Whether hopper.py multiplies (rows, depth) by (depth, columns): on sm_90 under Triton 3.6 or later, in 16 bits,
    with whole tiles of columns, rows that TMA can read, and work for every multiprocessor."""
    if arch != "sm_90" or triton_version() < (3, 6) or dtype.itemsize != 2:
        return False
    return columns % 256 == 0 and depth % 8 == 0 and rows * columns >= 132 * 128 * 256


def forward(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Same contract as definition.forward."""
    if is_fused(x.shape[0], *weight.shape, x.dtype, arch_of(x.device)) and are_aligned(x, weight):
        from kernels.gelu import hopper  # Gluon, which is for no other GPU

        return hopper.forward(x, weight, bias)
    pre = F.linear(x, weight)
    return pre, triton_kernels.forward(pre, bias)


def backward(dout: Tensor, weight: Tensor, pre: Tensor, bias: Tensor, again: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Same contract as definition.backward."""
    if is_fused(*pre.shape, dout.shape[1], dout.dtype, arch_of(dout.device)) and are_aligned(dout, weight, pre):
        from kernels.gelu import hopper

        return hopper.backward(dout, weight, pre, bias, again)
    return triton_kernels.backward(dout @ weight, pre, bias, again)
