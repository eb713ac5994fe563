"""Two linear layers with tanh-GELU between them, on PyTorch operators: GPU kernels, the PyTorch definition on CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.operators import implement

_library = torch.library.Library("gelu", "DEF")
_library.define("forward(Tensor x, Tensor weight, Tensor bias) -> (Tensor, Tensor)")
_library.define("backward(Tensor dout, Tensor weight, Tensor pre, Tensor bias, bool again) -> (Tensor, Tensor, Tensor)")


implement(_library, "gelu", ("forward", "backward"))


@torch.library.register_fake("gelu::forward")
def _(x, weight, bias):
    pre = x.new_empty((x.shape[0], weight.shape[0]))
    return pre, torch.empty_like(pre)


@torch.library.register_fake("gelu::backward")
def _(dout, weight, pre, bias, again):
    return torch.empty_like(pre), torch.empty_like(bias), torch.empty_like(pre) if again else pre.new_empty(0)


class _GeluMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, out_weight, out_bias, keep):
        pre, activated = torch.ops.gelu.forward(x, weight, bias)
        ctx.save_for_backward(x, weight, bias, out_weight, pre, activated if keep else None)
        return F.linear(activated, out_weight, out_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        x, weight, bias, out_weight, pre, activated = ctx.saved_tensors
        dout = dout.contiguous()
        dpre, dbias, again = torch.ops.gelu.backward(dout, out_weight, pre, bias, activated is None)
        activated = again if activated is None else activated
        return dpre @ weight, dpre.T @ x, dbias, dout.T @ activated, dout.sum(0), None


def gelu_mlp(
    x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor, keep: bool = True
) -> Tensor:
    """gelu(x weight^T + bias) out_weight^T + out_bias in x's dtype, with tanh-GELU.

    x (..., D), weight (C, D), bias (C,), out_weight (E, C) and out_bias (E,), in floating dtypes. GELU's bias is added
    in fp32, and its gradient summed in fp32. Where it is not to `keep` what GELU gives, half of what is kept for the
    backward pass, that makes it again.
    """
    weight, out_weight, out_bias = (parameter.to(x.dtype) for parameter in (weight, out_weight, out_bias))
    out = _GeluMLP.apply(x.contiguous().flatten(0, -2), weight, bias, out_weight, out_bias, keep)
    return out.view(*x.shape[:-1], -1)
