"""Scale, mask, softmax and dropout in one Triton kernel, and their gradient in another.

Each program owns M whole rows of the scores, N columns wide, and loads only the keys that its queries see. The softmax
is computed in fp32 for every dtype, and in base 2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.dropout import threshold
from kernels.common.head_rows import LOG2_E, keys_of
from kernels.common.launching import arch_of, most_warps
from kernels.common.rounding import to

SCORES = 4096  # of a program, unless one row is longer


@triton.jit
def _position(rows, seq_q, M: tl.constexpr):
    """Return the numbers of the program's rows [M] in 64 bits, their bh = batch * heads + head, and their queries."""
    row = tl.cast(tl.program_id(0), tl.int64) * M + tl.arange(0, M)
    row = tl.minimum(row, rows - 1)  # the last program may repeat the last row, with the same result
    bh = row // seq_q
    return row, bh, (row % seq_q).to(tl.int32)


@triton.jit
def _kept(numbers, bh, o_i, o_j, seq_q, seq_k, threshold):
    """Return which probabilities dropout keeps, [M, N]; see kernels/common/dropout.py."""
    p_numbers = numbers + bh * (seq_q + seq_k)
    of_queries = tl.load(p_numbers + o_i).to(tl.uint32, bitcast=True)
    of_keys = tl.load(p_numbers[:, None] + seq_q + o_j[None, :], mask=o_j[None, :] < seq_k, other=0)
    product = of_queries[:, None] * of_keys.to(tl.uint32, bitcast=True)
    return product >= threshold.to(tl.uint32, bitcast=True)


@triton.jit
def softmax_kernel(
    scores, probabilities, kept, numbers, documents,
    rows, heads, seq_q, seq_k, scale, threshold, keep_scale,
    M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, DROPOUT: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute probabilities = softmax(scores scale), and kept = dropout(probabilities); all (B, heads, seq_q, seq_k).

    Grid: cdiv(B * heads * seq_q, M).
    """
    row, bh, o_i = _position(rows, seq_q, M)
    o_j = tl.arange(0, N)
    first, end = keys_of(o_i, documents, bh // heads, seq_k - seq_q, seq_q, seq_k, 0, CAUSAL, False, DOCUMENTS)
    visible = (o_j[None, :] >= first[:, None]) & (o_j[None, :] < end[:, None])
    at = row[:, None] * seq_k + o_j[None, :]  # [M, N]
    # P = softmax(S scale) [M, N]
    b_s = tl.load(scores + at, mask=visible, other=float("-inf")).to(tl.float32) * (scale * LOG2_E)
    m = tl.max(b_s, 1)  # [M]
    b_p = tl.math.exp2(b_s - tl.where(m == float("-inf"), 0.0, m)[:, None])
    l = tl.sum(b_p, 1)
    b_p = b_p / tl.where(l == 0.0, 1.0, l)[:, None]
    inside = o_j[None, :] < seq_k
    tl.store(probabilities + at, to(b_p, probabilities.dtype.element_ty, UPCAST), mask=inside)
    if DROPOUT:
        b_p = tl.where(_kept(numbers, bh, o_i, o_j, seq_q, seq_k, threshold), b_p * keep_scale, 0.0)
        tl.store(kept + at, to(b_p, kept.dtype.element_ty, UPCAST), mask=inside)


@triton.jit
def softmax_gradient_kernel(
    dkept, probabilities, dscores, numbers, documents,
    rows, heads, seq_q, seq_k, scale, threshold, keep_scale,
    M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, DROPOUT: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute dscores = scale P o (dP - rowsum(P o dP)), dP = dropout(dkept). Grid: as softmax_kernel."""
    row, bh, o_i = _position(rows, seq_q, M)
    o_j = tl.arange(0, N)
    first, end = keys_of(o_i, documents, bh // heads, seq_k - seq_q, seq_q, seq_k, 0, CAUSAL, False, DOCUMENTS)
    visible = (o_j[None, :] >= first[:, None]) & (o_j[None, :] < end[:, None])
    at = row[:, None] * seq_k + o_j[None, :]  # [M, N]
    b_p = tl.load(probabilities + at, mask=visible, other=0.0).to(tl.float32)
    b_dp = tl.load(dkept + at, mask=visible, other=0.0).to(tl.float32)
    if DROPOUT:
        b_dp = tl.where(_kept(numbers, bh, o_i, o_j, seq_q, seq_k, threshold), b_dp * keep_scale, 0.0)
    b_ds = scale * b_p * (b_dp - tl.sum(b_p * b_dp, 1)[:, None])
    tl.store(dscores + at, to(b_ds, dscores.dtype.element_ty, UPCAST), mask=o_j[None, :] < seq_k)


def tile(seq_k: int, arch: str) -> tuple[int, int, int]:
    """Return rows and columns of a program, and its warps."""
    columns = max(triton.next_power_of_2(seq_k), 16)
    return max(SCORES // columns, 1), columns, min(max(4, columns // 512), most_warps(arch))


def _launch(kernel, tensors: tuple, shape: torch.Size, numbers, documents, causal, scale, dropout_p) -> None:
    """Launch a kernel for scores of shape (B, H, T, S)."""
    batch, heads, seq_q, seq_k = shape
    rows, (m, n, warps) = batch * heads * seq_q, tile(seq_k, arch_of(tensors[0].device))
    sizes = rows, heads, seq_q, seq_k, scale, threshold(dropout_p), 1 / (1 - dropout_p)
    constants = m, n, causal, documents is not None, dropout_p > 0, not tensors[0].is_cuda
    with torch.cuda.device_of(tensors[0]):
        kernel[(triton.cdiv(rows, m),)](*tensors, numbers, documents, *sizes, *constants, num_warps=warps)


def forward(scores: Tensor, *options) -> tuple[Tensor, Tensor]:
    """Compute definition.forward, for contiguous scores."""
    probabilities, dropout_p = torch.empty_like(scores), options[-1]
    kept = torch.empty_like(scores) if dropout_p else scores.new_empty(0)
    _launch(softmax_kernel, (scores, probabilities, kept), scores.shape, *options)
    return probabilities, kept


def backward(dkept: Tensor, probabilities: Tensor, *options) -> Tensor:
    """Compute definition.backward."""
    dscores = torch.empty_like(probabilities)
    _launch(softmax_gradient_kernel, (dkept, probabilities, dscores), dkept.shape, *options)
    return dscores
