"""A linear layer that adds its result to a residual stream."""

from kernels.linear.op import linear

__all__ = ["linear"]
