"""What a linear layer launches on a GPU: Hopper's product that adds in its epilogue, or cuBLAS's."""

from torch import Tensor

from kernels.hopper import selection as products
from kernels.linear import definition


def forward(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None) -> Tensor:
    """Same contract as definition.forward; but Hopper's product is rounded once more, before its bias is added."""
    others = (weight, bias) if residual is None else (weight, bias, residual)
    if products.fuses_whole_tiles(len(x), len(weight), x, *others):
        from kernels.linear import hopper  # Gluon, which is for no other GPU

        return hopper.forward(x, weight, bias, residual)
    return definition.forward(x, weight, bias, residual)
