"""The two linear layers of a GPT-2 block with tanh-GELU between them."""

from kernels.gelu.op import gelu_mlp

__all__ = ["gelu_mlp"]
