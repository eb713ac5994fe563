"""Registration of an operator's two implementations: kernels on CUDA and ROCm, the PyTorch definition on CPU."""

from functools import cache, partial
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor


def rows_of(x: Tensor) -> Tensor:
    """Return x (..., C) as contiguous rows (N, C)."""
    return x.contiguous().view(-1, x.shape[-1])


@cache
def implementation(package: str, device_type: str, gpu_module: str = "launch") -> ModuleType:
    """Return kernels.PACKAGE.definition for "cpu", or the module that launches the package's kernels for a GPU."""
    # Triton is only installed on machines with a GPU, so the module is imported at its first use.
    return import_module(f"kernels.{package}.{'definition' if device_type == 'cpu' else gpu_module}")


def implement(library: torch.library.Library, package: str, names: tuple[str, ...], gpu_module: str = "launch") -> None:
    """Register the functions of these names in the package's two modules as the operators of `library`."""

    def call(name: str, device: str, *args):
        return getattr(implementation(package, device, gpu_module), name)(*args)

    for name in names:
        library.impl(name, partial(call, name, "cuda"), "CUDA")
        # A definition chooses its own dtypes, so autocast is off.
        library.impl(name, torch.autocast("cpu", enabled=False)(partial(call, name, "cpu")), "CPU")
