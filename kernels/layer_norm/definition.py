"""LayerNorm's gradient in plain PyTorch: what the kernel computes, and what a CPU runs."""

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
    dout, normalised, weight = dout.to(wide), (x.to(wide) - mean) * rstd, weight.to(wide)
    slope = dout * weight
    dx = slope - slope.mean(1, keepdim=True) - normalised * (slope * normalised).mean(1, keepdim=True)
    return (dstream.to(wide) + rstd * dx).to(x.dtype), (dout * normalised).sum(0), dout.sum(0)
