"""The choice for a linear layer with GELU on a GPU: Hopper's fused products, or cuBLAS and plain Triton kernels."""

import torch.nn.functional as F
from torch import Tensor

from kernels.gelu import triton_kernels
from kernels.hopper import selection


def forward(x: Tensor, weight: Tensor, bias: Tensor, keep_output: bool) -> tuple[Tensor, Tensor]:
    """Compute definition.forward."""
    if selection.fuses_whole_tiles(len(x), len(weight), x, weight, bias):
        from kernels.gelu import hopper  # Gluon code for Hopper; other GPUs must not import it

        return hopper.forward(x, weight, bias, keep_output)
    saved, bias = F.linear(x, weight), bias.contiguous()
    return saved, triton_kernels.forward_(saved, bias, keep_output)


def backward(
    dout: Tensor, weight: Tensor, bias: Tensor, saved: Tensor, keep_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute definition.backward."""
    if selection.fuses_whole_tiles(*saved.shape, dout, weight, bias, saved):
        from kernels.gelu import hopper

        return hopper.backward(dout, weight, bias, saved, keep_output)
    return triton_kernels.backward(dout @ weight, saved, bias.contiguous(), keep_output)
