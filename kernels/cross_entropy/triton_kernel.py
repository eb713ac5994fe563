"""Softmax cross-entropy with its gradient in Triton: logits are read from HBM once and replaced by the gradient.

A program owns one row and walks it twice: for the logsumexp, by online softmax (Milakov and Gimelshein, 2018),
and once, out of the L2 cache, for the gradient.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rounding import to

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOWEST: tl.constexpr = tl.constexpr(-1e30)  # below any logit; from -inf the first step would be inf - inf
LONGEST_BLOCK, WARPS = 4096, 16


@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, s_row, vocab_size, padded, N: tl.constexpr, GRADIENT: tl.constexpr, UPCAST: tl.constexpr
):
    """One row of logits (rows, padded), stride s_row. N columns at a time; see definition.cross_entropy_."""
    row = tl.program_id(0).to(tl.int64)
    p_row = logits + row * s_row
    target = tl.load(targets + row)
    target_logit = tl.load(p_row + target).to(tl.float32)
    o_n = tl.arange(0, N)

    # For each of N interleaved parts of the row the maximum in base 2 and the sum relative to it: whichever of the old
    # maximum and the new logit is larger has the factor 1, so that an element costs one exponential and no barrier.
    m, l = tl.full([N], LOWEST, tl.float32), tl.zeros([N], tl.float32)
    for start in range(0, vocab_size, N):
        b_x = tl.load(p_row + start + o_n, mask=start + o_n < vocab_size, other=float("-inf")).to(tl.float32) * LOG2_E
        smaller = tl.exp2(-tl.abs(b_x - m))
        l = tl.where(b_x > m, l * smaller + 1, l + smaller)
        m = tl.maximum(m, b_x)
    highest = tl.max(m, 0)
    logsumexp = highest + tl.log2(tl.sum(l * tl.exp2(m - highest), 0))
    tl.store(losses + row, logsumexp * LN_2 - target_logit)

    if GRADIENT:
        for start in range(0, padded, N):
            o_x = start + o_n
            b_x = tl.load(p_row + o_x, mask=o_x < vocab_size, other=float("-inf")).to(tl.float32)
            b_g = tl.exp2(b_x * LOG2_E - logsumexp) - tl.where(o_x == target, 1.0, 0.0)
            tl.store(p_row + o_x, to(b_g, logits.dtype.element_ty, UPCAST), mask=o_x < padded)


def cross_entropy_(logits: Tensor, targets: Tensor, vocab_size: int, gradient: bool) -> Tensor:
    """Same contract as definition.cross_entropy_, for logits whose rows are dense."""
    losses = torch.empty(len(logits), device=logits.device)
    block = min(triton.next_power_of_2(logits.shape[1]), LONGEST_BLOCK)
    warps = max(block * WARPS // LONGEST_BLOCK, 1)
    arguments = logits, targets, losses, logits.stride(0), vocab_size, logits.shape[1]
    interpreted = logits.device.type == "cpu"
    cross_entropy_kernel[(len(logits),)](*arguments, block, gradient, interpreted, num_warps=warps)
    return losses
