"""The papers' algorithms, line by line, against torch, and the text that walks through them."""

import functools
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.reference import algorithms, walk
from tests.e2e import ROOT


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 13),
    d=st.integers(1, 5),
    B_r=st.integers(1, 6),
    B_c=st.integers(1, 6),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_algorithm_is_softmax_attention_for_any_tiles(n, d, B_r, B_c, causal, seed):
    generator = torch.Generator().manual_seed(seed)
    Q, K, V, dO = (3 * torch.randn(n, d, dtype=torch.float64, generator=generator) for _ in range(4))
    inputs = [x.clone().requires_grad_() for x in (Q, K, V)]
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1) & causal
    S = (inputs[0] @ inputs[1].T).masked_fill(hidden, float("-inf"))
    expected = S.softmax(1) @ inputs[2]
    gradients = torch.autograd.grad(expected, inputs, dO)
    if not causal:
        torch.testing.assert_close(algorithms.standard_attention(Q, K, V), expected)
    torch.testing.assert_close(algorithms.online_softmax(Q[0] @ K.T), (Q[0] @ K.T).softmax(0))
    O, l, m = algorithms.flash_attention(Q, K, V, B_r, B_c, causal=causal)
    torch.testing.assert_close(O, expected)
    torch.testing.assert_close(m, S.amax(1))
    found = algorithms.flash_attention_backward(Q, K, V, O, dO, l, m, B_r, B_c, causal=causal)
    torch.testing.assert_close(found, gradients)
    O, L = algorithms.flash_attention_2(Q, K, V, B_r, B_c, causal=causal)
    torch.testing.assert_close(O, expected)
    torch.testing.assert_close(L, S.logsumexp(1))
    found = algorithms.flash_attention_2_backward(Q, K, V, O, dO, L, B_r, B_c, causal=causal)
    torch.testing.assert_close(found, gradients)


def test_a_causal_mask_skips_the_tiles_that_it_hides():
    """Tiles of 2 queries and 3 keys of 6 tokens: the first tile of queries does not see the keys from 4 on."""
    seen, watch = [], lambda i, j, **_: seen.append((i, j))
    Q, K, V, dO = torch.randn(4, 6, 2, dtype=torch.float64)
    O, l, m = algorithms.flash_attention(Q, K, V, 2, 3, watch, causal=True)
    assert seen == [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1)]
    algorithms.flash_attention_2(Q, K, V, 2, 3, watch, causal=True)
    assert seen[5:] == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)]
    algorithms.flash_attention_backward(Q, K, V, O, dO, l, m, 2, 3, watch, causal=True)
    algorithms.flash_attention_2_backward(Q, K, V, O, dO, m + l.log(), 2, 3, watch, causal=True)
    assert seen[10:] == 2 * seen[:5]


def states(algorithm, *inputs) -> dict:
    """Return l and O of each tile (i, j), with tiles of 2."""
    seen = {}
    algorithm(*inputs, 2, 2, lambda i, j, O, l, **_: seen.setdefault((i, j), (l.clone(), O.clone())))
    return seen


def test_flash_attention_1_is_normalised_after_every_tile_and_2_only_at_the_end():
    """For the first two keys, row 1 has S = 1, 0. So l = 1 + exp(-1), and O weights V by 1 / l and exp(-1) / l."""
    weight = torch.tensor([1, torch.e**-1], dtype=torch.float64)
    _, O = states(algorithms.flash_attention, walk.Q, walk.K, walk.V)[0, 0]
    torch.testing.assert_close(O[0], weight / weight.sum())
    l, O = states(algorithms.flash_attention_2, walk.Q, walk.K, walk.V)[0, 0]
    torch.testing.assert_close(O[0], weight)
    torch.testing.assert_close(l[0], weight.sum())


def test_the_published_example():
    """A published version has l = 1, 1 and O = 1, 2; 2, 3 after the first tile."""
    close = functools.partial(torch.testing.assert_close, check_dtype=False, atol=5e-5, rtol=0)
    l, O = states(algorithms.flash_attention, *walk.PUBLISHED)[0, 0]
    close(l, torch.tensor([2, 1.3679]))
    close(O, torch.tensor([[1.5, 2.5], [1.7311, 2.7311]]))
    O, _, _ = algorithms.flash_attention(*walk.PUBLISHED, 2, 2)
    close(O, torch.tensor([[2.4062, 3.4062], [2.3607, 3.3607], [2.1447, 3.1447], [2.5, 3.5]]))


def test_two_blocks_of_a_row_merge():
    """Scores 1, 2 and 3, 4. exp(-2) rescales the first block to the maximum 4; the second one keeps its values."""
    x, V = torch.arange(1.0, 5.0, dtype=torch.float64), walk.PUBLISHED[2]
    first, second = (algorithms.softmax_block(x[at], V[at]) for at in (slice(2), slice(2, 4)))
    e = torch.e
    assert first[0] == 2 and second[0] == 4
    assert first[2].item() == second[2].item() == pytest.approx(1 + e**-1)
    m, f, l, o = algorithms.merge(first, second)
    assert m == 4 and f.tolist() == pytest.approx([e**-3, e**-2, e**-1, 1])
    assert l.item() == pytest.approx(e**-3 + e**-2 + e**-1 + 1)
    torch.testing.assert_close(o, x.softmax(0) @ V)


def test_the_tiles_of_the_paper():
    """98,304 elements are 192 KiB in fp16. With 300 elements and d = 64, ceil(300 / 256) is 2."""
    assert [algorithms.block_sizes(98_304, d) for d in (64, 128)] == [(384, 64), (192, 128)]
    assert algorithms.block_sizes(300, 64) == (2, 2)


def test_the_walk_shows_the_states_and_checks_every_result(capsys):
    walk.walk()
    output = capsys.readouterr().out
    assert output.count("matches Algorithm 0 to") == 13 and "i = 2, j = 2" in output
    # The first row of S is 1, 0, 3, -1. After three numbers l = 1 + exp(-2) + exp(-3).
    assert "3.0000   |    3.0000   |    1.1851" in output
    assert "0.0000    1.0000   |    1.0000   |    1.3679   |    1.7311    2.7311" in output  # the published example
    assert "4.0000   |    0.0498   |    1.5530   |    3.4927    4.4927" in output  # the merge
    rows = [line.split() for line in output.splitlines() if line.strip().startswith(("A100  ", "H100  "))]
    tiles = [(gpu, kib, size, int(d), int(B_c), int(B_r)) for gpu, kib, size, *_, d, B_c, B_r in rows]
    assert tiles == [
        *(("A100", "192", "2", 64, 384, 64), ("A100", "192", "2", 128, 192, 128)),
        *(("A100", "192", "4", 64, 192, 64), ("A100", "192", "4", 128, 96, 96)),
        *(("H100", "228", "2", 64, 456, 64), ("H100", "228", "2", 128, 228, 128)),
        *(("H100", "228", "4", 64, 228, 64), ("H100", "228", "4", 128, 114, 114)),
    ]


def test_the_walk_exits_at_a_wrong_result(monkeypatch):
    right = algorithms.flash_attention_2
    wrong = functools.wraps(right)(lambda *args: (right(*args)[0] + 1e-9, right(*args)[1]))
    monkeypatch.setattr(algorithms, "flash_attention_2", wrong)
    with pytest.raises(SystemExit, match="O differs from Algorithm 0's"):
        walk.walk()


def test_the_walk_ends_quietly_when_its_reader_does():
    with subprocess.Popen([sys.executable, "-m", "kernels.reference"], cwd=ROOT, stdout=-1, stderr=-1) as program:
        program.stdout.read(1)
        program.stdout.close()
        assert program.stderr.read() == b""
