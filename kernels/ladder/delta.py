"""delta = rowsum(dO o O) of FlashAttention-2's Algorithm 2, for all backward steps of the ladder."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64  # of a program


@triton.jit
def _delta_kernel(dout, out, delta, T, H, ROWS: tl.constexpr, D: tl.constexpr):
    bh, o_m = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = ((bh // H).to(tl.int64) * T + o_m) * H + bh % H
    at = rows[:, None] * D + tl.arange(0, D)[None, :]
    product = tl.load(dout + at).to(tl.float32) * tl.load(out + at).to(tl.float32)  # [ROWS, D]
    tl.store(delta + bh.to(tl.int64) * T + o_m, tl.sum(product, 1))


def delta_of(dout: Tensor, out: Tensor) -> Tensor:
    """Return rowsum(dout * out), (B, H, T) fp32, for contiguous (B, T, H, D) inputs; T is a multiple of 64."""
    batch, length, heads, head_dim = out.shape
    delta = torch.empty((batch, heads, length), dtype=torch.float32, device=out.device)
    _delta_kernel[(length // ROWS, batch * heads)](dout, out, delta, length, heads, ROWS, head_dim)
    return delta
