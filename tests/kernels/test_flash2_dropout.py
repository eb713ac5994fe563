"""Dropout: its random numbers, and that kernels and gradients use them."""

import pytest
import torch

from kernels.common import dropout
from kernels.flash2 import dispatch, flash2
from kernels.flash2.options import Options
from kernels.naive.definition import standard_attention
from tests.kernels.accuracy import Case, draw, outcome
from tests.kernels.flash2_cases import KERNEL_DEVICE


def test_the_kernels_drop_what_their_definition_says():
    """With v = I the output is P itself, so its zeros are the dropped probabilities."""
    n = 48
    q, k = torch.randn(2, 2, n, 2, n, device=KERNEL_DEVICE)
    v = torch.eye(n, device=KERNEL_DEVICE)[None, :, None, :].expand(2, n, 2, n)
    for dropout_p in (0.1, 0.7):
        numbers = dropout.draw(2, 2, n, n, q.device)
        out, _ = dispatch.forward(q, k, v, *Options(numbers, scale=0.1, dropout_p=dropout_p))
        keep = dropout.keep_mask(numbers, n, range(n), range(n), dropout_p)
        assert torch.equal(out.permute(0, 2, 1, 3) != 0, keep)
        assert abs(keep.float().mean().item() - (1 - dropout_p)) < 0.02


@pytest.mark.parametrize("dropout_p", [0.03, 0.1, 0.5])
def test_dropout_is_as_random_as_a_coin(dropout_p):
    """The standardised decisions have the statistics of independent draws.

    Tested are the mean, the means of rows and columns, pairs, four at the corners of a rectangle, and the spectrum of
    the matrix. (x ^ y in place of x y passes all except the last two.)
    """
    n = 2048
    torch.manual_seed(0)
    keep = dropout.keep_mask(dropout.draw(1, 1, n, n, "cpu"), n, range(n), range(n), dropout_p)[0, 0].float()
    z = (keep - (1 - dropout_p)) / (dropout_p * (1 - dropout_p)) ** 0.5
    assert abs(z.mean()) * n < 4
    for axis in (0, 1):
        assert (z.mean(axis).square().mean() * n).item() == pytest.approx(1, abs=0.15)
    pairs = (z @ z.T).fill_diagonal_(0)
    assert (pairs.square().sum() / (n**2 * (n - 1))).item() == pytest.approx(1, abs=0.02)
    squares = z.square()
    rectangles = pairs.square().sum() - (squares @ squares.T).fill_diagonal_(0).sum()
    assert abs(rectangles) / (2 * n * (n - 1)) < 4
    largest = torch.linalg.eigvalsh(z @ z.T)[-1].sqrt()  # singular value
    assert largest.item() / n**0.5 == pytest.approx(2, abs=0.1)


def test_dropout_has_the_gradient_of_the_mask_it_drew(monkeypatch):
    case = Case(batch=1, seq_q=150, seq_k=150, dtype=torch.float64)
    inputs = draw(case, "cpu")
    numbers = dropout.draw(1, 2, 150, 150, "cpu")
    keep = dropout.keep_mask(numbers, 150, range(150), range(150), 0.3)
    monkeypatch.setattr(dropout, "draw", lambda *shape: numbers)
    got = outcome(lambda q, k, v: flash2(q, k, v, causal=True, scale=0.1, dropout_p=0.3), *inputs)
    want = outcome(
        lambda q, k, v: standard_attention(q, k, v, causal=True, scale=0.1, dropout_p=0.3, keep=keep), *inputs
    )
    torch.testing.assert_close(got, want)
