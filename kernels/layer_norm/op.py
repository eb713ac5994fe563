"""The end of a residual branch and the LayerNorm (Ba et al., 2016) after it, as PyTorch operators.

A kernel adds the branch, with the bias that its last layer has left out, and normalises the sum. In the backward pass
another takes in the gradient of the residual stream, adds LayerNorm's, and sums those of weight and biases over tokens
on the way. The compiler's own kernels read rows of more than 1024 columns twice, and need several for the sums.
"""

import torch
from torch import Tensor, library
from torch.autograd.function import once_differentiable

from kernels.operators import implement, rows_of

_library = library.Library("layer_norm", "DEF")
_library.define(
    "forward(Tensor x, Tensor? branch, Tensor? branch_bias, Tensor weight, Tensor bias, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "backward(Tensor dout, Tensor dstream, Tensor x, Tensor weight, Tensor mean, Tensor rstd, bool has_branch_bias)"
    " -> (Tensor, Tensor)"
)
implement(_library, "layer_norm", ("forward", "backward"), gpu_module="triton_kernels")


@library.register_fake("layer_norm::forward")
def _(x, branch, branch_bias, weight, bias, eps):
    stream = x.new_empty(0) if branch is None else torch.empty_like(x)
    mean = x.new_empty((x.shape[0], 1), dtype=torch.promote_types(x.dtype, torch.float32))
    return stream, torch.empty_like(x), mean, torch.empty_like(mean)


@library.register_fake("layer_norm::backward")
def _(dout, dstream, x, weight, mean, rstd, has_branch_bias):
    return torch.empty_like(x), mean.new_empty((3 if has_branch_bias else 2, x.shape[1]))


class _Normalise(torch.autograd.Function):
    """The rows of x and branch are laid end to end in here and not before, so that autograd sees that they get one
    tensor as their gradient: from two views of it, leaves would take it for their own and add to it twice."""

    @staticmethod
    def forward(ctx, x, branch, branch_bias, weight, bias, eps):
        rows, branch_rows = rows_of(x), None if branch is None else rows_of(branch)
        stream, out, mean, rstd = torch.ops.layer_norm.forward(rows, branch_rows, branch_bias, weight, bias, eps)
        ctx.save_for_backward(rows if branch is None else stream, weight, mean, rstd)
        ctx.has_branch, ctx.bias_dtype = branch is not None, bias.dtype
        ctx.branch_bias_dtype = None if branch_bias is None else branch_bias.dtype
        # FSDP2 warns of views where a module returns them. Of these nobody holds the base, but for a stream that is x.
        unflatten = torch.ops.aten._unsafe_view
        return x.view_as(x) if branch is None else unflatten(stream, x.shape), unflatten(out, x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dstream, dout):
        saved, has_branch_bias = ctx.saved_tensors, ctx.branch_bias_dtype is not None
        dx, sums = torch.ops.layer_norm.backward(rows_of(dout), rows_of(dstream), *saved, has_branch_bias)
        dx = dx.view(dout.shape)
        dweight, dbias = sums[:2].unbind()
        dbranch_bias = sums[2].to(ctx.branch_bias_dtype) if has_branch_bias else None
        dbranch = dx if ctx.has_branch else None
        return dx, dbranch, dbranch_bias, dweight.to(saved[1].dtype), dbias.to(ctx.bias_dtype), None


def normalise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    branch: Tensor | None = None,
    branch_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x + branch + branch_bias, and the layer_norm of that sum, both (..., C) in x's dtype.

    The first is to be used in x's place from then on: its gradient and LayerNorm's are added in one kernel. Without a
    branch it is x. x and branch (..., C), weight, bias and branch_bias (C,), in floating dtypes; computed in fp32, or
    fp64 for such x, autocast or not. What is normalised is the sum as it is rounded, which it is once. The gradients of
    x and branch are one tensor, and branch_bias's is summed in fp32 before that is rounded.

    Raises:
        ValueError: branch has not x's shape, or branch_bias not (C,), or there is a branch_bias and no branch.
    """
    if branch is not None and branch.shape != x.shape:
        raise ValueError(f"a branch of shape {tuple(branch.shape)} cannot end on x of shape {tuple(x.shape)}")
    if branch is None and branch_bias is not None:
        raise ValueError("a branch_bias is added with a branch, and there is none")
    if branch_bias is not None and branch_bias.shape != x.shape[-1:]:
        raise ValueError(f"a branch_bias of shape {tuple(branch_bias.shape)} is none of {x.shape[-1]} columns")
    branch = None if branch is None else branch.to(x.dtype)
    branch_bias = None if branch_bias is None else branch_bias.contiguous()
    with torch.autocast(x.device.type, enabled=False):
        return _Normalise.apply(x, branch, branch_bias, weight.contiguous(), bias.contiguous(), eps)
