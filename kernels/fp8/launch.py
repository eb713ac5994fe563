"""FP8 on a GPU: Triton kernels round the operands, and cuBLAS multiplies."""

import torch
from torch import Tensor

from kernels.fp8.triton_kernels import gelu, gelu_gradient, quantise

__all__ = ["gelu", "gelu_gradient", "product", "quantise"]


def product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, residual: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute definition.product. cuBLAS needs matrices whose sides are multiples of 16."""
    bias = None if bias is None else bias.to(dtype)
    out = torch._scaled_mm(a, b.T, scale_a, scale_b, bias, out_dtype=dtype, use_fast_accum=False)
    return out if residual is None else out.add_(residual)
