"""flash1's Triton kernels (interpreted without a GPU), its PyTorch definition and its operator."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.common import dropout
from kernels.common.checks import document_bounds
from kernels.flash1 import definition, flash1, launch
from kernels.naive.definition import standard_attention
from tests.kernels.accuracy import Case, assert_as_accurate, draw, outcome
from tests.kernels.flash2_cases import BF16, F16, F32, KERNEL_DEVICE


def both_passes(implementation, inputs: tuple, *options) -> tuple:
    """Return out, dq, dk and dv of the kernels (launch) or of the definition."""
    q, k, v, dout = inputs
    out, l, m = implementation.forward(q, k, v, *options)
    return out, *implementation.backward(dout, q, k, v, out, l, m, *options)


@pytest.mark.parametrize(
    "case",
    [
        Case(seq_q=1, seq_k=1),
        Case(batch=1, head_dim=40, dtype=BF16),
        Case(batch=1, head_dim=80, heads=4, kv_heads=2, dtype=F16),
        Case(batch=1, seq_q=70, seq_k=70, head_dim=256, heads=1, kv_heads=1, causal=False, dtype=BF16),
        Case(batch=1, seq_q=63, seq_k=140, head_dim=128, dtype=BF16),
        Case(batch=1, seq_q=300, seq_k=300, heads=1, kv_heads=1, dtype=BF16),
    ],
    ids=str,
)
def test_kernels_are_as_accurate_as_math_attention(case):
    inputs = draw(case, KERNEL_DEVICE)
    got = both_passes(launch, inputs, None, None, case.causal, case.head_dim**-0.5, 0.0)
    assert_as_accurate(case, got, inputs)


@settings(settings.get_profile("kernels"), max_examples=6)
@given(
    case=st.builds(
        Case,
        batch=st.integers(1, 2),
        seq_q=st.integers(1, 100),
        seq_k=st.integers(1, 100),
        heads=st.just(2),
        kv_heads=st.sampled_from([1, 2]),
        head_dim=st.integers(16, 40),
        causal=st.booleans(),
        dtype=st.just(F32),
    ),
    dropout_p=st.sampled_from([0.0, 0.25]),
    documents=st.booleans(),
)
def test_kernels_and_definition_agree_at_any_size(case, dropout_p, documents):
    """Covers dropout, documents (one crosses into the next sequence), and queries that see no key."""
    case = case._replace(seq_k=case.seq_q) if documents else case
    inputs, total = draw(case, KERNEL_DEVICE), case.batch * case.seq_q
    cuts = torch.tensor([0, total // 3, total // 2, total], device=KERNEL_DEVICE)
    bounds = document_bounds(cuts, case.batch, case.seq_q) if documents else None
    numbers = dropout.draw(case.batch, case.heads, case.seq_q, case.seq_k, inputs[0].device)
    options = numbers, bounds, case.causal, 0.2, dropout_p
    for got, want in zip(both_passes(launch, inputs, *options), both_passes(definition, inputs, *options), strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-4)


def test_dropout_uses_the_same_mask_in_both_passes():
    inputs = draw(Case(batch=1, seq_q=150, seq_k=150, dtype=torch.float64), "cpu")
    torch.manual_seed(5)
    keep = dropout.keep_mask(dropout.draw(1, 2, 150, 150, "cpu"), 150, range(150), range(150), 0.3)
    torch.manual_seed(5)
    got = outcome(lambda q, k, v: flash1(q, k, v, causal=True, scale=0.1, dropout_p=0.3), *inputs)
    want = outcome(
        lambda q, k, v: standard_attention(q, k, v, causal=True, scale=0.1, dropout_p=0.3, keep=keep), *inputs
    )
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_operators_are_well_formed_and_compile(device):
    q, k, v, dout = draw(Case(seq_q=40, seq_k=40, dtype=F32), device)
    options = dropout.draw(2, 2, 40, 40, q.device), None, True, 0.125, 0.1
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.flash1.forward.default, (q, k, v, *options), test_utils=checks)
    out, l, m = torch.ops.flash1.forward(q, k, v, *options)
    torch.library.opcheck(torch.ops.flash1.backward.default, (dout, q, k, v, out, l, m, *options), test_utils=checks)
    attend = lambda q, k, v: flash1(q * 2, k, v, causal=True, scale=0.2)  # noqa: E731
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
    torch.testing.assert_close(outcome(compiled, q, k, v, dout), outcome(attend, q, k, v, dout))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_many_key_tiles_are_accurate(head_dim):
    """O, l, m and dQ go through memory for each of many key tiles."""
    case = Case(batch=2, seq_q=1500, seq_k=1500, heads=4, kv_heads=2, head_dim=head_dim, dtype=BF16)
    inputs = draw(case, "cuda")
    got = both_passes(launch, inputs, None, None, True, head_dim**-0.5, 0.0)
    assert_as_accurate(case, got, inputs)


def test_an_unsupported_head_size_is_refused():
    q, k, v, _ = draw(Case()._replace(head_dim=8), "cpu")
    with pytest.raises(ValueError, match="does not suit flash1, which takes 16 to 256"):
        flash1(q, k, v, causal=True, scale=1.0)
