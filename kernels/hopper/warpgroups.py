"""Functions that the warp-specialised Gluon kernels for Hopper share: layouts, barriers, a mask and host helpers."""

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.common.launching import descriptor
from kernels.hopper.gluon_versions import barrier

_GLUON_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.constexpr_function
def accumulator_layout(columns, down=4, across=1):
    """Return the layout of a product with so many columns: `down` warps share its rows, `across` warps its columns.

    [3, 0] is wgmma. Its shape is 16 rows of a warp, the columns, and a depth of 16 elements of 16 bits.
    """
    return gl.NVMMADistributedLayout([3, 0], [down, across], [16, columns // across, 16])


@gluon.jit
def allocate_slots(x, SLOTS: gl.constexpr):
    """Allocate SLOTS blocks of a TMA descriptor x in shared memory. (Gluon supports no starred lists.)"""
    return gl.allocate_shared_memory(x.dtype, [SLOTS] + x.block_type.shape, x.layout)  # noqa: RUF005


@gluon.jit
def ring(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return the barriers of a ring of slots: `full`, and `empty`, which waits for ARRIVALS arrivals.

    Tile number n of the ring is in slot n % SLOTS, in round n // SLOTS. Its readers wait for `full` with the parity of
    the round. Its writer waits for `empty` with the other parity: until all readers of the round before have arrived.
    In the first round no writer has to wait, because a new barrier counts as one whose phase with parity 1 has ended.
    """
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=ARRIVALS)
    return full, empty


@gluon.jit
def release(empty, EACH: gl.constexpr, pred=True):
    """Arrive at the barrier `empty`: once for a whole partition, or EACH thread by itself.

    One arrival for all needs a wait for all warps before it, and in Triton 3.6 and 3.7 another one after it. EACH uses
    the instruction that arrives when the thread's asynchronous copies are done; the thread has none, so it arrives at
    once. Threads must fence their stores to shared memory first if the waiting side reads them.
    """
    if EACH:
        if pred:
            async_copy.mbarrier_arrive(empty, increment_count=False)
    else:
        barrier()
        mbarrier.arrive(empty, pred=pred)


@gluon.jit
def await_turn(counter, turn):
    """Wait until a counter in global memory is `turn`. The additions by TMA of earlier turns are then in memory."""
    load: gl.constexpr = "ld.acquire.gpu.global.s32 $0, [$1];"  # gl.load has no acquire
    address = counter.to(gl.int64)
    while gl.inline_asm_elementwise(load, "=r,l", [address], gl.int32, False, 1) != turn:
        pass


@gluon.jit
def end_turn(counter):
    """Wait until the additions of this warp by TMA are in memory, not only read. Then add 1 to the counter."""
    wait: gl.constexpr = "cp.async.bulk.wait_group 0; mov.u32 $0, 0;"  # an output is required
    gl.inline_asm_elementwise(wait, "=r", [], gl.int32, False, 1)
    barrier()  # one thread issued the additions, and another one may increment
    gl.atomic_add(counter, 1, sem="release")


@gluon.jit
def hide(x, bound, AFTER: gl.constexpr):
    """Return x [ROWS, COLUMNS], a product's result, with -inf after (AFTER) or before each row's column `bound`.

    The column `bound` [ROWS] itself stays as it is. Column 8 a + 2 b + c of a row belongs to thread b of the row's four
    threads. So each thread compares constants with bound - 2 b, which keeps no register per column alive.
    """
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    parts = x.reshape([ROWS, COLUMNS // 8, 4, 2])  # [row, a, b, c]
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
    """Return the number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Return the layout of a block in shared memory: swizzled in 16 bits, as wgmma reads it, and plain in fp32."""
    if dtype == torch.float32:
        return gl.NVMMASharedLayout(0, 32, len(block))
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON_TYPES[dtype])


def blocks_of(x: Tensor, *block: int) -> TensorDescriptor:
    """Describe x for TMA, which copies one block of this shape at a time."""
    return descriptor(x, list(block), _layout(block, x.dtype))
