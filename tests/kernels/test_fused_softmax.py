"""The fused softmax: its Triton kernels (interpreted without a GPU) and its definition against fp64."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.common import dropout
from kernels.common.checks import document_bounds
from kernels.fused_softmax import definition, fused_softmax, triton_kernels
from kernels.naive.definition import standard_attention
from tests.kernels.accuracy import Case, draw, outcome

KERNEL_DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def cases(draw) -> tuple:
    """Draw the shape of the scores, whether they are causal, the cuts between documents (or None), and dropout_p."""
    batch, heads, seq_q, seq_k = (draw(st.integers(1, most)) for most in (2, 3, 40, 140))
    documents = draw(st.booleans())
    cuts = draw(st.lists(st.integers(0, batch * seq_q), max_size=3)) if documents else None
    shape = batch, heads, seq_q, seq_q if documents else seq_k
    return shape, draw(st.booleans()), cuts, draw(st.sampled_from([0.0, 0.3]))


def written_out(scores, dkept, hidden, keep, scale: float) -> tuple:
    """Return the probabilities before and after dropout, and the gradient of the scores, by autograd in fp64."""
    exact = scores.double().requires_grad_()
    probabilities = (exact * scale).masked_fill(hidden, -1e30).softmax(-1) * ~hidden
    kept = probabilities * keep
    return probabilities, kept, torch.autograd.grad(kept, exact, dkept.double())[0]


@pytest.mark.parametrize("implementation", [definition, triton_kernels], ids=["definition", "Triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(settings.get_profile("kernels"), max_examples=8)
@given(case=cases())
def test_results_match_fp64_up_to_rounding(implementation, dtype, case):
    """Covers any shape, causal masks, documents, dropout and queries that see no key."""
    (batch, heads, seq_q, seq_k), causal, cuts, dropout_p = case
    torch.manual_seed(seq_k)
    scores, dkept = (torch.randn(batch, heads, seq_q, seq_k, device=KERNEL_DEVICE).to(dtype) for _ in range(2))
    scores *= 8
    numbers = dropout.draw(batch, heads, seq_q, seq_k, scores.device) if dropout_p else None
    hidden = torch.zeros(batch, 1, seq_q, seq_k, dtype=torch.bool, device=KERNEL_DEVICE)
    documents = None
    if causal:
        own = torch.arange(seq_q)[:, None] + seq_k - seq_q
        hidden |= (torch.arange(seq_k) > own).to(KERNEL_DEVICE)
    if cuts is not None:
        edges = torch.tensor([0, *sorted(cuts), batch * seq_q], device=KERNEL_DEVICE)
        documents = document_bounds(edges, batch, seq_q)
        of_token = (edges[:, None, None] <= torch.arange(batch * seq_q, device=KERNEL_DEVICE).view(batch, seq_q)).sum(0)
        hidden |= (of_token[:, :, None] != of_token[:, None, :])[:, None]
    keep = 1.0
    if dropout_p:
        keep = dropout.keep_mask(numbers, seq_q, range(seq_q), range(seq_k), dropout_p).double() / (1 - dropout_p)
    options = numbers, documents, causal, 0.3, dropout_p
    probabilities, kept = implementation.forward(scores, *options)
    dscores = implementation.backward(dkept, probabilities, *options)
    expected = written_out(scores, dkept, hidden, keep, 0.3)
    found = probabilities, kept if dropout_p else probabilities, dscores
    tolerance = 4 * torch.finfo(dtype).eps
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == dtype
        assert (got.double() - want).norm() <= tolerance * want.norm() + 1e-7, case


def test_dropout_uses_the_same_mask_in_both_passes():
    inputs = draw(Case(batch=1, seq_q=70, seq_k=70, heads=4, dtype=torch.float64), "cpu")
    torch.manual_seed(5)
    keep = dropout.keep_mask(dropout.draw(1, 4, 70, 70, "cpu"), 70, range(70), range(70), 0.3)
    torch.manual_seed(5)
    got = outcome(lambda q, k, v: fused_softmax(q, k, v, causal=True, scale=0.1, dropout_p=0.3), *inputs)
    want = outcome(
        lambda q, k, v: standard_attention(q, k, v, causal=True, scale=0.1, dropout_p=0.3, keep=keep), *inputs
    )
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_the_operators_are_well_formed_and_compile(device, dropout_p):
    scores = torch.randn(2, 2, 20, 30, device=device)
    options = dropout.draw(2, 2, 20, 30, scores.device) if dropout_p else None, None, True, 0.2, dropout_p
    torch.library.opcheck(torch.ops.fused_softmax.forward, (scores, *options))
    probabilities, _ = torch.ops.fused_softmax.forward(scores, *options)
    torch.library.opcheck(torch.ops.fused_softmax.backward, (scores, probabilities, *options))
    inputs = draw(Case(seq_q=40, seq_k=40), device)
    attend = lambda q, k, v: fused_softmax(q * 2, k, v, causal=True, scale=0.2)  # noqa: E731
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
    torch.testing.assert_close(outcome(compiled, *inputs), outcome(attend, *inputs), atol=1e-4, rtol=1e-4)


def test_rows_that_are_too_long_are_refused():
    q = torch.randn(1, 16385, 1, 16)
    with pytest.raises(ValueError, match="seq_k=16385 exceeds the 16384 scores .*; use attention=flash2"):
        fused_softmax(q[:, :2], q, q, causal=True, scale=1.0)
