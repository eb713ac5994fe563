"""LayerNorm of a residual stream whose gradient is added in the same kernel."""

from kernels.layer_norm.op import normalise

__all__ = ["normalise"]
