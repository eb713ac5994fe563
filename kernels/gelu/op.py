"""Two linear layers with tanh-GELU between them, as PyTorch operators.

N tokens, D inputs, C hidden columns (GELU's), E outputs.
"""

import torch
from torch import Tensor, library

from kernels.common.dtypes import accumulator
from kernels.common.registering import define, no_second_derivative
from kernels.linear.op import apply_to_rows, bias_gradient

_library = define(
    "gelu",
    forward="(Tensor x, Tensor weight, Tensor bias, bool keep_output) -> (Tensor, Tensor)",
    backward="(Tensor dout, Tensor weight, Tensor bias, Tensor saved, bool keep_output) -> (Tensor, Tensor, Tensor)",
)


@library.register_fake("gelu::forward")
def _(x, weight, bias, keep_output):
    out = x.new_empty((x.shape[0], weight.shape[0]))
    return torch.empty_like(out), out


@library.register_fake("gelu::backward")
def _(dout, weight, bias, saved, keep_output):
    sums = saved.new_empty(saved.shape[1], dtype=accumulator(saved.dtype))
    return torch.empty_like(saved), sums, saved.new_empty(0) if keep_output else torch.empty_like(saved)


class _GeluMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, out_weight, out_bias, residual, keep_output):
        matrix, out_matrix = weight.to(x.dtype), out_weight.to(x.dtype)
        saved, activated = torch.ops.gelu.forward(x, matrix, bias, keep_output)
        ctx.save_for_backward(x, matrix, bias, out_matrix, saved, activated if keep_output else None)
        ctx.dtypes = weight.dtype, out_weight.dtype, out_bias.dtype
        return torch.ops.linear.forward(activated, out_matrix, out_bias, residual)

    @staticmethod
    @no_second_derivative("gelu_mlp", "torch.nn.functional.linear and gelu")
    def backward(ctx, dout):
        x, matrix, bias, out_matrix, saved, activated = ctx.saved_tensors
        dresidual = dout if ctx.needs_input_grad[5] else None
        dout, keep_output = dout.contiguous(), activated is not None
        dtype, out_dtype, out_bias_dtype = ctx.dtypes
        with torch.autocast(dout.device.type, enabled=False):
            dpre, sums, recomputed = torch.ops.gelu.backward(dout, out_matrix, bias, saved, keep_output)
            activated = activated if keep_output else recomputed
            dweight = torch.ops.linear.weight_gradient(dpre, x, dtype)
            dout_weight = torch.ops.linear.weight_gradient(dout, activated, out_dtype)
            dx, dbias = dpre @ matrix, sums.to(bias.dtype)
            dout_bias = bias_gradient(dout, out_bias_dtype) if ctx.needs_input_grad[4] else None
            return dx, dweight, dbias, dout_weight, dout_bias, dresidual, None


def check_mlp_shapes(
    name: str, x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor, residual: Tensor | None
) -> None:
    """Raise a ValueError if the shapes of the two layers called `name` do not fit each other."""
    inner, shape = bias.shape, (*x.shape[:-1], *out_bias.shape)
    fits = (weight.shape, out_weight.shape) == ((*inner, *x.shape[-1:]), (*out_bias.shape, *inner))
    if not fits or (residual is not None and residual.shape != shape):
        given = (x, weight, bias, out_weight, out_bias, residual)
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in given if tensor is not None)
        raise ValueError(
            f"the shapes {shapes} do not fit; give {name} x (..., D), weight (C, D), bias (C,), out_weight (E, C), "
            "out_bias (E,) and residual (..., E)"
        )


def gelu_mlp(
    x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor, residual: Tensor | None = None,
    keep_output: bool = True,
) -> Tensor:  # fmt: skip
    """Return gelu(x weight^T + bias) out_weight^T + out_bias + residual, (..., E) in x's dtype, for tanh-GELU.

    The shapes are x (..., D), weight (C, D), bias (C,), out_weight (E, C), out_bias (E,) and residual (..., E). All
    floating dtypes are allowed.
    Autocast has no effect. kernels.linear explains the gradients of the weights and of out_bias. The gradient of `bias`
    is summed in fp32.

    With keep_output the forward pass saves GELU's output and its slope, (N, C) each. Without it, the forward pass saves
    x weight^T, and the backward pass recomputes both. That takes half the memory.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    check_mlp_shapes("gelu_mlp", x, weight, bias, out_weight, out_bias, residual)
    parameters = weight, bias, out_weight, out_bias.contiguous()
    return apply_to_rows(_GeluMLP, x, parameters, residual, keep_output and torch.is_grad_enabled())
