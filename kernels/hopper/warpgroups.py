"""What Hopper's warp-specialised Gluon kernels share: barriers, a mask, how many programs run, what is compiled."""

from collections.abc import Iterable
from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.runtime.jit import mangle_type

barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # Triton 3.6's name, then 3.7's; of one partition's warps


@gluon.jit
def ring(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers of a ring of slots: full, and emptied by so many ARRIVALS."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=ARRIVALS)
    return full, empty


@gluon.jit
def release(empty, EACH: gl.constexpr, pred=True):
    """Arrives at a barrier that counts arrivals: one thread of a partition for all of them, or EACH for itself.

    For the one all warps have to wait for each other before it arrives, and in Triton 3.6 and 3.7 afterwards too. EACH
    uses the instruction by which a thread arrives once its copies to shared memory are done, of which it has none. What
    the threads have stored there they must have fenced, for whoever waits to read it.
    """
    if EACH:
        if pred:
            async_copy.mbarrier_arrive(empty, increment_count=False)
    else:
        barrier()
        mbarrier.arrive(empty, pred=pred)


@gluon.jit
def hide(x, bound, AFTER: gl.constexpr):
    """x, a product's result [rows, columns], with -inf AFTER each row's column `bound`, or before it.

    Column 8 a + 2 b + c is held by the b-th of the four threads of its row: a thread compares constants with a number
    of its own, 2 b less. With the columns' numbers it would hold a register for each, wherever it hides or not.
    """
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    parts = x.reshape([ROWS, COLUMNS // 8, 4, 2])
    LAYOUT: gl.constexpr = parts.type.layout
    o_a = gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    o_b = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    o_c = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    columns = 8 * o_a[None, :, None, None] + o_c[None, None, None, :]
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    bound = gl.convert_layout(bound, ROW, assert_trivial=True)
    bounds = bound[:, None, None, None] - 2 * o_b[None, None, :, None]
    if AFTER:
        seen = columns <= bounds
    else:
        seen = columns >= bounds
    hidden = gl.where(seen, parts, -float("inf")).reshape([ROWS, COLUMNS])
    return gl.convert_layout(hidden, x.type.layout, assert_trivial=True)


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
