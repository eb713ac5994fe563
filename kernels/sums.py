"""The end of a sum over tokens: each program of a kernel leaves a row, and these are added up here, in a fixed order.

There are hundreds of rows of some thousand columns, for which torch's own reduction takes several times as long.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launcher import launch

TILE, WARPS = (128, 32), 4  # rows and columns of a program at a time


@triton.jit
def sum_rows_kernel(parts, out, rows, columns, s_out, M: tl.constexpr, N: tl.constexpr):
    """Of parts (batch, rows, columns), contiguous, the sums over the rows of N columns into out, rows s_out apart."""
    across = tl.cdiv(columns, N)
    batch = tl.program_id(0) // across
    o_m, o_n = tl.arange(0, M), tl.program_id(0) % across * N + tl.arange(0, N)
    p_part = parts + (batch.to(tl.int64) * rows + o_m)[:, None] * columns + o_n[None, :]
    acc = tl.zeros([M, N], tl.float32)
    for start in range(0, rows, M):
        mask = (start + o_m < rows)[:, None] & (o_n < columns)[None, :]
        acc += tl.load(p_part, mask=mask, other=0.0)
        p_part += M * columns
    tl.store(out + batch.to(tl.int64) * s_out + o_n, tl.sum(acc, 0), mask=o_n < columns)


def sum_rows(parts: Tensor, out: Tensor | None = None) -> Tensor:
    """parts (batch, rows, columns), fp32 and contiguous, summed over the rows: (batch, columns), or into `out`."""
    batch, rows, columns = parts.shape
    out = torch.empty((batch, columns), device=parts.device) if out is None else out
    (m, n), scalars = TILE, (rows, columns, out.stride(0))
    with torch.cuda.device_of(parts):
        programs = batch * triton.cdiv(columns, n)
        launch(sum_rows_kernel, (parts.device,), programs, (parts, out), scalars, (m, n), num_warps=WARPS)
    return out
