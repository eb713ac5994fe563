"""FlashAttention as in the first paper."""

from kernels.flash1.op import flash1

__all__ = ["flash1"]
