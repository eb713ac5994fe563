"""Cross-entropy over a linear head."""

from kernels.cross_entropy.op import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
