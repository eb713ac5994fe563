"""The choice for the loss over a linear head on a GPU: Hopper's fused product, or cuBLAS and a plain Triton kernel."""

import torch
from torch import Tensor

from kernels.cross_entropy import triton_kernels
from kernels.hopper import selection


def losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, gradient: bool, out: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Compute definition.losses. On Hopper, bf16 inputs give the results of definition.relative_losses."""
    with torch.cuda.device_of(hidden):
        if hidden.dtype == torch.bfloat16 and selection.fuses(*out.shape, hidden, weight):
            from kernels.cross_entropy import hopper  # Gluon code for Hopper; other GPUs must not import it

            return hopper.losses(hidden, weight, targets, vocab_size, out)
        torch.mm(hidden, weight.T, out=out)
        return triton_kernels.cross_entropy_(out, targets, vocab_size, gradient), None


def rescale_(dhidden: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, scales: Tensor) -> Tensor:
    """Compute definition.rescale_."""
    with torch.cuda.device_of(hidden):
        return triton_kernels.rescale_(dhidden, hidden, weight, targets, scales)
