"""LayerNorm's gradient by torch's own operator: what the kernel computes, and what a CPU runs."""

import torch
from torch import Tensor


def backward(
    dout: Tensor, dstream: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx (N, C) in x's dtype, and the gradients by weight and bias, (C,) in fp32 or more.

    dout is the gradient of (x - mean) rstd weight + bias and dstream that of x itself, which goes on beside it, both
    (N, C). x (N, C), weight (C,), mean and rstd, which is 1 / sqrt(variance + eps), (N, 1) in fp32 or more.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    dout, affine = dout.to(wide), [weight.to(wide)] * 2  # of the bias it wants to know that there is one
    options = x.shape[1:], mean, rstd, *affine, [True] * 3
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(dout, x.to(wide), *options)
    return (dstream.to(wide) + dx).to(x.dtype), dweight, dbias
