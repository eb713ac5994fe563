"""The choice for a linear layer on a GPU: Hopper's product with the sum in its epilogue, or cuBLAS."""

from torch import Tensor

from kernels.hopper import selection
from kernels.linear import definition


def forward(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None) -> Tensor:
    """Compute definition.forward, except that Hopper's product is also rounded before its bias is added."""
    others = (weight, bias) if residual is None else (weight, bias, residual)
    if selection.fuses_whole_tiles(len(x), len(weight), x, *others):
        from kernels.linear import hopper  # Gluon code for Hopper; other GPUs must not import it

        return hopper.forward(x, weight, bias, residual)
    return definition.forward(x, weight, bias, residual)
