"""Registration of an operator's two implementations, and helpers of the autograd functions around operators.

The implementations are kernels on CUDA and ROCm, and the PyTorch definition on CPU.
"""

from collections.abc import Callable
from functools import cache, partial, wraps
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor
from torch.library import Library


def rows_of(x: Tensor) -> Tensor:
    """Return x (..., C) as contiguous rows (N, C)."""
    return x.contiguous().view(-1, x.shape[-1])


@cache
def implementation(package: str, device_type: str, gpu_module: str = "launch") -> ModuleType:
    """Return kernels.PACKAGE.definition for "cpu", or the module that launches the package's kernels for a GPU."""
    # Triton is only installed on machines with a GPU, so the module is imported at its first use.
    return import_module(f"kernels.{package}.{'definition' if device_type == 'cpu' else gpu_module}")


def define(package: str, gpu_module: str = "launch", **schemas: str) -> Library:
    """Define the package's operators by their schemas. Functions of these names in its two modules implement them."""
    library = Library(package, "DEF")

    def call(name: str, device: str, *args):
        return getattr(implementation(package, device, gpu_module), name)(*args)

    for name, schema in schemas.items():
        library.define(name + schema)
        library.impl(name, partial(call, name, "cuda"), "CUDA")
        # A definition chooses its own dtypes, so autocast is off.
        library.impl(name, torch.autocast("cpu", enabled=False)(partial(call, name, "cpu")), "CPU")
    return library


def no_second_derivative(name: str, remedy: str) -> Callable:
    """Decorate the backward of an autograd.Function: raise a RuntimeError if the gradients' own graph is asked for.

    torch's once_differentiable raises only if the incoming gradient requires grad. Otherwise the results count as
    constants, although they depend on the saved tensors: a Hessian is zero without a warning.
    """

    def decorate(backward: Callable) -> Callable:
        @wraps(backward)
        def checked(ctx, *grads):
            if torch.is_grad_enabled():  # autograd enables it for create_graph=True only
                raise RuntimeError(f"create_graph=True: {name} has no second derivative; use {remedy}")
            return backward(ctx, *grads)

        return checked

    return decorate
