"""The linear layers of a block, with products in autocast's dtype or in FP8."""

import torch
from torch import Tensor, nn

from kernels import fp8, gelu
from kernels.fp8 import Scaled
from kernels.linear import linear

# The scales' first values suit numbers up to these. The scales of weights are set from the weights.
FIRST_PEAKS = {"input": 2.0**5, "weight": 1.0, "gradient": 2.0**-7}


class Scales(nn.Module):
    """The scales of a layer's input, weight and gradient of the output, and their statistics: see kernels.fp8.

    trainer.scales sets the scales between steps. Checkpoints of the weights do not hold them.
    """

    def __init__(self):
        super().__init__()
        for role in FIRST_PEAKS:
            self.register_buffer(f"{role}_scale", torch.ones(()), persistent=False)
            self.register_buffer(f"{role}_statistics", torch.zeros(3), persistent=False)

    def scaled(self) -> tuple[Scaled, Scaled, Scaled]:
        """Return the scale and statistics of the input, the weight and the gradient."""
        return tuple(
            Scaled(getattr(self, f"{role}_scale"), getattr(self, f"{role}_statistics")) for role in FIRST_PEAKS
        )


class Linear(nn.Linear):
    """A linear layer of a block. With scales, training multiplies in FP8; evaluation and sampling do not."""

    def __init__(self, inputs: int, outputs: int, fp8: bool = False):
        super().__init__(inputs, outputs)
        self.scales = Scales() if fp8 else None

    @property
    def uses_fp8(self) -> bool:
        return self.training and self.scales is not None

    def product(self, x: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return x weight^T + bias + residual, (..., C), for x (..., D): see kernels.linear.linear."""
        if self.uses_fp8:
            return fp8.linear(x, self.weight, bias, residual, self.scales.scaled())
        return linear(x, self.weight, bias, residual)


def gelu_mlp(
    x: Tensor, layer: Linear, out_layer: Linear, out_bias: Tensor, residual: Tensor | None, keep_output: bool
) -> Tensor:
    """Return the result of two layers with GELU between them, (..., E), for x (..., D): see kernels.gelu.gelu_mlp."""
    tensors = x, layer.weight, layer.bias, out_layer.weight, out_bias, residual
    if layer.uses_fp8:
        return fp8.gelu_mlp(*tensors, layer.scales.scaled(), out_layer.scales.scaled())
    return gelu.gelu_mlp(*tensors, keep_output)
