"""Each variant is held to the fp64 reference before it is timed.

`error` is the largest, over out, dq, dk and dv, of |x - exact| / |exact| in the Frobenius norm. The variant runs on the
whole input, all of which must come out finite; compared are some (sequence, head) pairs, evenly spread: 64 where T is
512, 2 where it is 16k or more. `exact` is fp64, computed for 1024 queries at a time so that 64k fits. Where a backward
pass runs out of memory, out alone is compared. Beyond three times the error of torch's math attention in the same dtype
a variant is wrong, and gets no timing; fused_softmax and pytorch, which round scores, probabilities and the gradients
of both to 16 bits, beyond four times.

B batch, T sequence length, H query heads, G key/value heads, D head size.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.attention.contenders import Contender, Data
from bench.attention.shapes import TOKENS, Cell
from kernels.naive.definition import standard_attention, visible
from model.attention import Attention

NAMES = "out", "dq", "dk", "dv"
FACTOR, FACTORS = 3, {"fused_softmax": 4, "pytorch": 4}  # times math attention's error, beyond which a variant is wrong
CHUNK = 1024  # queries of the reference at a time


class WrongResult(Exception):
    """A variant's output or gradient is not attention's."""


class Truth(NamedTuple):
    """out, dq, dk and dv in fp64 for some (sequence, key/value head) pairs, and math attention's relative errors."""

    pairs: tuple[Tensor, Tensor]
    exact: list[Tensor]
    yardstick: list[float]

    def allowed(self, variant: str) -> list[float]:
        """The largest relative errors at which a variant is right; math attention may be exact."""
        rounding = 2 * torch.finfo(torch.float32).eps
        return [max(FACTORS.get(variant, FACTOR) * error, rounding) for error in self.yardstick]


def pick(x: Tensor, kv_heads: int, pairs: tuple[Tensor, Tensor]) -> Tensor:
    """(pairs, T, H / G or 1, D): the chosen pairs of x (B, T, H or G, D)."""
    sequences, groups = pairs
    return x.unflatten(2, (kv_heads, -1))[sequences, :, groups]


def in_chunks(attend: Attention, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, causal: bool) -> list[Tensor]:
    """out, dq, dk and dv in fp64 of `attend`, called for CHUNK queries at a time: T x T would not fit in memory.

    A causal mask aligned at the bottom right stays right if the keys end where the chunk's queries do.
    """
    out, dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (q, q, k, v))
    length = q.shape[1]
    for start in range(0, length, CHUNK):
        rows = slice(start, min(start + CHUNK, length))
        keys = slice(0, rows.stop if causal else length)
        leaves = [x.detach().requires_grad_() for x in (q[:, rows], k[:, keys], v[:, keys])]
        chunk = attend(*leaves, causal=causal, scale=q.shape[-1] ** -0.5)
        out[:, rows] = chunk.detach()
        grads = torch.autograd.grad(chunk, leaves, dout[:, rows])
        for total, place, grad in zip((dq, dk, dv), (rows, keys, keys), grads, strict=True):
            total[:, place] += grad
    return [out, dq, dk, dv]


def math_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, seen: Tensor | None = None
) -> Tensor:
    """torch's math attention with the causal mask aligned at the bottom right: the yardstick of errors.

    `seen`, (T, T) boolean, takes the place of that mask: k are the first keys of a sequence, and q its queries that end
    where k does.
    """
    seq_q, seq_k = q.shape[1], k.shape[1]
    mask = visible(seq_q, seq_k, q.device) if causal else None
    if seen is not None:
        mask = seen[seq_k - seq_q : seq_k, :seq_k].to(q.device)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True).transpose(1, 2)


def relative_error(x: Tensor, exact: Tensor) -> float:
    """|x - exact| / |exact| in the Frobenius norm."""
    tiny = 1e-6 * exact.numel() ** 0.5  # dq and dk vanish where a query sees one key
    return ((x.double() - exact).norm() / exact.norm().clamp(min=tiny)).item()


def truth_of(cell: Cell, data: Data, seen: Tensor | None = None) -> Truth:
    """The reference of a cell, and how far off math attention is.

    `seen`, (T, T) boolean, is which keys each query of a causal cell sees, where it does not see all before it.
    """
    all_pairs = cell.batch * cell.kv_heads
    count = min(all_pairs, max(2, 2 * TOKENS // cell.seq_len))
    chosen = torch.linspace(0, all_pairs - 1, count, dtype=torch.float64, device=data.q.device).long()
    pairs = chosen // cell.kv_heads, chosen % cell.kv_heads
    inputs = [pick(x, cell.kv_heads, pairs) for x in data[:4]]
    yardstick = partial(math_attention, seen=seen)
    reference = standard_attention if seen is None else yardstick
    exact = in_chunks(reference, *(x.double() for x in inputs), causal=cell.causal)
    theirs = in_chunks(yardstick, *inputs, causal=cell.causal)
    return Truth(pairs, exact, [relative_error(*both) for both in zip(theirs, exact, strict=True)])


def check(contender: Contender, cell: Cell, truth: Truth) -> None:
    """Runs a variant once on the whole input, and notes its error and the layout of its dout.

    Raises:
        WrongResult: a shape, a value that is not finite, or an error beyond what is allowed.
    """
    out = contender.forward()
    if out.shape != contender.dout.shape:
        raise WrongResult(f"out has shape {tuple(out.shape)}, not {tuple(contender.dout.shape)}")
    contender.dout = torch.empty_like(out).copy_(contender.dout)
    got = [out.detach()]
    try:
        grads = torch.autograd.grad(out, contender.leaves, contender.dout)
        got += grads if len(grads) == 3 else grads[0].unbind(2)
    except torch.OutOfMemoryError:
        pass  # the rows of the passes with a backward will say so
    errors = []
    for name, x, exact in zip(NAMES, got, truth.exact, strict=False):
        if not x.isfinite().all():
            raise WrongResult(f"{name} is not finite")
        errors.append(relative_error(pick(x, cell.kv_heads, truth.pairs), exact))
    contender.error = max(errors)
    for name, error, allowed in zip(NAMES, errors, truth.allowed(contender.variant), strict=False):
        if error > allowed:
            raise WrongResult(f"{name} is off by {error:.1e}, where {allowed:.1e} is allowed")
