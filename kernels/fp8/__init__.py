"""Linear layers whose matrix products are in FP8, with one scale for each tensor."""

from kernels.fp8.op import Scaled, gelu_mlp, linear

__all__ = ["Scaled", "gelu_mlp", "linear"]
