"""Two linear layers with tanh-GELU between them, on PyTorch operators: GPU kernels, the PyTorch definition on CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.operators import implement

_library = torch.library.Library("gelu", "DEF")
_library.define("forward(Tensor x, Tensor weight, Tensor bias, bool keep) -> (Tensor, Tensor)")
_library.define("backward(Tensor dout, Tensor weight, Tensor kept, bool keep) -> (Tensor, Tensor, Tensor)")


implement(_library, "gelu", ("forward", "backward"))


@torch.library.register_fake("gelu::forward")
def _(x, weight, bias, keep):
    out = x.new_empty((x.shape[0], weight.shape[0]))
    return torch.empty_like(out), out


@torch.library.register_fake("gelu::backward")
def _(dout, weight, kept, keep):
    sums = kept.new_empty(kept.shape[1], dtype=torch.promote_types(kept.dtype, torch.float32))
    return torch.empty_like(kept), sums, kept.new_empty(0) if keep else torch.empty_like(kept)


class _GeluMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, out_weight, out_bias, keep):
        kept, activated = torch.ops.gelu.forward(x, weight, bias, keep)
        ctx.save_for_backward(x, weight, bias, out_weight, kept, activated if keep else None)
        return F.linear(activated, out_weight, out_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        x, weight, bias, out_weight, kept, activated = ctx.saved_tensors
        dout, keep = dout.contiguous(), activated is not None
        dpre, sums, again = torch.ops.gelu.backward(dout, out_weight, kept, keep)
        activated = activated if keep else again
        return dpre @ weight, dpre.T @ x, sums.to(bias.dtype), dout.T @ activated, dout.sum(0), None


def gelu_mlp(
    x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor, keep: bool = True
) -> Tensor:
    """gelu(x weight^T + bias) out_weight^T + out_bias in x's dtype, autocast or not, with tanh-GELU.

    x (..., D), weight (C, D), bias (C,), out_weight (E, C) and out_bias (E,), in floating dtypes. The gradient of
    GELU's bias is summed in fp32. Where it is not to `keep` what GELU gives, half of what is kept for the backward
    pass, that makes it again; and GELU's slope with it, which is rounded to x's dtype where it is kept.
    """
    weight, out_weight, out_bias = (parameter.to(x.dtype) for parameter in (weight, out_weight, out_bias))
    rows, keep = x.contiguous().flatten(0, -2), keep and torch.is_grad_enabled()
    with torch.autocast(x.device.type, enabled=False):
        out = _GeluMLP.apply(rows, weight, bias, out_weight, out_bias, keep)
    return out.view(*x.shape[:-1], -1)
