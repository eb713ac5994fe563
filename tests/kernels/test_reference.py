"""The papers' algorithms, line by line, against torch, and the page that walks through them."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.reference import __main__ as page
from kernels.reference import algorithms


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 13), d=st.integers(1, 5), B_r=st.integers(1, 6), B_c=st.integers(1, 6), seed=st.integers(0, 99))
def test_every_algorithm_is_softmax_attention_for_any_tiles(n, d, B_r, B_c, seed):
    generator = torch.Generator().manual_seed(seed)
    Q, K, V, dO = (3 * torch.randn(n, d, dtype=torch.float64, generator=generator) for _ in range(4))
    inputs = [x.clone().requires_grad_() for x in (Q, K, V)]
    expected = (inputs[0] @ inputs[1].T).softmax(1) @ inputs[2]
    gradients = torch.autograd.grad(expected, inputs, dO)
    torch.testing.assert_close(algorithms.standard_attention(Q, K, V), expected)
    torch.testing.assert_close(algorithms.online_softmax(Q[0] @ K.T), (Q[0] @ K.T).softmax(0))
    torch.testing.assert_close(algorithms.flash_attention(Q, K, V, B_r, B_c), expected)
    O, L = algorithms.flash_attention_2(Q, K, V, B_r, B_c)
    torch.testing.assert_close(O, expected)
    torch.testing.assert_close(L, (Q @ K.T).logsumexp(1))
    found = algorithms.flash_attention_2_backward(Q, K, V, O, dO, L, B_r, B_c)
    for ours, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_flash_attention_1_is_normalised_after_every_tile_and_2_only_at_the_end():
    """For the first two keys, row 1 has S = 1, 0. So l = 1 + exp(-1), and O weights V by 1 / l and exp(-1) / l."""
    seen = {}

    def watch(i, j, O, l, **_):
        seen[i, j] = O.clone(), l.clone()

    weight = torch.tensor([1, torch.e**-1], dtype=torch.float64)
    algorithms.flash_attention(page.Q, page.K, page.V, 2, 2, watch)
    torch.testing.assert_close(seen[0, 0][0][0], weight / weight.sum())
    algorithms.flash_attention_2(page.Q, page.K, page.V, 2, 2, watch)
    torch.testing.assert_close(seen[0, 0][0][0], weight)
    torch.testing.assert_close(seen[0, 0][1][0], weight.sum())


def test_the_page_shows_the_states_and_checks_every_result(capsys):
    page.walk()
    output = capsys.readouterr().out
    assert output.count("matches Algorithm 0 to") == 7 and "i = 2, j = 2" in output
    # The first row of S is 1, 0, 3, -1. After three numbers l = 1 + exp(-2) + exp(-3).
    assert "3.0000   |    3.0000   |    1.1851" in output


def test_the_page_exits_at_a_wrong_result(monkeypatch):
    right = algorithms.flash_attention
    wrong = functools.wraps(right)(lambda *args: right(*args) + 1e-9)
    monkeypatch.setattr(algorithms, "flash_attention", wrong)
    with pytest.raises(SystemExit, match="O differs from Algorithm 0's"):
        page.walk()
