"""LayerNorm of a residual stream that goes on beside it: operators, kernel, definition."""

from kernels.layer_norm.op import normalise

__all__ = ["normalise"]
