"""Cross-entropy over a linear head: its operator, its kernels, and the PyTorch that defines it."""

from kernels.cross_entropy.op import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
