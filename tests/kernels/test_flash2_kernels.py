"""The Triton kernels of flash2 and their PyTorch definition. Without a GPU, Triton interprets the kernels."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels.common import dropout
from kernels.common.checks import document_bounds
from kernels.flash2 import definition, dispatch, flash2
from kernels.flash2.options import Options
from tests.kernels.accuracy import Case, assert_as_accurate, draw, outcome
from tests.kernels.flash2_cases import (
    BF16,
    F16,
    KERNEL_DEVICE,
    SIZES,
    both_passes,
    kernels,
    visible_keys,
    with_logsumexp,
    written_out,
)

KERNEL_CASES = [
    Case(seq_q=1, seq_k=1),
    Case(batch=1, seq_q=63, seq_k=63, head_dim=16, dtype=F16),
    Case(head_dim=40, dtype=BF16),
    Case(batch=1, seq_q=70, seq_k=70, head_dim=64, causal=False),
    Case(batch=1, head_dim=80, heads=4, kv_heads=2, dtype=BF16),
    Case(batch=1, head_dim=96, causal=False, dtype=BF16),
    Case(batch=1, seq_q=65, seq_k=65, head_dim=128, heads=1, kv_heads=1),
    Case(batch=1, seq_q=70, seq_k=70, head_dim=256, heads=1, kv_heads=1, dtype=BF16),
    Case(batch=1, seq_q=63, seq_k=140, dtype=BF16),
    Case(batch=1, seq_q=140, seq_k=63, dtype=BF16),
    Case(batch=1, seq_q=63, seq_k=140, causal=False),
    Case(batch=1, seq_q=257, seq_k=257, heads=1, kv_heads=1, dtype=BF16),
]


@pytest.mark.parametrize("case", KERNEL_CASES, ids=str)
def test_kernels_are_as_accurate_as_math_attention(case):
    inputs = draw(case, KERNEL_DEVICE)
    assert_as_accurate(case, kernels(case, inputs), inputs)


@settings(settings.get_profile("kernels"), max_examples=6)
@given(case=SIZES, dropout_p=st.sampled_from([0.0, 0.25]))
def test_kernels_and_definition_agree_at_any_size(case, dropout_p):
    """This includes dropout, so both use the same random bits in both passes."""
    q, k, v, dout = draw(case, KERNEL_DEVICE)
    numbers = dropout.draw(case.batch, case.heads, case.seq_q, case.seq_k, q.device)
    options = Options(numbers, causal=case.causal, scale=case.head_dim**-0.5, dropout_p=dropout_p)
    expected = both_passes(definition, (q, k, v, dout), options)
    for got, want in zip(kernels(case, (q, k, v, dout), numbers, dropout_p), expected, strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-4)


def test_kernels_read_views_of_the_packed_projection_where_they_lie():
    """q, k and v are slices of one (B, T, 3, H, D) tensor, and dout's batch is expanded."""
    case = Case(seq_q=40, seq_k=40)
    packed = torch.randn(2, 40, 3, 2, 64, device=KERNEL_DEVICE)
    inputs = *packed.unbind(2), torch.randn(1, 40, 2, 64, device=KERNEL_DEVICE).expand(2, -1, -1, -1)
    found = kernels(case, inputs)
    assert_as_accurate(case, found, inputs)
    for view, copy in zip(found, kernels(case, tuple(x.contiguous() for x in inputs)), strict=True):
        assert torch.equal(view, copy)


@pytest.mark.parametrize("implementation", [definition, dispatch], ids=["definition", "kernels"])
def test_the_packed_gradient_is_that_of_its_parts(implementation):
    qkv, dout = torch.randn(2, 40, 3, 2, 40, device=KERNEL_DEVICE), torch.randn(2, 40, 2, 40, device=KERNEL_DEVICE)
    q, k, v = qkv.unbind(2)
    options = Options(causal=True, scale=0.2)
    out, logsumexp = implementation.forward(q, k, v, *options)
    apart = implementation.backward(dout, q, k, v, out, logsumexp, None, True, *options)
    args = dout, qkv, out, logsumexp, None, True, *options
    packed, none = implementation.backward_packed(*args, False)
    assert torch.equal(packed, torch.stack(apart, dim=2)) and none.numel() == 0
    same, sums = implementation.backward_packed(*args, True)
    assert torch.equal(same, packed) and sums.dtype == torch.float32
    torch.testing.assert_close(sums, packed.sum((0, 1)), rtol=1e-5, atol=1e-5)


@st.composite
def masks(draw) -> tuple[Case, int | None, list[int] | None]:
    """Draw a case with a window, documents or both; documents as cumulative lengths over the whole batch."""
    documents = draw(st.booleans())
    case = draw(SIZES)._replace(head_dim=16)
    if documents:
        case = case._replace(seq_k=case.seq_q)
    window = draw(st.integers(1, 110) if case.causal and not documents else st.none() | st.integers(1, 110))
    cuts = []
    if documents:
        total = case.batch * case.seq_q
        cuts = [0, *sorted(draw(st.lists(st.integers(0, total), max_size=5))), total]
    return case, window if case.causal else None, cuts


@pytest.mark.parametrize("implementation", [definition, dispatch], ids=["definition", "kernels"])
@settings(settings.get_profile("kernels"), max_examples=4)
@given(mask=masks())
@example(mask=(Case(1, 100, 110, kv_heads=1, head_dim=16), 45, []))
@example(mask=(Case(2, 70, 70, head_dim=16), 20, [0, 50, 90, 140]))
def test_windows_documents_and_the_gradient_of_the_logsumexp(implementation, mask):
    """Compare all of them together, at any size, with autograd in fp64."""
    case, window, cuts = mask
    inputs = draw(case, KERNEL_DEVICE)
    documents = None
    if cuts:
        documents = document_bounds(torch.tensor(cuts, dtype=torch.int32, device=KERNEL_DEVICE), case.batch, case.seq_q)
    options = Options(None, documents, None, case.causal, window or 0, case.head_dim**-0.5)
    dlogsumexp = torch.randn(case.batch, case.heads, case.seq_q, device=KERNEL_DEVICE)
    out, logsumexp = implementation.forward(*inputs[:3], *options)
    grads = implementation.backward(inputs[3], *inputs[:3], out, logsumexp, dlogsumexp, True, *options)
    expected = written_out(case, inputs, visible_keys(case, window, cuts).to(KERNEL_DEVICE), dlogsumexp)
    for got, want in zip((out, logsumexp, *grads), expected, strict=True):
        torch.testing.assert_close(got, want.float(), atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("implementation", [definition, dispatch], ids=["definition", "kernels"])
def test_logsumexp_is_natural_and_minus_infinity_without_keys(implementation):
    case = Case(seq_q=8, seq_k=5, heads=2, kv_heads=2, head_dim=16)
    q, k, v, _ = draw(case, KERNEL_DEVICE)
    out, logsumexp = implementation.forward(q, k, v, *Options(causal=True, scale=0.25))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * 0.25
    mask = torch.ones(8, 5, dtype=torch.bool, device=q.device).tril(-3)
    torch.testing.assert_close(logsumexp, scores.masked_fill(~mask, float("-inf")).logsumexp(-1))
    assert out[:, :3].eq(0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_tuned_tiles_mask_windows_and_documents(head_dim, deterministic):
    """bf16, as in training. One document has one token, and one runs into the next sequence."""
    case = Case(seq_q=700, seq_k=700, heads=4, kv_heads=2, head_dim=head_dim, dtype=BF16)
    cuts = [0, 1, 300, 900, 1400]
    for window, documents in ((128, None), (None, cuts), (50, cuts)):
        for got, want in zip(*with_logsumexp(case, "cuda", window, documents, deterministic), strict=True):
            assert (got.double() - want).norm() < 1e-2 * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_over_many_tiles_are_attentions(head_dim, causal):
    """Programs walk over more tiles than their rings have slots. No tile divides the length."""
    case = Case(2, seq_q=2001, seq_k=2001, heads=16, kv_heads=8, head_dim=head_dim, causal=causal, dtype=BF16)
    inputs = draw(case, "cuda")
    assert_as_accurate(case, outcome(lambda q, k, v: flash2(q, k, v, causal=causal), *inputs), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_cuda_graphs_replay_both_passes(head_dim, documents):
    """deterministic=True, to compare bits. Each replay must zero the counters of the additions to dQ and, with
    documents, the counter of the tiles."""
    case = Case(8, seq_q=1200, seq_k=1200, heads=12, kv_heads=12, head_dim=head_dim, dtype=BF16)
    inputs = draw(case, "cuda")
    cuts = torch.tensor([0, 500, 2000, 9600], dtype=torch.int32, device="cuda") if documents else None
    attend = lambda q, k, v: flash2(q, k, v, causal=True, cu_seqlens=cuts, deterministic=True)  # noqa: E731
    expected = outcome(attend, *inputs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = outcome(attend, *inputs)
    for _ in range(2):
        for x in found:
            x.zero_()
        graph.replay()
        assert all(map(torch.equal, found, expected))


@pytest.mark.gpu
def test_pointers_survive_more_than_two_to_the_31_elements():
    """Rows 2^31 elements apart used to wrap 32-bit offsets. Check the far end of a packed tensor of 9 GiB."""
    seq, heads = 65536, 272
    packed = torch.empty(1, seq, 3 * heads, 64, device="cuda", dtype=F16)
    assert packed.numel() > 2**31
    packed[:, :, [0, heads, 2 * heads]] = torch.randn(1, seq, 3, 64, device="cuda", dtype=F16)
    q, k, v = (packed[:, :, i * heads : i * heads + 1] for i in range(3))
    small = [x.contiguous() for x in (q, k, v)]
    dout = torch.randn_like(small[0])
    for deterministic in (True, False):
        attend = lambda q, k, v: flash2(q, k, v, causal=True, deterministic=deterministic)  # noqa: B023, E731
        for far, near in zip(outcome(attend, q, k, v, dout), outcome(attend, *small, dout), strict=True):
            assert torch.equal(far, near) if deterministic else (far - near).norm() < 1e-3 * near.norm()
