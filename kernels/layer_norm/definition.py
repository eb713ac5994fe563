"""LayerNorm of a residual stream by torch's operators: what the kernels compute, and what a CPU runs."""

import torch
from torch import Tensor


def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm of x (N, C), in its dtype, by weight and bias (C,) in any; and its rows' mean and rstd.

    These, 1 / sqrt(variance + eps) the second, are (N, 1) in fp32, or in fp64 for such x.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    out, mean, rstd = torch.native_layer_norm(x.to(wide), x.shape[1:], weight.to(wide), bias.to(wide), eps)
    return out.to(x.dtype), mean, rstd


def backward(
    dout: Tensor, dstream: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, with_sum: bool
) -> tuple[Tensor, Tensor]:
    """dx (N, C) in x's dtype, and the gradients by weight and bias, (2, C) in fp32 or more.

    With with_sum a third row is dx summed over its rows before it is rounded.

    dout is the gradient of (x - mean) rstd weight + bias and dstream that of x itself, which goes on beside it, both
    (N, C). x (N, C), weight (C,), mean and rstd, which is 1 / sqrt(variance + eps), (N, 1) in fp32 or more.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    dout, affine = dout.to(wide), [weight.to(wide)] * 2  # of the bias it wants to know that there is one
    options = x.shape[1:], mean, rstd, *affine, [True] * 3
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(dout, x.to(wide), *options)
    dx += dstream.to(wide)
    return dx.to(x.dtype), torch.stack([dweight, dbias] + [dx.sum(0)] * with_sum)
