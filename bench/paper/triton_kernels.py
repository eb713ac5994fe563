"""Small Triton kernels of the tables `softmax` and `hierarchy`."""

import triton
import triton.language as tl


@triton.jit
def safe_softmax_kernel(x, y, length, BLOCK: tl.constexpr):
    """Compute y = softmax(x) of one row of `length` fp32 numbers in three passes: maximum, sum, quotients.

    Grid: the number of rows.
    """
    row = tl.program_id(0).to(tl.int64) * length
    offsets = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, length, BLOCK):
        b_x = tl.load(x + row + start + offsets, mask=start + offsets < length, other=float("-inf"))
        largest = tl.maximum(largest, b_x)
    m = tl.max(largest, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, length, BLOCK):
        b_x = tl.load(x + row + start + offsets, mask=start + offsets < length, other=float("-inf"))
        total += tl.exp(b_x - m)
    l = tl.sum(total, 0)
    for start in range(0, length, BLOCK):
        inside = start + offsets < length
        b_x = tl.load(x + row + start + offsets, mask=inside)
        tl.store(y + row + start + offsets, tl.exp(b_x - m) / l, mask=inside)


@triton.jit
def online_softmax_kernel(x, y, length, BLOCK: tl.constexpr):
    """Compute y = softmax(x) of one row of `length` fp32 numbers in two passes: running maximum and sum, quotients.

    Each of BLOCK columns has its own maximum m and sum l. If m grows to m', l is first rescaled by exp(m - m') (Milakov
    and Gimelshein, 2018).
    Grid: the number of rows.
    """
    row = tl.program_id(0).to(tl.int64) * length
    offsets = tl.arange(0, BLOCK)
    m = tl.full([BLOCK], -3.0e38, tl.float32)  # finite, because -inf - -inf is NaN
    l = tl.zeros([BLOCK], tl.float32)
    for start in range(0, length, BLOCK):
        b_x = tl.load(x + row + start + offsets, mask=start + offsets < length, other=float("-inf"))
        larger = tl.maximum(m, b_x)
        l = l * tl.exp(m - larger) + tl.exp(b_x - larger)
        m = larger
    of_row = tl.max(m, 0)
    sum_of_row = tl.sum(l * tl.exp(m - of_row), 0)
    for start in range(0, length, BLOCK):
        inside = start + offsets < length
        b_x = tl.load(x + row + start + offsets, mask=inside)
        tl.store(y + row + start + offsets, tl.exp(b_x - of_row) / sum_of_row, mask=inside)


@triton.jit
def read_kernel(x, sums, blocks, reads, BLOCK: tl.constexpr):
    """Read blocks of int32 numbers and add them up element by element: sums (programs, BLOCK).

    All programs together read `reads` blocks in turn, so x is read reads / blocks times. Each program reads other
    blocks each time and skips the first-level cache, so only the second-level cache can hold x. Grid: any number.
    """
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for read in range(tl.program_id(0), reads, tl.num_programs(0)):
        at = (read % blocks).to(tl.int64) * BLOCK
        total += tl.load(x + at + offsets, cache_modifier=".cg")
    tl.store(sums + tl.program_id(0) * BLOCK + offsets, total)


@triton.jit
def copy_kernel(x, y, blocks, copies, BLOCK: tl.constexpr):
    """Copy the blocks of x to y, `copies` blocks in turn. Grid: any number."""
    offsets = tl.arange(0, BLOCK)
    for copied in range(tl.program_id(0), copies, tl.num_programs(0)):
        at = (copied % blocks).to(tl.int64) * BLOCK
        tl.store(y + at + offsets, tl.load(x + at + offsets, cache_modifier=".cg"))


@triton.jit
def shared_kernel(x, sums, rounds, TILE: tl.constexpr, READS: tl.constexpr):
    """Write a tile of int32 numbers to shared memory and read READS numbers of the tile, `rounds` times.

    A gather across the threads goes through shared memory. The tile changes in each round, so the compiler can neither
    hoist the reads out of the loop nor keep them in registers. A row of 32 numbers has one number for each bank; thread
    t of a warp reads number t of rows 0, 1, 2, ..., so no bank has a conflict. sums (programs, READS) adds up what was
    read. Grid: any number.
    """
    tile = tl.load(x + tl.program_id(0) * TILE + tl.arange(0, TILE))
    offsets = tl.arange(0, READS)
    index = offsets % 32 + offsets // (READS // (TILE // 32)) * 32
    total = tl.zeros([READS], tl.int32)
    for i in range(rounds):
        total += tl.gather(tile + i, index, 0)
    tl.store(sums + tl.program_id(0) * READS + offsets, total)
