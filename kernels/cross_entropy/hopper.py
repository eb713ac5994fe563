"""Cross-entropy on Hopper without a pass over the logits: the product's epilogue writes their exponentials.

A token's loss and its gradient by the logits x depend only on the differences to the logit of its target t.

    e_v = exp(x_v - x_t),    l = sum_v e_v,    loss = log l,    dloss/dx_v = (e_v - l [v = t]) / l.

x_t is a dot product of two vectors and is computed first. The product over the whole vocabulary starts its accumulators
at -x_t. Its epilogue (kernels/hopper/product.py) writes e and the sums of e over the columns of each tile. The rest is
one number per row: l adds up the tiles' sums, 1 - l replaces e_t, and 1 / l scales the narrow hidden states or their
gradient instead of e. Online softmax divides by the exponential of the maximum, which takes another pass.

l is at least 1, so no relevant number underflows. e needs the range of fp32, so its 16-bit dtype is bf16. x - x_t is
rounded to 16 bits and may be small for a large x, so the losses are closer to fp64's than losses from rounded logits.
Rounding 1 - l to 16 bits loses precision, and the lost part is added back to the gradient of the hidden states.

M rows and N columns of a tile, K depth of a step.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.cross_entropy import definition, triton_kernels
from kernels.cross_entropy.triton_kernels import LOG2_E
from kernels.hopper.gluon_versions import barrier
from kernels.hopper.product import (
    CHUNK,
    CHUNK_LAYOUT,
    CHUNKS,
    REGISTERS,
    N,
    chunk_places,
    count_tiles,
    launch_product,
    multiplier,
    operands,
    shared_memory,
    tile_at,
)

HIGHEST: gl.constexpr = gl.constexpr(definition.HIGHEST)


@gluon.jit
def _write_exponentials(results, out, sums, rows, columns, vocab_size):
    """Write out = exp(C), zero in the padding, CHUNK rows of a tile at a time, and its sums over the tile's columns."""
    c_slots, c_full, c_empty = results
    o_m, o_n, offsets = chunk_places(columns)
    for n in range(count_tiles(rows, columns)):
        i, j = tile_at(n, rows, columns)
        first, left = i.to(gl.int64) * columns + j, rows - i
        p_sums = sums + j // N * rows + i
        inside, in_vocabulary = (j + o_n < columns)[None, :], (j + o_n < vocab_size)[None, :]
        for half in gl.static_range(2):
            mbarrier.wait(c_full.index(half), n & 1)
            c_next = c_slots.index(half).slice(0, CHUNK).load(CHUNK_LAYOUT)
            for chunk in gl.static_range(CHUNKS):
                c = c_next  # [CHUNK, N]
                if chunk < CHUNKS - 1:
                    c_next = c_slots.index(half).slice((chunk + 1) * CHUNK, CHUNK).load(CHUNK_LAYOUT)
                barrier()  # The assembler moves no load past it, so the load of c_next overlaps the arithmetic.
                if chunk == CHUNKS - 1:
                    mbarrier.arrive(c_empty.index(half))
                # e = exp(C) in the epilogue
                x = c.to(gl.float32)
                x = gl.where(x > HIGHEST, HIGHEST, x)  # unlike gl.minimum, this keeps NaN
                e = gl.where(in_vocabulary, gl.exp2(x * LOG2_E), 0.0)
                gl.store(out + first + offsets, e.to(c.dtype), mask=(o_m < left)[:, None] & inside)
                gl.store(p_sums + o_m, gl.sum(e, 1), mask=o_m < left)
                first += CHUNK * columns
                p_sums += CHUNK
                left -= CHUNK


@gluon.jit(do_not_specialize=["rows", "vocab_size"])
def linear_exponentials_kernel(a, b, start, out, sums, rows, columns, depth, vocab_size, REGISTERS: gl.constexpr):
    """Compute out = exp(A B + start), zero in columns from vocab_size on, and its sums over the columns of each tile.

    a reads [M, K] of A, b [N, K] of B^T; start (rows,) fp32; out (rows, columns), contiguous, columns a multiple of 8;
    sums (cdiv(columns, N), rows) fp32. Grid: at most one program per tile.
    """
    rings, results = shared_memory(a, b)
    shape = (rows, columns, depth)
    gl.warp_specialize(
        [
            (multiplier, (0, a, b, start, rings, results, shape, True)),
            (multiplier, (1, a, b, start, rings, results, shape, True)),
            (_write_exponentials, (results, out, sums, rows, columns, vocab_size)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


def losses(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, out: Tensor) -> tuple[Tensor, Tensor]:
    """Compute definition.relative_losses, for bf16 operands that selection.fuses accepts."""
    start = triton_kernels.target_logits(hidden, weight, targets).neg_()
    sums = torch.empty((-(-len(weight) // N.value), len(hidden)), dtype=torch.float32, device=hidden.device)
    tensors = *operands(hidden, weight, transposed=True), start, out, sums
    scalars = *out.shape, hidden.shape[1], vocab_size
    launch_product(linear_exponentials_kernel, (), hidden, tensors, scalars, (REGISTERS,))
    return triton_kernels.relative_losses_(out, sums, targets)
