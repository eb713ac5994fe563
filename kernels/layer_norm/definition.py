"""LayerNorm of a residual stream by torch's operators: the kernels' definition, and the CPU's path.

N tokens, C columns; rstd is 1 / sqrt(variance + eps).
"""

import torch
from torch import Tensor

from kernels.common.dtypes import accumulator


def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return LayerNorm of x (N, C) in x's dtype, and mean and rstd, (N, 1) in fp32 or more.

    weight and bias (C,) may have other dtypes than x.
    """
    wide = accumulator(x.dtype)
    out, mean, rstd = torch.native_layer_norm(x.to(wide), x.shape[1:], weight.to(wide), bias.to(wide), eps)
    return out.to(x.dtype), mean, rstd


def backward(
    dout: Tensor, dstream: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, with_sum: bool
) -> tuple[Tensor, Tensor]:
    """Return dx (N, C) in x's dtype, and the gradients by weight and bias, (2, C) in fp32 or more.

    With with_sum there is a third row: the sum of dx over its rows, before dx is rounded.

    dout (N, C) is the gradient of (x - mean) rstd weight + bias, and dstream (N, C) the gradient of x from its other
    uses. `forward` returned mean and rstd.
    """
    wide = accumulator(x.dtype)
    dout, affine = dout.to(wide), [weight.to(wide)] * 2  # the operator only checks that there is a bias
    options = x.shape[1:], mean, rstd, *affine, [True] * 3
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(dout, x.to(wide), *options)
    dx += dstream.to(wide)
    return dx.to(x.dtype), torch.stack([dweight, dbias] + [dx.sum(0)] * with_sum)
