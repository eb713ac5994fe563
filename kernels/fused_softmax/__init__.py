"""Megatron-LM's attention: two matrix products, and one kernel for scale, mask, softmax and dropout between them."""

from kernels.fused_softmax.op import LONGEST_ROW, fused_softmax

__all__ = ["LONGEST_ROW", "fused_softmax"]
