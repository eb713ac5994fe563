"""Megatron-LM's attention: two matrix products around one fused kernel of scale, mask, softmax, dropout."""

from kernels.fused_softmax.op import LONGEST_ROW, fused_softmax

__all__ = ["LONGEST_ROW", "fused_softmax"]
