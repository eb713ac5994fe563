"""What Hopper's warp-specialised Gluon kernels share: rings of barriers, and how many programs run at a time."""

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

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
