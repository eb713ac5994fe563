"""Cross-entropy on Hopper without a pass over the logits: their exponentials leave the product that makes them.

A token's loss, and its gradient by the logits x, depend on what they are beyond the logit of its target t alone:

    e_v = exp(x_v - x_t),    l = sum_v e_v,    loss = log l,    dloss/dx_v = (e_v - l [v = t]) / l.

x_t is a product of two vectors, which is soon made. The product over the whole vocabulary starts at -x_t, and its
epilogue (kernels/hopper/product.py) writes e and adds it up over the columns of a tile. What is left is a number a row:
l is the sum of its tiles'; 1 - l takes the place of e_t; and 1 / l scales what is narrow, the hidden states or their
gradient, instead of e. Dividing by the maximum's exponential, as online softmax does, needs the logits once more.

l is at least 1, so nothing that matters underflows. 16 bits hold e where they have fp32's range: in bf16. Of what is
rounded to them, x - x_t is small where x may not be: losses are nearer to fp64's than from rounded logits. Of 1 - l,
which softmax - one_hot has not, the hidden states' gradient is given what rounding takes away.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.cross_entropy import definition, triton_kernels
from kernels.cross_entropy.triton_kernels import LOG2_E
from kernels.hopper.product import (
    CHUNK,
    CHUNKS,
    LAYOUT,
    REGISTERS,
    M,
    N,
    chunk_places,
    count_tiles,
    launch_product,
    multiplier,
    operands,
    shared_memory,
    tile_at,
)
from kernels.hopper.warpgroups import barrier, signature_of

HIGHEST: gl.constexpr = gl.constexpr(definition.HIGHEST)


@gluon.jit
def _exponentials(results, out, sums, rows, columns, vocab_size):
    """Writes exp(C), zero in the padding, and its sums over the columns of a tile, CHUNK rows at a time."""
    c_slots, c_full, c_empty = results
    o_m, o_n, offsets = chunk_places(columns)
    for n in range(count_tiles(rows, columns)):
        i, j = tile_at(n, rows, columns)
        first, left = i.to(gl.int64) * columns + j, rows - i
        p_sums = sums + j // N * rows + i
        there, true = (j + o_n < columns)[None, :], (j + o_n < vocab_size)[None, :]
        for C in gl.static_range(2):
            mbarrier.wait(c_full.index(C), n & 1)
            c_next = c_slots.index(C).slice(0, CHUNK).load(LAYOUT)
            for chunk in gl.static_range(CHUNKS):
                c = c_next
                if chunk < CHUNKS - 1:
                    c_next = c_slots.index(C).slice((chunk + 1) * CHUNK, CHUNK).load(LAYOUT)
                barrier()  # the assembler moves no load past it: this one is to be under way during the arithmetic
                if chunk == CHUNKS - 1:
                    mbarrier.arrive(c_empty.index(C))
                x = c.to(gl.float32)
                x = gl.where(x > HIGHEST, HIGHEST, x)  # unlike a minimum, this keeps NaN
                e = gl.where(true, gl.exp2(x * LOG2_E), 0.0)
                gl.store(out + first + offsets, e.to(c.dtype), mask=(o_m < left)[:, None] & there)
                gl.store(p_sums + o_m, gl.sum(e, 1), mask=o_m < left)
                first += CHUNK * columns
                p_sums += CHUNK
                left -= CHUNK


@gluon.jit(do_not_specialize=["rows", "vocab_size"])
def linear_exponentials_kernel(a, b, start, out, sums, rows, columns, depth, vocab_size, REGISTERS: gl.constexpr):
    """out = exp(A B + start), zero in columns from vocab_size on, and `sums` those over the columns of each tile.

    a reads [M, K] of A, b [N, K] of B^T; start (rows,) fp32; out (rows, columns), contiguous, columns a multiple of 8;
    sums (cdiv(columns, N), rows) fp32. Grid: any number of programs up to that of the tiles.
    """
    rings, results = shared_memory(a, b)
    shape = (rows, columns, depth)
    gl.warp_specialize(
        [
            (multiplier, (0, a, b, start, rings, results, shape, True)),
            (multiplier, (1, a, b, start, rings, results, shape, True)),
            (_exponentials, (results, out, sums, rows, columns, vocab_size)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


def compilation() -> tuple[dict, dict, dict]:
    """Signature, constants and options of linear_exponentials_kernel, to compile it ahead of time."""
    x, floats = torch.empty((M.value, N.value), dtype=torch.bfloat16), torch.empty(1)
    tensors = *operands(x, x, transposed=True), floats, x, floats
    rows, columns, depth, vocab_size = 1, 1, 1, 1
    arguments = *tensors, rows, columns, depth, vocab_size, REGISTERS
    return *signature_of(linear_exponentials_kernel, arguments), {"num_warps": 4}


def losses(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, out: Tensor) -> tuple[Tensor, Tensor]:
    """Same contract as definition.relative_losses, for bf16 operands that products.fuses takes."""
    start = triton_kernels.target_logits(hidden, weight, targets).neg_()
    sums = torch.empty((-(-len(weight) // N.value), len(hidden)), dtype=torch.float32, device=hidden.device)
    tensors = *operands(hidden, weight, transposed=True), start, out, sums
    scalars = *out.shape, hidden.shape[1], vocab_size
    launch_product(linear_exponentials_kernel, (), hidden, tensors, scalars, (REGISTERS,))
    return triton_kernels.relative_losses_(out, sums, targets)
