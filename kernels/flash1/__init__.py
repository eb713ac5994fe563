"""FlashAttention, as it was first: the operator, the Triton kernels, and the PyTorch algorithm that defines it."""

from kernels.flash1.op import flash1

__all__ = ["flash1"]
