"""FlashAttention-2: the operators, their Triton kernels, and the PyTorch algorithm that defines them."""

from kernels.flash2.op import flash2, flash2_packed

__all__ = ["flash2", "flash2_packed"]
