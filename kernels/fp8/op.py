"""Linear layers with products in FP8 as PyTorch operators, forward and backward.

The inputs, the weights and the gradients of a layer each have one scale (per-tensor scaling). A kernel that rounds a
tensor uses the scale of the steps before (delayed scaling), so it reads the tensor once. The scales change between
steps only: see trainer/scales.py.

Activations and weights are in E4M3, and gradients in E5M2 (Micikevicius et al., FP8 formats for deep learning, 2022).
Sums are in fp32, and so are the gradients of the weights. N tokens, D inputs, C outputs.
"""

from typing import NamedTuple

import torch
from torch import Tensor, library

from kernels.common.registering import define, no_second_derivative
from kernels.fp8.definition import E4M3, E5M2
from kernels.gelu.op import check_mlp_shapes
from kernels.linear.op import apply_to_rows, bias_gradient, check_linear_shapes

DTYPES = torch.bfloat16, torch.float16
_SCALED = "Tensor scale, Tensor(a!) statistics"
_library = define(
    "fp8",
    quantise=f"(Tensor x, {_SCALED}, ScalarType dtype) -> (Tensor, Tensor)",
    gelu=f"(Tensor pre, Tensor bias, {_SCALED}) -> Tensor",
    gelu_gradient=f"(Tensor dout, Tensor pre, Tensor bias, {_SCALED}, Tensor out_scale)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    product="(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, Tensor? residual, ScalarType dtype)"
    " -> Tensor",
)


class Scaled(NamedTuple):
    """The scale of a tensor, an fp32 scalar, and the statistics (3,) fp32 that kernels.fp8.definition explains."""

    scale: Tensor
    statistics: Tensor


def _transposed(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[1], x.shape[0]), dtype=dtype)


@library.register_fake("fp8::quantise")
def _(x, scale, statistics, dtype):
    return torch.empty_like(x, dtype=dtype), _transposed(x, dtype)


@library.register_fake("fp8::gelu")
def _(pre, bias, scale, statistics):
    return torch.empty_like(pre, dtype=E4M3)


@library.register_fake("fp8::gelu_gradient")
def _(dout, pre, bias, scale, statistics, out_scale):
    sums = pre.new_empty(pre.shape[1], dtype=torch.float32)
    return torch.empty_like(pre, dtype=E5M2), _transposed(pre, E5M2), _transposed(pre, E4M3), sums


@library.register_fake("fp8::product")
def _(a, b, scale_a, scale_b, bias, residual, dtype):
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


_ops = torch.ops.fp8


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, residual, scaled):
        of_x, of_weight, _ = scaled
        x8, x8_t = _ops.quantise(x, *of_x, E4M3)
        weight8, weight8_t = _ops.quantise(weight, *of_weight, E4M3)
        ctx.save_for_backward(x8_t, weight8_t)
        ctx.scaled, ctx.dtypes = scaled, (weight.dtype, bias.dtype)
        return _ops.product(x8, weight8, of_x.scale, of_weight.scale, bias, residual, x.dtype)

    @staticmethod
    @no_second_derivative("fp8.linear", "precision=bf16")
    def backward(ctx, dout):
        (x8_t, weight8_t), (of_x, of_weight, of_dout) = ctx.saved_tensors, ctx.scaled
        (weight_dtype, bias_dtype), rows = ctx.dtypes, dout.contiguous()
        dout8, dout8_t = _ops.quantise(rows, *of_dout, E5M2)
        dx = _ops.product(dout8, weight8_t, of_dout.scale, of_weight.scale, None, None, dout.dtype)
        dweight = _ops.product(dout8_t, x8_t, of_dout.scale, of_x.scale, None, None, weight_dtype)
        dbias = bias_gradient(rows, bias_dtype) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, dout if ctx.needs_input_grad[3] else None, None


class _GeluMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, out_weight, out_bias, residual, scaled, out_scaled):
        (of_x, of_weight, _), (of_hidden, of_out_weight, _) = scaled, out_scaled
        x8, x8_t = _ops.quantise(x, *of_x, E4M3)
        weight8, weight8_t = _ops.quantise(weight, *of_weight, E4M3)
        pre = _ops.product(x8, weight8, of_x.scale, of_weight.scale, None, None, x.dtype)
        hidden8 = _ops.gelu(pre, bias, *of_hidden)
        out_weight8, out_weight8_t = _ops.quantise(out_weight, *of_out_weight, E4M3)
        ctx.save_for_backward(x8_t, weight8_t, bias, pre, out_weight8_t)
        ctx.scaled, ctx.dtypes = (scaled, out_scaled), (weight.dtype, out_weight.dtype, out_bias.dtype)
        return _ops.product(hidden8, out_weight8, of_hidden.scale, of_out_weight.scale, out_bias, residual, x.dtype)

    @staticmethod
    @no_second_derivative("fp8.gelu_mlp", "precision=bf16")
    def backward(ctx, dout):
        x8_t, weight8_t, bias, pre, out_weight8_t = ctx.saved_tensors
        (of_x, of_weight, of_dpre), (of_hidden, of_out_weight, of_dout) = ctx.scaled
        (dtype, out_dtype, out_bias_dtype), rows = ctx.dtypes, dout.contiguous()
        dout8, dout8_t = _ops.quantise(rows, *of_dout, E5M2)
        dhidden = _ops.product(dout8, out_weight8_t, of_dout.scale, of_out_weight.scale, None, None, dout.dtype)
        dpre8, dpre8_t, hidden8_t, sums = _ops.gelu_gradient(dhidden, pre, bias, *of_dpre, of_hidden.scale)
        dout_weight = _ops.product(dout8_t, hidden8_t, of_dout.scale, of_hidden.scale, None, None, out_dtype)
        dx = _ops.product(dpre8, weight8_t, of_dpre.scale, of_weight.scale, None, None, dout.dtype)
        dweight = _ops.product(dpre8_t, x8_t, of_dpre.scale, of_x.scale, None, None, dtype)
        dout_bias = bias_gradient(rows, out_bias_dtype) if ctx.needs_input_grad[4] else None
        dresidual = dout if ctx.needs_input_grad[5] else None
        return dx, dweight, sums.to(bias.dtype), dout_weight, dout_bias, dresidual, None, None


def _check_layers(name: str, x: Tensor, *weights: Tensor) -> None:
    """Raise a ValueError for a dtype or a side of a product that the kernels or cuBLAS do not take in FP8."""
    if x.dtype not in DTYPES or any(weight.dtype not in (x.dtype, torch.float32) for weight in weights):
        found = ", ".join(str(weight.dtype) for weight in weights)
        raise ValueError(
            f"x is {x.dtype} and the weights are {found}; give {name} x in bfloat16 or float16, and weights in float32 "
            "or x's dtype"
        )
    tokens = x.shape[:-1].numel()
    if any(not side or side % 16 for side in (tokens, *(side for weight in weights for side in weight.shape))):
        shapes = ", ".join(str(tuple(weight.shape)) for weight in weights)
        raise ValueError(
            f"{tokens} tokens and weights {shapes} do not suit {name}; give numbers of tokens, inputs and outputs that "
            "are positive multiples of 16"
        )


def linear(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, scaled: tuple[Scaled, Scaled, Scaled]
) -> Tensor:
    """Return x weight^T + bias + residual as kernels.linear.linear does, with products in FP8.

    x (..., D) has 16 bits, weight (C, D) is fp32 or has x's dtype. The numbers of tokens, inputs and outputs are
    multiples of 16. `scaled` has the scales and statistics of x, of the weight, and of the gradient of the result. The
    forward pass adds to the first two statistics, and the backward pass to the last.

    Raises:
        ValueError: the shapes do not fit each other, a number is not a multiple of 16 or is 0, or another dtype.
    """
    check_linear_shapes("fp8.linear", x, weight, bias, residual)
    _check_layers("fp8.linear", x, weight)
    return apply_to_rows(_Linear, x, (weight.contiguous(), bias.contiguous()), residual, scaled)


def gelu_mlp(
    x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor, residual: Tensor | None,
    scaled: tuple[Scaled, Scaled, Scaled], out_scaled: tuple[Scaled, Scaled, Scaled],
) -> Tensor:  # fmt: skip
    """Return gelu(x weight^T + bias) out_weight^T + out_bias + residual as kernels.gelu.gelu_mlp does, in FP8.

    `scaled` is of the first layer and `out_scaled` of the second, as in `linear`. The backward pass
    computes GELU's result again, in the kernel that computes GELU's gradient.

    Raises:
        ValueError: the shapes do not fit each other, a number is not a multiple of 16 or is 0, or another dtype.
    """
    check_mlp_shapes("fp8.gelu_mlp", x, weight, bias, out_weight, out_bias, residual)
    _check_layers("fp8.gelu_mlp", x, weight, out_weight)
    parameters = tuple([parameter.contiguous() for parameter in (weight, bias, out_weight, out_bias)])
    return apply_to_rows(_GeluMLP, x, parameters, residual, scaled, out_scaled)
