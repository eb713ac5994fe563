"""What a linear layer with GELU launches on a GPU: Hopper's fused products, or cuBLAS's with GELU by plain Triton."""

import torch.nn.functional as F
from torch import Tensor

from kernels.gelu import triton_kernels
from kernels.hopper import selection as products


def forward(x: Tensor, weight: Tensor, bias: Tensor, keep_output: bool) -> tuple[Tensor, Tensor]:
    """Same contract as definition.forward."""
    if products.fuses_whole_tiles(len(x), len(weight), x, weight, bias):
        from kernels.gelu import hopper  # Gluon, which is for no other GPU

        return hopper.forward(x, weight, bias, keep_output)
    saved, bias = F.linear(x, weight), bias.contiguous()
    return saved, triton_kernels.forward_(saved, bias, keep_output)


def backward(
    dout: Tensor, weight: Tensor, bias: Tensor, saved: Tensor, keep_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Same contract as definition.backward."""
    if products.fuses_whole_tiles(*saved.shape, dout, weight, bias, saved):
        from kernels.gelu import hopper

        return hopper.backward(dout, weight, bias, saved, keep_output)
    return triton_kernels.backward(dout @ weight, saved, bias.contiguous(), keep_output)
