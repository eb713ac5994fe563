"""The end of a residual branch with LayerNorm, by torch's operators: what the kernels compute, and what a CPU runs."""

import torch
from torch import Tensor


def total(x: Tensor, *terms: Tensor | None) -> Tensor:
    """x and the terms that there are, added in that order in fp32 or more, and rounded once, to x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return sum((term for term in terms if term is not None), x.to(wide)).to(x.dtype)


def forward(
    x: Tensor, branch: Tensor | None, branch_bias: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x + branch + branch_bias, empty without a branch; LayerNorm of that or of x; and its rows' mean and rstd.

    x and branch (N, C) in one dtype, and so are the first two results; branch_bias, which a branch may lack, weight and
    bias (C,) in any. Mean and rstd, which is 1 / sqrt(variance + eps), are (N, 1) in fp32, or in fp64 for such x.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    stream = x.new_empty(0) if branch is None else total(branch, branch_bias, x)
    rows = (x if branch is None else stream).to(wide)
    out, mean, rstd = torch.native_layer_norm(rows, x.shape[1:], weight.to(wide), bias.to(wide), eps)
    return stream, out.to(x.dtype), mean, rstd


def backward(
    dout: Tensor, dstream: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, has_branch_bias: bool
) -> tuple[Tensor, Tensor]:
    """dx (N, C) in x's dtype, and the gradients by weight, bias and, where there is one, branch_bias, (2 or 3, C).

    These are in fp32 or more. The last is dx summed over its rows before it is rounded.

    dout is the gradient of (x - mean) rstd weight + bias and dstream that of x itself, which goes on beside it, both
    (N, C). x (N, C), weight (C,), mean and rstd, which is 1 / sqrt(variance + eps), (N, 1) in fp32 or more.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    dout, affine = dout.to(wide), [weight.to(wide)] * 2  # of the bias it wants to know that there is one
    options = x.shape[1:], mean, rstd, *affine, [True] * 3
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(dout, x.to(wide), *options)
    dx += dstream.to(wide)
    return dx.to(x.dtype), torch.stack([dweight, dbias] + [dx.sum(0)] * has_branch_bias)
