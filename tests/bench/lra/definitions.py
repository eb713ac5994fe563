"""Slow definitions in fp64 that the tests of bench.lra share."""

from collections.abc import Callable

import torch
from torch import Tensor

from bench.lra.config import EncoderConfig


def config_of(length: int, **options) -> EncoderConfig:
    return EncoderConfig(vocab_size=16, classes=4, context_length=length, **options)


def draw(length: int, batch: int = 2, heads: int = 2, head_dim: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Return normal q, k, v (batch, length, heads, head_dim) in fp64, with gradients."""
    return tuple(torch.randn(batch, length, heads, head_dim, dtype=torch.float64, requires_grad=True) for _ in range(3))


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, masked: Tensor | None = None) -> Tensor:
    """Return softmax(q k^T D**-0.5) v without the pairs that are true in `masked` (T, S)."""
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[3] ** -0.5
    if masked is not None:
        scores = scores.masked_fill(masked, -torch.inf)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(3), v)


def assert_same(found: Callable[..., Tensor], expected: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    """Compare two functions of q, k and v: outputs and gradients. An input without effect has a gradient of zero."""
    outcomes = []
    for function in found, expected:
        out = function(*inputs)
        dout = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
        outcomes.append((out, *torch.autograd.grad(out, inputs, dout, materialize_grads=True)))
    for name, a, b in zip(("out", "dq", "dk", "dv"), *outcomes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
