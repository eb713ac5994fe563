"""Building blocks of the warp-specialised Gluon kernels for Hopper.

Gluon is Triton's lower level: the kernel itself chooses layouts, shared memory, barriers and the jobs of warps.

- **Layouts.** A tensor is in registers, and its layout says which thread holds which element. An NVMMADistributedLayout
  is the result of a wgmma, and a DotOperandLayout is its first operand. A SliceLayout(axis, parent) is the parent
  without that axis. convert_layout moves elements between threads; with assert_trivial=True it must not move any.
- **Shared memory.** allocate_shared_memory returns a view. index, slice, permute and reshape return other views and
  copy nothing. load and store copy to and from registers.
- **mbarrier.** A barrier in shared memory that goes through phases with parity 0, 1, 0, ... A phase ends after all
  arrivals that `init` counts, and after all bytes that `expect` announces; `expect` is an arrival too. wait(barrier, p)
  returns once the last ended phase has parity p. A new barrier counts as one whose phase with parity 1 has ended.
- **TMA.** One instruction copies a block of a tensor to shared memory and reports its bytes to an mbarrier. It writes
  zeros for elements outside the tensor, and their bytes count. A store or an addition leaves out such elements.
- **wgmma.** warpgroup_mma(a, b, acc, is_async=True) starts a product of one or more warpgroups (four warps each). b is
  in shared memory, and a is there or in registers. warpgroup_mma_wait(n, deps) returns `deps` once at most the last n
  products still run. warpgroup_mma_init turns a tensor into an accumulator.
- **fence_async_shared.** wgmma and TMA read a thread's stores to shared memory only after this fence.
- **warp_specialize.** Runs each function in warps of its own. The first one gets the warps of the launch (num_warps).
  The two lists have the warps and the registers per thread of the others.
"""
