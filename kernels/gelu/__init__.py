"""The two linear layers of a GPT-2 block with tanh-GELU between them: operators, kernels, definition."""

from kernels.gelu.op import gelu_mlp

__all__ = ["gelu_mlp"]
