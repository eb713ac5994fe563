"""Types and constants of the Hopper kernels in Gluon, to compile them ahead of time.

Each function returns the signature, the constants and the compiler's options of one kernel.
"""

from collections.abc import Iterable

import torch
from triton.runtime.jit import mangle_type

from kernels.cross_entropy import hopper as hopper_loss
from kernels.flash2.hopper_backward import host as hopper_backward
from kernels.flash2.hopper_forward import host as hopper_forward
from kernels.flash2.options import Options
from kernels.flash2.tiles import HopperConfig, HopperForwardConfig
from kernels.gelu import hopper as hopper_gelu
from kernels.hopper.product import REGISTERS, M, N, operands
from kernels.linear import hopper as hopper_linear

Signature = tuple[dict, dict, dict]


def signature_of(kernel, arguments: Iterable) -> tuple[dict, dict]:
    """Return the types of a kernel's parameters by name and its constants by position.

    The arguments are tensors, TMA descriptors, numbers, and None, which is a constant.
    """
    signature, constants = {}, {}
    for i, (parameter, argument) in enumerate(zip(kernel.params, arguments, strict=True)):
        if parameter.is_constexpr or argument is None:
            signature[parameter.name], constants[(i,)] = "constexpr", argument
        elif isinstance(argument, (int, float)):
            signature[parameter.name] = "fp32" if isinstance(argument, float) else "i32"
        else:
            signature[parameter.name] = mangle_type(argument)
    return signature, constants


def attention(head_dim: int, dtype: torch.dtype, mask: str, config: HopperConfig, ordered: bool = False) -> Signature:
    """Describe flash2's kernel of the pass that the config belongs to. `mask` is a name in the table of tiles.

    If `ordered`, a backward pass adds to dQ in a fixed order.
    """
    x = torch.empty((1, config.keys, 1, head_dim), dtype=dtype)
    documents = torch.empty((1, 2, config.keys), dtype=torch.int32) if mask == "documents" else None
    options = Options(documents=documents, causal=mask != "full", window=config.keys if mask == "window" else 0)
    if mask == "dropout":
        options = options._replace(numbers=torch.empty(1, dtype=torch.int32), dropout_p=0.1)
    if isinstance(config, HopperForwardConfig):
        kernel, launched = hopper_forward.forward_kernel, {"num_warps": 4}
        counter = None if documents is None else torch.empty(1, dtype=torch.int32)
        arguments = hopper_forward.arguments_of(x, x, x, x, torch.empty(1), counter, options, 1, config)
    else:
        kernel, launched = hopper_backward.main_kernel, config.compiler_options
        accumulator = torch.empty(config.queries * head_dim) if config.fused else None
        turns = torch.empty(1, dtype=torch.int32) if ordered else None
        stats = hopper_backward.statistics_for(1, x, options, config)
        arguments = hopper_backward.arguments_of(accumulator, turns, stats, x, x, x, x, x, x, options, 1, config)
    return *signature_of(kernel, sum(arguments, ())), launched


def _product(kernel, arguments: tuple) -> Signature:
    return *signature_of(kernel, sum(arguments, ())), {"num_warps": 4}


def gelu(gradient: bool, keep_output: bool) -> Signature:
    x, floats = torch.empty((M.value, N.value), dtype=torch.bfloat16), torch.empty(1)
    others = (x, None if keep_output else x, floats) if gradient else (x, None, None)
    arguments = hopper_gelu.arguments_of(x, x, floats, x, *others, gradient, keep_output)
    return _product(hopper_gelu.linear_gelu_kernel, arguments)


def linear(with_residual: bool) -> Signature:
    x = torch.empty((M.value, N.value), dtype=torch.bfloat16)
    arguments = hopper_linear.arguments_of(x, x, torch.empty(1), x if with_residual else None, x)
    return _product(hopper_linear.linear_sum_kernel, arguments)


def exponentials() -> Signature:
    x, floats = torch.empty((M.value, N.value), dtype=torch.bfloat16), torch.empty(1)
    arguments = (*operands(x, x, transposed=True), floats, x, floats), (1, 1, 1, 1), (REGISTERS,)
    return _product(hopper_loss.linear_exponentials_kernel, arguments)
