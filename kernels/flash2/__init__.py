"""FlashAttention-2: the operator `flash2`, its Triton kernels, and the PyTorch algorithm that defines them."""

from kernels.flash2.op import flash2

__all__ = ["flash2"]
