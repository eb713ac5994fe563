"""Accuracy of an attention (its error against fp64 beside the error of torch's math attention) and of other kernels."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.naive.definition import standard_attention, visible

NAMES = "out", "dq", "dk", "dv"


class Case(NamedTuple):
    """Sizes of one comparison."""

    batch: int = 2
    seq_q: int = 111
    seq_k: int = 111
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    causal: bool = True
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        lengths = f"{self.seq_q}" if self.seq_q == self.seq_k else f"{self.seq_q}x{self.seq_k}"
        group = f"_{self.heads}to{self.kv_heads}heads" if self.heads != self.kv_heads else ""
        return f"{str(self.dtype).removeprefix('torch.')}_{mask}_{lengths}_d{self.head_dim}{group}"


def draw(case: Case, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and dout of a case."""
    generator = torch.Generator().manual_seed(seed)

    def normal(length: int, heads: int) -> Tensor:
        x = torch.randn(case.batch, length, heads, case.head_dim, generator=generator)
        return x.to(device=device, dtype=case.dtype)

    q, k, v = normal(case.seq_q, case.heads), normal(case.seq_k, case.kv_heads), normal(case.seq_k, case.kv_heads)
    return q, k, v, normal(case.seq_q, case.heads)


def outcome(attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """Return the output of attention(q, k, v) and its three gradients."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout.to(out.dtype))


def exact(case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """Return the outcome of standard attention in fp64."""
    scale = case.head_dim**-0.5
    doubles = (x.double() for x in (q, k, v, dout))
    return outcome(lambda q, k, v: standard_attention(q, k, v, causal=case.causal, scale=scale), *doubles)


def yardstick(case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """Return the outcome of torch's math attention in the inputs' dtype."""
    mask = visible(case.seq_q, case.seq_k, q.device) if case.causal else None

    def math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    return outcome(math, q, k, v, dout)


def assert_as_accurate(case: Case, got: tuple[Tensor, ...], inputs: tuple[Tensor, ...], factor: float = 2) -> None:
    """Check that the errors of out, dq, dk and dv are at most `factor` times the errors of torch's math attention.

    The errors are Frobenius norms. A gradient that is exactly zero, for example because each query sees one key, must
    be zero up to fp32's rounding.
    """
    for name, x, reference, theirs in zip(NAMES, got, exact(case, *inputs), yardstick(case, *inputs), strict=True):
        error = (x.double() - reference).norm()
        allowed = factor * (theirs.double() - reference).norm()
        allowed = max(allowed, 2 * torch.finfo(torch.float32).eps * reference.norm())  # torch's error may be zero
        if reference.norm() < 1e-6 * reference.numel() ** 0.5:
            allowed = 1e-5 * reference.numel() ** 0.5
        assert x.shape == reference.shape and x.dtype == case.dtype, name
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


def is_rounded(found: Tensor, wanted: Tensor, roundings: float = 1) -> bool:
    """Return whether the error of `found` is at most `roundings` times the error of rounding the fp64 result `wanted`.

    The error of an fp32 computation is allowed on top.
    """
    rounding = (wanted.to(found.dtype).double() - wanted).norm()
    return bool((found.double() - wanted).norm() <= 1.05 * roundings * rounding + 2e-6 * wanted.norm())
