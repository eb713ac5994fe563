"""Softmax cross-entropy with its gradient in Triton: logits are read from HBM once and replaced by the gradient.

In cross_entropy_kernel a program owns one row and walks it twice: once for the logsumexp, by online softmax (Milakov
and Gimelshein, 2018), and once for the gradient, from the L2 cache. N logits at a time are held as [N / 8, 8]. A thread
reads 16 bytes at once, which are a row of these, so a sum over a row needs no other thread. The other kernels do the
work before and after Hopper's product (hopper.py).

M rows, N columns, K columns of the hidden states at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.launching import arch_of, most_warps
from kernels.common.rounding import to

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOWEST: tl.constexpr = tl.constexpr(-1e30)  # below any logit; with -inf, padding alone would give -inf - -inf = NaN
LONGEST_BLOCK, WARPS = 8192, 32  # one row per multiprocessor: with more, the second walk misses the L2 cache


@triton.jit
def _load(p_row, o_x, vocab_size, padded, MASKED: tl.constexpr):
    """Load logits [N / 8, 8] in fp32. MASKED sets the padding to -inf; loads up to `padded` keep 16 bytes together."""
    if MASKED:
        b_x = tl.load(p_row + o_x, mask=o_x < padded, other=0.0).to(tl.float32)
        return tl.where(o_x < vocab_size, b_x, float("-inf"))
    else:
        return tl.load(p_row + o_x).to(tl.float32)


@triton.jit
def _accumulate(m, l, b_x):
    """Add b_x [N / 8, 8] to the running maximum m (natural) and the running sum of exponentials l, both [N / 8]."""
    m_new = tl.maximum(m, tl.max(b_x, 1))
    b_p = tl.exp2((b_x - m_new[:, None]) * LOG2_E)
    return m_new, l * tl.exp2((m - m_new) * LOG2_E) + tl.sum(b_p, 1)


@triton.jit
def _gradient(b_x, highest, log_sum, o_x, start, target, N: tl.constexpr):
    """Return softmax - one_hot(target) of a block, from the row's maximum and log2 of its sum of exponentials."""
    b_g = tl.exp2((b_x - highest) * LOG2_E - log_sum)
    if (target >= start) & (target < start + N):
        b_g -= tl.where(o_x == target, 1.0, 0.0)
    return b_g


@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, s_row, vocab_size, padded, N: tl.constexpr, GRADIENT: tl.constexpr, UPCAST: tl.constexpr
):
    """Compute definition.cross_entropy_ for one row of logits (rows, padded) with row stride s_row. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    p_row = logits + row * s_row
    target = tl.load(targets + row).to(tl.int32)
    counts = target >= 0
    target_logit = tl.load(p_row + target, mask=counts, other=0.0).to(tl.float32)
    o_n = tl.arange(0, N // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    whole = vocab_size // N * N  # blocks before this column have no padding

    # Logsumexp by online softmax.
    m, l = tl.full([N // 8], LOWEST, tl.float32), tl.zeros([N // 8], tl.float32)
    for start in range(0, whole, N):
        m, l = _accumulate(m, l, _load(p_row, start + o_n, vocab_size, padded, False))
    if whole < vocab_size:
        m, l = _accumulate(m, l, _load(p_row, whole + o_n, vocab_size, padded, True))
    highest = tl.max(m, 0)
    log_sum = tl.log2(tl.sum(l * tl.exp2((m - highest) * LOG2_E), 0))
    tl.store(losses + row, tl.where(counts, highest - target_logit + log_sum * LN_2, 0.0))

    # Logits = softmax - one_hot.
    if GRADIENT:
        log_sum = tl.where(counts, log_sum, float("inf"))  # zero gradient for an ignored token
        for start in range(0, whole, N):
            b_x = _load(p_row, start + o_n, vocab_size, padded, False)
            b_g = _gradient(b_x, highest, log_sum, start + o_n, start, target, N)
            tl.store(p_row + start + o_n, to(b_g, logits.dtype.element_ty, UPCAST))
        for start in range(whole, padded, N):
            b_x = _load(p_row, start + o_n, vocab_size, padded, True)
            b_g = _gradient(b_x, highest, log_sum, start + o_n, start, target, N)
            tl.store(p_row + start + o_n, to(b_g, logits.dtype.element_ty, UPCAST), mask=start + o_n < padded)


def warps_of(block: int, arch: str) -> int:
    """Return the warps of cross_entropy_kernel for N = block."""
    return min(max(block * WARPS // LONGEST_BLOCK, 1), most_warps(arch))


def cross_entropy_(logits: Tensor, targets: Tensor, vocab_size: int, gradient: bool) -> Tensor:
    """Compute definition.cross_entropy_, for logits with dense rows."""
    losses = torch.empty(len(logits), device=logits.device)
    block = min(max(triton.next_power_of_2(logits.shape[1]), 8), LONGEST_BLOCK)
    warps = warps_of(block, arch_of(logits.device))
    arguments = logits, targets, losses, logits.stride(0), vocab_size, logits.shape[1]
    interpreted = logits.device.type == "cpu"
    cross_entropy_kernel[(len(logits),)](*arguments, block, gradient, interpreted, num_warps=warps)
    return losses


TARGETS_TILE, TARGETS_WARPS = (16, 256), 4  # rows, and columns at a time
SUMS_ROWS, SUMS_WARPS = 16, 4
RESCALE_TILE, RESCALE_WARPS = (16, 256), 4


@triton.jit
def cross_entropy_target_kernel(hidden, weight, targets, out, rows, depth, M: tl.constexpr, K: tl.constexpr):
    """Compute out = rowsum(hidden * weight[max(targets, 0)]) in fp32 for M rows. All are contiguous."""
    o_m = tl.program_id(0) * M + tl.arange(0, M)
    o_k = tl.arange(0, K)
    mask = o_m < rows
    row = tl.maximum(tl.load(targets + o_m, mask=mask, other=0), 0)
    p_hidden = hidden + o_m.to(tl.int64)[:, None] * depth
    p_weight = weight + row.to(tl.int64)[:, None] * depth
    acc = tl.zeros([M, K], tl.float32)
    for k in range(0, depth, K):
        inside = mask[:, None] & (k + o_k < depth)[None, :]
        b_h = tl.load(p_hidden + (k + o_k)[None, :], mask=inside, other=0.0).to(tl.float32)
        acc += b_h * tl.load(p_weight + (k + o_k)[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + o_m, tl.sum(acc, 1), mask=mask)


@triton.jit
def cross_entropy_sums_kernel(
    exponentials, sums, targets, losses, scales, s_row, rows, tiles, M: tl.constexpr, N: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute losses and scales of M rows from sums (tiles, rows), tiles <= N, as relative_losses_ explains."""
    o_m, o_n = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, N)
    mask = o_m < rows
    target = tl.load(targets + o_m, mask=mask, other=-1)
    inside = (o_n < tiles)[:, None] & mask[None, :]  # [N, M]
    l = tl.sum(tl.load(sums + o_n[:, None] * rows + o_m[None, :], mask=inside, other=0.0), 0)
    l = tl.where(l < 1, 1.0, l)  # l contains the target's 1; unlike tl.maximum, this keeps NaN
    counts = target >= 0
    rounded = to(1 - l, exponentials.dtype.element_ty, UPCAST)
    tl.store(losses + o_m, tl.where(counts, tl.log2(l) * LN_2, 0.0), mask=mask)
    tl.store(scales + o_m, tl.where(counts, 1 / l, 0.0), mask=mask)
    tl.store(scales + rows + o_m, tl.where(counts, 1 - l - rounded.to(tl.float32), 0.0), mask=mask)
    p_own = exponentials + o_m.to(tl.int64) * s_row + target
    tl.store(p_own, rounded, mask=mask & counts)


@triton.jit
def cross_entropy_rescale_kernel(
    dhidden, hidden, scaled, weight, targets, scales, rows, depth, M: tl.constexpr, K: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute dhidden = (dhidden + rest * weight[target]) * scale and scaled = hidden * scale for M rows, K columns.

    weight is (padded V, depth), scales (2, rows) holds scale and rest; the others are (rows, depth). All contiguous.
    """
    o_m, o_k = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * K + tl.arange(0, K)
    mask = (o_m < rows)[:, None] & (o_k < depth)[None, :]
    scale = tl.load(scales + o_m, mask=o_m < rows, other=0.0)[:, None]
    rest = tl.load(scales + rows + o_m, mask=o_m < rows, other=0.0)[:, None]
    target = tl.maximum(tl.load(targets + o_m, mask=o_m < rows, other=0), 0)
    offsets = o_m.to(tl.int64)[:, None] * depth + o_k[None, :]
    p_weight = weight + target.to(tl.int64)[:, None] * depth + o_k[None, :]
    b_d = tl.load(dhidden + offsets, mask=mask, other=0.0).to(tl.float32)
    b_d += rest * tl.load(p_weight, mask=mask, other=0.0).to(tl.float32)
    b_h = tl.load(hidden + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(dhidden + offsets, to(b_d * scale, dhidden.dtype.element_ty, UPCAST), mask=mask)
    tl.store(scaled + offsets, to(b_h * scale, scaled.dtype.element_ty, UPCAST), mask=mask)


def target_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the logit of each row's target, (N,) fp32. A negative target counts as token 0. Inputs are contiguous."""
    rows, depth = hidden.shape
    out = torch.empty(rows, device=hidden.device)
    m, k = TARGETS_TILE
    arguments = hidden, weight, targets, out, rows, depth, m, k
    cross_entropy_target_kernel[(triton.cdiv(rows, m),)](*arguments, num_warps=TARGETS_WARPS)
    return out


def relative_losses_(exponentials: Tensor, sums: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses (N,) and the scales (2, N) of definition.relative_losses, from the exponentials.

    exponentials (N, padded V), with dense rows, hold exp(x - x_t) for logits x and the target's logit x_t, and zero in
    the padding. sums (tiles, N) fp32 add up to their row sums. The exponentials become definition.relative_losses' out.
    """
    losses = torch.empty(len(targets), device=sums.device)
    scales = torch.empty((2, len(targets)), device=sums.device)
    arguments = exponentials, sums, targets, losses, scales, exponentials.stride(0), len(targets), len(sums)
    grid, columns = (triton.cdiv(len(targets), SUMS_ROWS),), triton.next_power_of_2(len(sums))
    interpreted = sums.device.type == "cpu"
    cross_entropy_sums_kernel[grid](*arguments, SUMS_ROWS, columns, interpreted, num_warps=SUMS_WARPS)
    return losses, scales


def rescale_(dhidden: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, scales: Tensor) -> Tensor:
    """Compute definition.rescale_, for contiguous tensors."""
    rows, depth = hidden.shape
    scaled = torch.empty_like(hidden)
    m, k = RESCALE_TILE
    arguments = dhidden, hidden, scaled, weight, targets, scales, rows, depth, m, k, hidden.device.type == "cpu"
    grid = triton.cdiv(rows, m), triton.cdiv(depth, k)
    cross_entropy_rescale_kernel[grid](*arguments, num_warps=RESCALE_WARPS)
    return scaled
