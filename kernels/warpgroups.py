"""What Hopper's warp-specialised Gluon kernels share: rings of barriers, how many programs run, what is compiled."""

from collections.abc import Iterable
from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.runtime.jit import mangle_type

barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # Triton 3.6's name, then 3.7's; of one partition's warps


@gluon.jit
def ring(SLOTS: gl.constexpr, READERS: gl.constexpr):
    """Barriers of a ring of slots: full, and emptied by READERS partitions."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=READERS)
    return full, empty


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def signature_of(kernel, arguments: Iterable) -> tuple[dict, dict]:
    """Types of a kernel's parameters by name, and its constants by place, to compile it ahead of time.

    For such arguments: tensors, their descriptors, numbers, and None, which is a constant.
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
