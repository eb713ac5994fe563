"""Launch Triton and Gluon kernels at little host cost, and describe tensors to them."""

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

compiled_kernels: dict[tuple, Any] = {}


def launch_kernel(
    kernel, key: tuple, programs: int, tensors: tuple, scalars: tuple, constants: tuple, **options
) -> None:
    """Launch kernel[programs](*tensors, *scalars, *constants); `options` are num_warps, num_stages and the like.

    Triton inspects every argument of every call to choose a compilation, which takes longer than the launch. So the
    choice is cached by everything that it depends on: scalars, constants, alignment, options, and `key`. `key` must
    tell all else apart: dtypes, the device, and which tensors are None if no constant says so.
    """
    aligned = tuple([x.data_ptr() % 16 == 0 for x in tensors if isinstance(x, Tensor)])
    key = (kernel, key, scalars, constants, aligned, *options.values())
    compiled = compiled_kernels.get(key)
    if compiled is not None:
        compiled[programs, 1, 1](*tensors, *scalars, *constants)
        return
    compiled = kernel[(programs,)](*tensors, *scalars, *constants, **options)
    if compiled is not None:  # None in the interpreter
        compiled_kernels[key] = compiled


def descriptor(x: Tensor, block_shape: list[int], layout=None) -> TensorDescriptor:
    """Describe x for TMA, which copies one block at a time; with a `layout` of shared memory, for a Gluon kernel.

    The descriptor's own checks are skipped: they take microseconds and repeat what uses_tma checked.
    """
    if layout is None:
        made = TensorDescriptor.__new__(TensorDescriptor)
    else:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

        made = GluonDescriptor.__new__(GluonDescriptor)
        made.layout = layout
    made.base, made.shape, made.strides, made.block_shape = x, x.shape, x.stride(), block_shape
    return made


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the batch, row and head strides of (batch, length, heads, head_dim) tensors."""
    return tuple([stride for x in tensors for stride in x.stride()[:3]])


@cache
def arch_of(device: torch.device) -> str:
    """Return "sm_90", "gfx942", ...; "cpu" under the interpreter."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def most_warps(arch: str) -> int:
    """Return how many warps a program may have: 1,024 threads, with 64 in a warp on AMD's CDNA and 32 on NVIDIA."""
    return 16 if arch.startswith("gfx") else 32


def uses_tma(*inputs: Tensor) -> bool:
    """Return whether the kernels read (batch, length, heads, head_dim) inputs through TMA, Hopper's copy engine.

    They do on sm_90 for 16-bit inputs if addresses and strides are multiples of 16 bytes and no stride is zero. TMA was
    not measured on other architectures.
    """
    return are_aligned(*inputs) and fits_tma(arch_of(inputs[0].device), inputs[0].dtype, strides(*inputs))


def are_aligned(*inputs: Tensor) -> bool:
    """Return whether every address is a multiple of 16 bytes."""
    return all([x.data_ptr() % 16 == 0 for x in inputs])


@cache
def fits_tma(arch: str, dtype: torch.dtype, strides: tuple[int, ...]) -> bool:
    """Return the part of uses_tma that does not depend on addresses; `strides` leave out the last one, which is 1."""
    multiples = all(stride > 0 and stride % 8 == 0 for stride in strides)
    return arch == "sm_90" and dtype.itemsize == 2 and multiples


@cache
def triton_version() -> tuple[int, int]:
    """Return Triton's major and minor version."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def runs_gluon(arch: str, dtype: torch.dtype) -> bool:
    """Return whether the warp-specialised kernels can run: on sm_90, by Triton 3.6 or later, in 16 bits."""
    return arch == "sm_90" and triton_version() >= (3, 6) and dtype.itemsize == 2
