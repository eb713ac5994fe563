"""Rounding to FP8 and products of FP8 matrices in plain PyTorch: the definition of the kernels, and the CPU's path.

A tensor x is stored as scale * x8. Several tensors can share their statistics (3,) fp32: the largest |x|, the sum over
the tensors of the share that underflows (numbers other than zero that become zero), and the number of tensors.

N tokens, D inputs, C outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
"""Activations and weights have more digits (E4M3), and gradients a wider range (E5M2)."""


def _round(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


def _observe(x: Tensor, out: Tensor, statistics: Tensor) -> None:
    sizes = x.float().abs()
    underflow = ((out.float() == 0) & (sizes != 0)).float().mean()
    largest = torch.maximum(statistics[0], sizes.amax())
    statistics.copy_(torch.stack((largest, statistics[1] + underflow, statistics[2] + 1)))


def quantise(x: Tensor, scale: Tensor, statistics: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x / scale rounded to `dtype`, (N, D), and its transpose (D, N), both contiguous.

    x (N, D) has 16 bits, or is fp32 and is rounded to bf16 first. scale is an fp32 scalar, a power of two. Numbers
    beyond the range of `dtype` become its largest number. The statistics of x are added to `statistics`.
    """
    x = x.bfloat16() if x.dtype == torch.float32 else x
    out = _round(x, scale, dtype)
    _observe(x, out, statistics)
    return out, out.T.contiguous()


def gelu(pre: Tensor, bias: Tensor, scale: Tensor, statistics: Tensor) -> Tensor:
    """Return gelu(pre + bias), rounded to pre's dtype and then to E4M3, (N, C), for tanh-GELU.

    pre (N, C), bias (C,). The scale and statistics are of the result, as in `quantise`.
    """
    hidden = F.gelu(pre.float() + bias.float(), approximate="tanh").to(pre.dtype)
    out = _round(hidden, scale, E4M3)
    _observe(hidden, out, statistics)
    return out


def gelu_gradient(
    dout: Tensor, pre: Tensor, bias: Tensor, scale: Tensor, statistics: Tensor, out_scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dpre, its transpose, the transpose of gelu's result, and the sum of dpre over its rows, (C,) fp32.

    dout (N, C) is the gradient of gelu(pre + bias), dpre (N, C) the gradient of pre in E5M2. The scale and statistics
    are of dpre, and out_scale is the scale of gelu's result, which is in E4M3 as in `gelu`.
    """
    wide = pre.float() + bias.float()
    dpre = torch.ops.aten.gelu_backward(dout.float(), wide, approximate="tanh")
    rounded = dpre.to(pre.dtype)
    dpre8 = _round(rounded, scale, E5M2)
    _observe(rounded, dpre8, statistics)
    out = _round(F.gelu(wide, approximate="tanh").to(pre.dtype), out_scale, E4M3)
    return dpre8, dpre8.T.contiguous(), out.T.contiguous(), dpre.sum(0)


def product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, residual: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return scale_a scale_b a b^T + bias + residual, (N, C) in `dtype`, with fp32 sums.

    a (N, D) and b (C, D) are in FP8. bias (C,) and residual (N, C) may be None.
    """
    out = (a.float() @ b.float().T) * (scale_a * scale_b)
    out = (out if bias is None else out + bias.float()).to(dtype)
    return out if residual is None else out + residual
