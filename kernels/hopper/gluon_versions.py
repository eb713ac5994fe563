"""Gluon's functions whose names differ between Triton 3.6 and 3.9, under one name each."""

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma


@builtin
def _reduce_add(tensor_desc, coord, src, _semantic=None):
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    add = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(add, tensor_desc.handle, coord, src.handle)


barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # from 3.7 on; waits for a partition
# Start to copy a tile from global to shared memory with cp.async.
cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
# Start to copy, or to add, a tile in shared memory to global memory. `tma_load` copies in the other direction.
if hasattr(tma, "async_load"):  # from 3.8 on
    tma_load, tma_store, tma_add = tma.async_load, tma.async_store, tma.async_atomic_add
else:
    tma_load, tma_store, tma_add = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global, _reduce_add
