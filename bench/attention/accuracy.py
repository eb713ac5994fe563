"""Compare each variant with the fp64 reference before it is timed.

`error` is the largest |x - exact| / |exact| over out, dq, dk and dv, in the Frobenius norm. The variant runs twice on
the whole input, and all its results must be finite. Some (sequence, head) pairs, evenly spread, are compared: 64 pairs
at T = 512, 2 pairs from T = 16k. If the backward pass runs out of memory, only out is compared.

A variant is wrong, and gets no timing, if its error exceeds 3 times the error of torch's math attention in the same
dtype. For fused_softmax and pytorch the factor is 4, because they also round scores, probabilities and their gradients
to 16 bits.

B batch, T sequence length, H query heads, G key/value heads, D head size.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.attention.contenders import Contender, Inputs, bind, draw_inputs
from bench.attention.shapes import TOKENS, AttentionShape
from kernels.naive.definition import standard_attention, visible
from model.attention import Attention, kind_of

NAMES = "out", "dq", "dk", "dv"
FACTOR, FACTORS = 3, {"fused_softmax": 4, "pytorch": 4}  # allowed multiple of math attention's error
CHUNK = 1024  # queries per call of the reference
VANISHING = 1e-6  # per element; |exact| counts as at least this much


class WrongResult(Exception):
    """A variant's output or gradient differs from attention's."""


class Truth(NamedTuple):
    """out, dq, dk and dv in fp64 for some (sequence, key/value head) pairs, and math attention's relative errors."""

    pairs: tuple[Tensor, Tensor]
    exact: list[Tensor]
    yardstick: list[float]

    def allowed(self, variant: str) -> list[float]:
        """Return the largest relative errors that a correct variant may have."""
        factor, eps = FACTORS.get(variant, FACTOR), torch.finfo(torch.float32).eps
        # Math attention may be exact. A gradient that vanishes still has rounding errors.
        rounding = [10 if is_zero(exact) else 2 * eps for exact in self.exact]
        return [max(factor * error, least) for error, least in zip(self.yardstick, rounding, strict=True)]


def pick(x: Tensor, kv_heads: int, pairs: tuple[Tensor, Tensor]) -> Tensor:
    """Return the chosen pairs, (pairs, T, H / G or 1, D), of x (B, T, H or G, D)."""
    sequences, groups = pairs
    return x.unflatten(2, (kv_heads, -1))[sequences, :, groups]


def in_chunks(attend: Attention, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, causal: bool) -> list[Tensor]:
    """Return out, dq, dk and dv of `attend` in fp64, from CHUNK queries at a time because T x T does not fit in memory.

    In a causal chunk the keys end where the queries end, so a mask aligned at the bottom right stays correct.
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
    """Compute torch's math attention, the yardstick of errors. The last query and key belong to the same token.

    `seen` (T, T) boolean replaces the causal mask.
    """
    seq_q, seq_k = q.shape[1], k.shape[1]
    mask = visible(seq_q, seq_k, q.device) if causal else None
    if seen is not None:
        mask = seen[seq_k - seq_q : seq_k, :seq_k].to(q.device)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True).transpose(1, 2)


def is_zero(exact: Tensor) -> bool:
    """Return whether a result vanishes, as dq and dk do if a query sees one key."""
    return bool(exact.norm() < VANISHING * exact.numel() ** 0.5)


def relative_error(x: Tensor, exact: Tensor) -> float:
    """Return |x - exact| / |exact| in the Frobenius norm."""
    return ((x.double() - exact).norm() / exact.norm().clamp(min=VANISHING * exact.numel() ** 0.5)).item()


def truth_of(shape: AttentionShape, inputs: Inputs, seen: Tensor | None = None) -> Truth:
    """Compute the reference of a shape, and math attention's errors.

    `seen` (T, T) boolean says which keys each query sees, for causal variants that leave keys out.
    """
    all_pairs = shape.batch * shape.kv_heads
    count = min(all_pairs, max(2, 2 * TOKENS // shape.seq_len))
    chosen = torch.linspace(0, all_pairs - 1, count, dtype=torch.float64, device=inputs.q.device).long()
    pairs = chosen // shape.kv_heads, chosen % shape.kv_heads
    picked = [pick(x, shape.kv_heads, pairs) for x in inputs[:4]]
    yardstick = partial(math_attention, seen=seen)
    reference = standard_attention if seen is None else yardstick
    exact = in_chunks(reference, *(x.double() for x in picked), causal=shape.causal)
    theirs = in_chunks(yardstick, *picked, causal=shape.causal)
    return Truth(pairs, exact, [relative_error(*both) for both in zip(theirs, exact, strict=True)])


def check(contender: Contender, shape: AttentionShape, truth: Truth) -> None:
    """Run a variant twice on the whole input. Store its error, and store dout in the layout of its output.

    A kernel that does not reset its counters or its workspace is right once. Its second call may get the memory of the
    first results, so these are overwritten with NaN.

    Raises:
        WrongResult: the output has another shape or dtype, a gradient is missing, a result is not finite, an error
            exceeds the allowed one, or the variant changed its inputs.
    """
    contender.error = max(_run_and_judge(contender, shape, truth) for _ in range(2))


def check_on(shape: AttentionShape, device: str, variant: str, attend: Attention, seen: Tensor | None = None) -> float:
    """Check an attention on the inputs of a shape, as `check` does, and return its error. For `seen` see truth_of."""
    inputs = draw_inputs(shape, device)
    contender = bind(variant, attend, shape, inputs)
    check(contender, shape, truth_of(shape, inputs, seen))
    return contender.error


def _run_and_judge(contender: Contender, shape: AttentionShape, truth: Truth) -> float:
    """Return the error of a call, whose results are overwritten with NaN. See check."""
    inputs = [leaf.detach().clone() for leaf in contender.leaves]
    out = contender.forward()
    check_output(out, contender.dout)
    if not out.requires_grad:
        raise WrongResult("out has no gradient; wrap a kernel in torch.autograd.Function")
    contender.dout = torch.empty_like(out).copy_(contender.dout)
    got = [out.detach()]
    try:
        options = {"allow_unused": True, "retain_graph": True}  # as in Contender.call
        grads = torch.autograd.grad(out, contender.leaves, contender.dout, **options)
        got += grads if len(grads) == 3 else grads[0].unbind(2)
    except torch.OutOfMemoryError:
        pass  # the rows of the passes with a backward will report it
    if not all(map(torch.equal, inputs, contender.leaves)):
        raise WrongResult("q, k or v was changed; copy an input before you write to it")
    error = judge(contender.variant, dict(zip(NAMES, got, strict=False)), shape, truth)
    given = {x.untyped_storage().data_ptr() for x in (contender.dout, *contender.leaves)}
    for x in got:
        if x.untyped_storage().data_ptr() not in given:  # autograd may return dout itself as a gradient
            x.fill_(math.nan)
    return error


def check_output(out: object, like: Tensor) -> None:
    """Raise a WrongResult if `out` is not a tensor with the shape and the dtype of `like`."""
    if (found := kind_of(out)) != (expected := kind_of(like)):
        raise WrongResult(f"out is {found}, not {expected}")


def judge(variant: str, results: dict[str, Tensor | None], shape: AttentionShape, truth: Truth) -> float:
    """Return the largest relative error of some of out, dq, dk and dv, which are given by name.

    Raises:
        WrongResult: a result is None or not finite, or its error exceeds the allowed one.
    """
    exact_of, allowed_of = (dict(zip(NAMES, x, strict=True)) for x in (truth.exact, truth.allowed(variant)))
    for name, x in results.items():
        if x is None:
            raise WrongResult(f"{name} is missing")
        if not x.isfinite().all():
            raise WrongResult(f"{name} is not finite")
    errors = {name: relative_error(pick(x, shape.kv_heads, truth.pairs), exact_of[name]) for name, x in results.items()}
    for name, error in errors.items():
        if error > allowed_of[name]:
            raise WrongResult(f"{name} is off by {error:.1e}; {allowed_of[name]:.1e} is allowed")
    return max(error for name, error in errors.items() if not is_zero(exact_of[name]))
