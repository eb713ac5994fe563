"""Softmax cross-entropy with its gradient in Triton: logits are read from HBM once and replaced by the gradient.

A program owns one row and walks it twice: for the logsumexp, by online softmax (Milakov and Gimelshein, 2018),
and once, out of the L2 cache, for the gradient. N logits at a time are held as [N / 8, 8], whose rows are the 16 bytes
that a thread reads at once: what is summed over a row needs no other thread.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rounding import to

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOWEST: tl.constexpr = tl.constexpr(-1e30)  # below any logit; from -inf the first step would be inf - inf
LONGEST_BLOCK, WARPS = 8192, 32  # a row to a multiprocessor: with more at once their second reading misses the L2 cache


@triton.jit
def _load(p_row, o_x, vocab_size, padded, MASKED: tl.constexpr):
    """Logits in fp32; where MASKED, -inf in the padding. They are read up to `padded`, which keeps 16 bytes whole."""
    if MASKED:
        b_x = tl.load(p_row + o_x, mask=o_x < padded, other=0.0).to(tl.float32)
        return tl.where(o_x < vocab_size, b_x, float("-inf"))
    else:
        return tl.load(p_row + o_x).to(tl.float32)


@triton.jit
def _accumulate(m, l, b_x):
    """The maximum of each row of the block, and the sum of exponentials relative to it, with b_x taken in."""
    m_new = tl.maximum(m, tl.max(b_x, 1))
    b_p = tl.exp2((b_x - m_new[:, None]) * LOG2_E)
    return m_new, l * tl.exp2((m - m_new) * LOG2_E) + tl.sum(b_p, 1)


@triton.jit
def _gradient(b_x, highest, log_sum, o_x, start, target, N: tl.constexpr):
    """softmax - one_hot(target) of a block, given the row's maximum and the sum relative to it, as log2.

    Zero where that sum is given as infinite.
    """
    b_g = tl.exp2((b_x - highest) * LOG2_E - log_sum)
    if (target >= start) & (target < start + N):
        b_g -= tl.where(o_x == target, 1.0, 0.0)
    return b_g


@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, s_row, vocab_size, padded, N: tl.constexpr, GRADIENT: tl.constexpr, UPCAST: tl.constexpr
):
    """One row of logits (rows, padded), stride s_row. N columns at a time; see definition.cross_entropy_."""
    row = tl.program_id(0).to(tl.int64)
    p_row = logits + row * s_row
    target = tl.load(targets + row).to(tl.int32)
    counts = target >= 0
    target_logit = tl.load(p_row + target, mask=counts, other=0.0).to(tl.float32)
    o_n = tl.arange(0, N // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    whole = vocab_size // N * N  # the blocks before have no padding, and one or more after are left

    m, l = tl.full([N // 8], LOWEST, tl.float32), tl.zeros([N // 8], tl.float32)
    for start in range(0, whole, N):
        m, l = _accumulate(m, l, _load(p_row, start + o_n, vocab_size, padded, False))
    if whole < vocab_size:
        m, l = _accumulate(m, l, _load(p_row, whole + o_n, vocab_size, padded, True))
    highest = tl.max(m, 0)
    log_sum = tl.log2(tl.sum(l * tl.exp2((m - highest) * LOG2_E), 0))
    tl.store(losses + row, tl.where(counts, highest - target_logit + log_sum * LN_2, 0.0))

    if GRADIENT:
        log_sum = tl.where(counts, log_sum, float("inf"))
        for start in range(0, whole, N):
            b_x = _load(p_row, start + o_n, vocab_size, padded, False)
            b_g = _gradient(b_x, highest, log_sum, start + o_n, start, target, N)
            tl.store(p_row + start + o_n, to(b_g, logits.dtype.element_ty, UPCAST))
        for start in range(whole, padded, N):
            b_x = _load(p_row, start + o_n, vocab_size, padded, True)
            b_g = _gradient(b_x, highest, log_sum, start + o_n, start, target, N)
            tl.store(p_row + start + o_n, to(b_g, logits.dtype.element_ty, UPCAST), mask=start + o_n < padded)


def cross_entropy_(logits: Tensor, targets: Tensor, vocab_size: int, gradient: bool) -> Tensor:
    """Same contract as definition.cross_entropy_, for logits whose rows are dense."""
    losses = torch.empty(len(logits), device=logits.device)
    block = min(triton.next_power_of_2(logits.shape[1]), LONGEST_BLOCK)
    warps = max(block * WARPS // LONGEST_BLOCK, 1)
    arguments = logits, targets, losses, logits.stride(0), vocab_size, logits.shape[1]
    interpreted = logits.device.type == "cpu"
    cross_entropy_kernel[(len(logits),)](*arguments, block, gradient, interpreted, num_warps=warps)
    return losses
