"""What the loss over a linear head launches on a GPU: Hopper's fused product, or cuBLAS's and plain Triton after it."""

import torch
from torch import Tensor

from kernels import products
from kernels.cross_entropy import triton_kernels


def losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, gradient: bool, logits: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Same contract as definition.losses; on Hopper in bf16, logits more than 69 above their target's count as 69."""
    if hidden.dtype == torch.bfloat16 and products.fuses(*logits.shape, hidden, weight):
        from kernels.cross_entropy import hopper  # Gluon, which is for no other GPU

        return hopper.losses(hidden, weight, targets, vocab_size, logits)
    torch.mm(hidden, weight.T, out=logits)
    return triton_kernels.cross_entropy_(logits, targets, vocab_size, gradient), None
