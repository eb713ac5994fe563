"""How an operator gets its two implementations, Triton kernels on CUDA and ROCm and the PyTorch definition on CPU, and
the rows that it takes."""

from functools import cache, partial
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor


def rows_of(x: Tensor) -> Tensor:
    """x (..., C) as rows (N, C), contiguous."""
    return x.contiguous().view(-1, x.shape[-1])


@cache
def implementation(package: str, device_type: str, gpu_module: str = "launch") -> ModuleType:
    """The module of a package under kernels/ for a kind of device: definition, or the one that launches kernels."""
    # Triton is needed, and installed, only where there is a GPU: the latter is imported when it is first called.
    return import_module(f"kernels.{package}.{'definition' if device_type == 'cpu' else gpu_module}")


def implement(library: torch.library.Library, package: str, names: tuple[str, ...], gpu_module: str = "launch") -> None:
    """Makes the functions of those names, in either module, the operators of `library`."""

    def call(name: str, device: str, *args):
        return getattr(implementation(package, device, gpu_module), name)(*args)

    for name in names:
        library.impl(name, partial(call, name, "cuda"), "CUDA")
        # A definition says itself in which dtype it computes.
        library.impl(name, torch.autocast("cpu", enabled=False)(partial(call, name, "cpu")), "CPU")
