"""What the loss over a linear head launches on a GPU: Hopper's fused product, or cuBLAS's and plain Triton after it."""

import torch
from torch import Tensor

from kernels.cross_entropy import triton_kernels
from kernels.hopper import selection as products


def losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, gradient: bool, out: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Same contract as definition.losses, or on Hopper in bf16 as definition.relative_losses, for rescale_."""
    with torch.cuda.device_of(hidden):
        if hidden.dtype == torch.bfloat16 and products.fuses(*out.shape, hidden, weight):
            from kernels.cross_entropy import hopper  # Gluon, which is for no other GPU

            return hopper.losses(hidden, weight, targets, vocab_size, out)
        torch.mm(hidden, weight.T, out=out)
        return triton_kernels.cross_entropy_(out, targets, vocab_size, gradient), None


def rescale_(dhidden: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, scales: Tensor) -> Tensor:
    """Same contract as definition.rescale_."""
    with torch.cuda.device_of(hidden):
        return triton_kernels.rescale_(dhidden, hidden, weight, targets, scales)
