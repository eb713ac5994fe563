"""A linear layer that adds its result to a residual stream."""

from kernels.linear.op import linear, weight_gradient

__all__ = ["linear", "weight_gradient"]
