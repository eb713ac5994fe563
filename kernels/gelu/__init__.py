"""GELU of a linear layer's output, bias added and its gradient summed on the way: operator, kernels, definition."""

from kernels.gelu.op import bias_gelu, bias_gelu_linear

__all__ = ["bias_gelu", "bias_gelu_linear"]
