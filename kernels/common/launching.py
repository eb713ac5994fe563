"""Launching a Triton or Gluon kernel at little cost to the host, and what every launch has to know of its tensors."""

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

compiled_kernels: dict[tuple, Any] = {}


def launch(kernel, key: tuple, programs: int, tensors: tuple, scalars: tuple, constants: tuple, **options) -> None:
    """kernel[programs](*tensors, *scalars, *constants), compiled with `options`: warps, stages and the like.

    Triton inspects every argument at every call to choose among its compilations of the kernel, which takes longer than
    launching it. So the choice is kept for arguments of the same `key`, scalars and alignment, on which it depends.
    """
    aligned = tuple([x.data_ptr() % 16 == 0 for x in tensors if isinstance(x, Tensor)])
    key = (kernel, key, scalars, constants, aligned, *options.values())
    compiled = compiled_kernels.get(key)
    if compiled is not None:
        compiled[programs, 1, 1](*tensors, *scalars, *constants)
        return
    compiled = kernel[(programs,)](*tensors, *scalars, *constants, **options)
    if compiled is not None:  # the interpreter compiles nothing
        compiled_kernels[key] = compiled


def descriptor(x: Tensor, block_shape: list[int], layout=None) -> TensorDescriptor:
    """x as TMA reads or writes it, a block at a time; a `layout` of shared memory makes it Gluon's.

    Made without its checks, which take microseconds and find what uses_tma has found.
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
    """Batch, row and head strides of (batch, length, heads, head_dim) tensors."""
    return tuple([stride for x in tensors for stride in x.stride()[:3]])


@cache
def arch_of(device: torch.device) -> str:
    """ "sm_90", "gfx942", ...; "cpu" under the interpreter."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def uses_tma(*inputs: Tensor) -> bool:
    """Whether the kernels read (batch, length, heads, head_dim) inputs through TMA, Hopper's copy engine.

    On sm_90, for 16-bit inputs whose address and strides it takes: multiples of 16 bytes, none of them zero. By pointer
    otherwise: on architectures where it has not been measured, and for views cut at odd places.
    """
    return are_aligned(*inputs) and fits_tma(inputs[0].device, inputs[0].dtype, strides(*inputs))


def are_aligned(*inputs: Tensor) -> bool:
    return all([x.data_ptr() % 16 == 0 for x in inputs])


@cache
def fits_tma(device: torch.device, dtype: torch.dtype, strides: tuple[int, ...]) -> bool:
    """The part of uses_tma that does not depend on addresses; `strides` leave out the last, which is one."""
    multiples = all(stride > 0 and stride % 8 == 0 for stride in strides)
    return arch_of(device) == "sm_90" and dtype.itemsize == 2 and multiples


@cache
def triton_version() -> tuple[int, int]:
    """Major and minor."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)
