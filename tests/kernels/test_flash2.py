"""flash2: its Triton kernels (interpreted where there is no GPU), its PyTorch definition, and their operator."""

import math
import os
import sys

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import library
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.common import checks, dropout
from kernels.common.documents import document_bounds
from kernels.common.launching import triton_version
from kernels.flash2 import block_lists as blocks
from kernels.flash2 import definition, flash2, flash2_packed, launch, op
from kernels.flash2.options import Options
from kernels.flash2.tiles import SPECIALISED, specialised_settings, tiles_for
from kernels.naive.definition import standard_attention
from tests.kernels.accuracy import Case, assert_as_accurate, draw, outcome

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Where there is a GPU Triton compiles, and the CPU has the definition alone.
KERNEL_DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
KERNEL_CASES = [
    Case(seq_q=1, seq_k=1),
    Case(batch=1, seq_q=63, seq_k=63, head_dim=16, dtype=F16),
    Case(head_dim=40, dtype=BF16),
    Case(batch=1, head_dim=64, causal=False),
    Case(batch=1, head_dim=80, heads=4, kv_heads=2, dtype=BF16),
    Case(batch=1, head_dim=96, causal=False, dtype=BF16),
    Case(batch=1, seq_q=65, seq_k=65, head_dim=128, heads=1, kv_heads=1),
    Case(batch=1, seq_q=70, seq_k=70, head_dim=256, heads=1, kv_heads=1, dtype=BF16),
    Case(batch=1, seq_q=63, seq_k=140, dtype=BF16),
    Case(batch=1, seq_q=140, seq_k=63, dtype=BF16),
    Case(batch=1, seq_q=63, seq_k=140, causal=False),
    Case(batch=1, seq_q=1025, seq_k=1025, heads=1, kv_heads=1, dtype=BF16),
]


def kernels(case: Case, inputs: tuple, numbers: torch.Tensor | None = None, dropout_p: float = 0.0) -> tuple:
    """Output and gradients by the Triton kernels, whatever the device."""
    options = Options(numbers, causal=case.causal, scale=case.head_dim**-0.5, dropout_p=dropout_p)
    return both_passes(launch, inputs, options)


def both_passes(implementation, inputs: tuple, options: Options) -> tuple:
    """out, dq, dk and dv by the kernels (launch) or by their definition."""
    q, k, v, dout = inputs
    out, logsumexp = implementation.forward(q, k, v, *options)
    return out, *implementation.backward(dout, q, k, v, out, logsumexp, None, True, *options)


@pytest.mark.parametrize("case", KERNEL_CASES, ids=str)
def test_kernels_are_as_accurate_as_math_attention(case):
    inputs = draw(case, KERNEL_DEVICE)
    assert_as_accurate(case, kernels(case, inputs), inputs)


SIZES = st.builds(
    Case,
    batch=st.integers(1, 2),
    seq_q=st.integers(1, 150),
    seq_k=st.integers(1, 150),
    heads=st.sampled_from([2, 4]),
    kv_heads=st.sampled_from([1, 2]),
    head_dim=st.integers(16, 72),
    causal=st.booleans(),
    dtype=st.just(F32),
)


@settings(settings.get_profile("kernels"), max_examples=6)
@given(case=SIZES, dropout_p=st.sampled_from([0.0, 0.25]))
def test_kernels_and_definition_agree_at_any_size(case, dropout_p):
    """Dropout included, so both draw the same random bits in both passes."""
    q, k, v, dout = draw(case, KERNEL_DEVICE)
    numbers = dropout.draw(case.batch, case.heads, case.seq_q, case.seq_k, q.device)
    options = Options(numbers, causal=case.causal, scale=case.head_dim**-0.5, dropout_p=dropout_p)
    expected = both_passes(definition, (q, k, v, dout), options)
    for got, want in zip(kernels(case, (q, k, v, dout), numbers, dropout_p), expected, strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-4)


def test_kernels_read_views_of_the_packed_projection_where_they_lie():
    """q, k and v as slices of one (B, T, 3, H, D) tensor, and a dout whose batch is expanded."""
    case = Case(seq_q=70, seq_k=70)
    packed = torch.randn(2, 70, 3, 2, 64, device=KERNEL_DEVICE)
    q, k, v = packed.unbind(2)
    dout = torch.randn(1, 70, 2, 64, device=KERNEL_DEVICE).expand(2, -1, -1, -1)
    assert_as_accurate(case, kernels(case, (q, k, v, dout)), (q, k, v, dout))
    whole = kernels(case, tuple(x.contiguous() for x in (q, k, v, dout)))
    for view, copy in zip(kernels(case, (q, k, v, dout)), whole, strict=True):
        assert torch.equal(view, copy)


@pytest.mark.parametrize("implementation", [definition, launch], ids=["definition", "kernels"])
def test_the_packed_gradient_is_that_of_its_parts(implementation):
    qkv, dout = torch.randn(2, 70, 3, 2, 40, device=KERNEL_DEVICE), torch.randn(2, 70, 2, 40, device=KERNEL_DEVICE)
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


def test_the_packed_operator_is_flash2_of_its_parts():
    qkv = torch.randn(1, 9, 3, 2, 16, dtype=torch.float64, requires_grad=True)
    assert torch.equal(flash2_packed(qkv, causal=True), flash2(*qkv.unbind(2), causal=True))
    assert torch.autograd.gradcheck(lambda x: flash2_packed(x, causal=True), qkv)
    with pytest.raises(ValueError, match="flash2_packed takes qkv"):
        flash2_packed(qkv.squeeze(0))


def test_a_bias_of_the_projection_has_its_gradient_from_flash2():
    qkv = torch.randn(2, 9, 3, 2, 16, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(96, dtype=torch.float64, requires_grad=True)

    def project(qkv, bias):
        """qkv with the bias, which has no gradient of there."""
        return qkv + bias.detach().view(3, 2, 16)

    expected = torch.autograd.grad(flash2(*project(qkv, bias).unbind(2)).sin().sum(), qkv)
    found = torch.autograd.grad(flash2_packed(project(qkv, bias), bias=bias).sin().sum(), (qkv, bias))
    torch.testing.assert_close(found, (*expected, expected[0].sum((0, 1)).flatten()))
    frozen = flash2_packed(project(qkv, bias), bias=bias.detach())
    torch.testing.assert_close(torch.autograd.grad(frozen.sin().sum(), qkv), expected)
    with pytest.raises(ValueError, match=r"the bias of qkv \(2, 9, 3, 2, 16\) is \(96,\), not \(3, 32\)"):
        flash2_packed(qkv, bias=bias.view(3, 32))


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_sum_to_what_hoppers_kernels_take_for_their_sums(causal):
    """Over the tokens: those of keys to zero, those of values to the output's."""
    qkv, dout = torch.randn(2, 9, 3, 2, 16, dtype=torch.float64), torch.randn(2, 9, 2, 16, dtype=torch.float64)
    qkv.requires_grad_()
    (gradient,) = torch.autograd.grad(flash2_packed(qkv, causal=causal), qkv, dout)
    _, of_keys, of_values = gradient.sum((0, 1))
    torch.testing.assert_close(of_keys, torch.zeros_like(of_keys))
    torch.testing.assert_close(of_values, dout.sum((0, 1)))


def written_out(case: Case, inputs: tuple, visible: torch.Tensor, dlogsumexp: torch.Tensor) -> tuple:
    """out, logsumexp and the gradients of q, k and v by autograd in fp64, `visible` (batch, seq_q, seq_k) being True
    where a query sees a key; a query that sees none gives zeros and -inf, and has no gradient."""
    q, k, v, dout = (x.double() for x in inputs)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    group = case.heads // case.kv_heads
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) * case.head_dim**-0.5
    scores = scores.masked_fill(~visible[:, None], -1e30)
    logsumexp, some = scores.logsumexp(-1), visible.any(-1)[:, None]
    p = scores.softmax(-1) * some[..., None]
    out = torch.einsum("bhij,bjhd->bihd", p, v.repeat_interleave(group, 2))
    total = (out * dout).sum() + (logsumexp * dlogsumexp.double() * some).sum()
    return out.detach(), logsumexp.detach().masked_fill(~some, float("-inf")), *torch.autograd.grad(total, (q, k, v))


@st.composite
def masks(draw) -> tuple[Case, int | None, list[int] | None]:
    """A case with a window, with documents, or with both: lengths of documents in the batch's sequences end to end."""
    documents = draw(st.booleans())
    case = draw(SIZES)._replace(head_dim=16)
    if documents:
        case = case._replace(seq_k=case.seq_q)
    window = draw(st.integers(1, 160) if case.causal and not documents else st.none() | st.integers(1, 160))
    cuts = []
    if documents:
        total = case.batch * case.seq_q
        cuts = [0, *sorted(draw(st.lists(st.integers(0, total), max_size=5))), total]
    return case, window if case.causal else None, cuts


def visible_keys(case: Case, window: int | None, cuts: list[int]) -> torch.Tensor:
    """(batch, seq_q, seq_k), pair by pair from the words of flash2's docstring."""
    visible = torch.ones(case.batch, case.seq_q, case.seq_k, dtype=torch.bool)
    own = torch.arange(case.seq_q)[:, None] + case.seq_k - case.seq_q
    j = torch.arange(case.seq_k)
    if case.causal:
        visible &= j <= own
    if window:
        visible &= j > own - window
    if cuts:
        token = torch.arange(case.batch * case.seq_q).view(case.batch, case.seq_q)
        document = (torch.tensor(cuts)[:, None, None] <= token).sum(0)
        visible &= document[:, :, None] == document[:, None, :]
    return visible


@pytest.mark.parametrize("implementation", [definition, launch], ids=["definition", "kernels"])
@settings(settings.get_profile("kernels"), max_examples=7)
@given(mask=masks())
def test_windows_documents_and_the_gradient_of_the_logsumexp(implementation, mask):
    """Together, at any size, against autograd in fp64."""
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


def with_logsumexp(
    case: Case, device: str, window: int | None = None, cuts: list[int] | None = None, deterministic: bool = False
) -> tuple[tuple, tuple]:
    """out, logsumexp and the gradients of q, k and v by both, of flash2 and of written_out."""
    inputs = draw(case, device)
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    cu_seqlens = None if cuts is None else torch.tensor(cuts, dtype=torch.int32, device=device)
    options = {"causal": case.causal, "window": window, "cu_seqlens": cu_seqlens, "deterministic": deterministic}
    out, logsumexp = flash2(q, k, v, **options, return_lse=True)
    dlogsumexp = torch.randn_like(logsumexp)
    grads = torch.autograd.grad((out, logsumexp), (q, k, v), (inputs[3], dlogsumexp))
    visible = visible_keys(case, window, cuts or []).to(device)
    return (out, logsumexp, *grads), written_out(case, inputs, visible, dlogsumexp)


def kept_pairs(pattern: torch.Tensor, length: int) -> torch.Tensor:
    """(length, length): whether the block of 128 by 128 that a query and a key are in is kept."""
    block = torch.arange(length) // 128
    return pattern[block[:, None], block]


@pytest.mark.parametrize("implementation", [definition, launch], ids=["definition", "kernels"])
@pytest.mark.parametrize(
    ("length", "rows", "causal", "document", "longest"),
    [
        (261, "100 000 011", True, None, 16),
        (270, "010 100 000", False, 130, 16),
        (200, "11 01", True, 70, 16),
        (128, "1", False, None, 16),
        (400, "1000 1100 1010 1111", True, None, 2),
        (300, "101 111 111", False, 130, 1),
    ],
)
def test_blocks_left_out_are_not_seen(monkeypatch, implementation, length, rows, causal, document, longest):
    """Rows and columns without a block among them, blocks that the causal mask hides, and lists in several pieces,
    against autograd in fp64."""
    monkeypatch.setattr(blocks, "longest_piece", lambda counts: longest)
    case = Case(1, length, length, heads=4, kv_heads=2, head_dim=16, causal=causal)
    pattern = torch.tensor([[block == "1" for block in row] for row in rows.split()])
    inputs, cuts = draw(case, KERNEL_DEVICE), [] if document is None else [0, document, length]
    kept_blocks = blocks.listed(pattern, causal, bool(cuts), length % 128 != 0).lists.to(KERNEL_DEVICE)
    documents = document_bounds(torch.tensor(cuts, device=KERNEL_DEVICE), 1, length) if cuts else None
    options = Options(None, documents, kept_blocks, causal, 0, 0.25)
    dlogsumexp = torch.randn(1, 4, length, device=KERNEL_DEVICE)
    out, logsumexp = implementation.forward(*inputs[:3], *options)
    grads = implementation.backward(inputs[3], *inputs[:3], out, logsumexp, dlogsumexp, True, *options)
    visible = visible_keys(case, None, cuts) & kept_pairs(pattern, length)
    expected = written_out(case, inputs, visible.to(KERNEL_DEVICE), dlogsumexp)
    for got, want in zip((out, logsumexp, *grads), expected, strict=True):
        torch.testing.assert_close(got, want.float(), atol=2e-5, rtol=2e-4)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.integers(0, 2**32), st.booleans(), st.booleans(), st.integers(1, 5))
def test_divided_lists_hold_what_whole_ones_do(n, seed, causal, documents, longest):
    """Each block of keys has its list, in its order, in rows one after the other, none of them too long; divided lists
    come first, and otherwise longer ones; queries' lists are never divided."""
    pattern = torch.rand(n, n, generator=torch.Generator().manual_seed(seed)) < 0.7
    rows = {}
    with pytest.MonkeyPatch.context() as patch:
        for length in (n, longest):
            patch.setattr(blocks, "longest_piece", lambda counts, length=length: length)
            rows[length] = blocks.listed(pattern, causal, documents, False).lists.tolist()
    whole, divided = rows[n], rows[longest]
    assert divided[:n] == whole[:n]
    lists = {block: (partial, row[:count]) for block, _, partial, count, *row in whole[n:]}
    order = []
    for block, pieces, partial, count, *row in divided[n:]:
        assert partial <= count <= longest
        if pieces:
            found, of_block, left = (0, []), block, pieces
            order.append((pieces > 1, count))
        assert block == of_block and left > 0
        left -= 1
        found = found[0] + partial, found[1] + row[:count]
        if not left:
            assert found == lists.pop(block)
    assert not lists and order == sorted(order, reverse=True)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("length", [5000, 8192])
def test_tuned_tiles_sum_the_pieces_of_long_lists(head_dim, length):
    """The butterfly's first block of keys, which all queries see; and the same bits each time."""
    case = Case(1, length, length, heads=4, kv_heads=2, head_dim=head_dim, dtype=BF16)
    pattern = blocks.butterfly(-(-length // 128))
    kept = blocks.listed(pattern, causal=True, documents=False, ragged=length % 128 != 0).to("cuda")
    assert kept.lists[len(pattern), 1] > 1
    inputs = draw(case, "cuda")
    got = outcome(lambda q, k, v: flash2(q, k, v, causal=True, blocks=kept), *inputs)
    again = outcome(lambda q, k, v: flash2(q, k, v, causal=True, blocks=kept), *inputs)
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))
    visible = (visible_keys(case, None, []) & kept_pairs(pattern, length)).to("cuda")
    expected = written_out(case, inputs, visible, torch.zeros(1, 4, length, device="cuda"))
    for x, want in zip(got, (expected[0], *expected[2:]), strict=True):
        assert (x.double() - want).norm() < 1e-2 * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_tuned_tiles_mask_windows_and_documents(head_dim, deterministic):
    """In bf16, as trained with; a document of one token, and one that runs into the next sequence."""
    case = Case(seq_q=700, seq_k=700, heads=4, kv_heads=2, head_dim=head_dim, dtype=BF16)
    cuts = [0, 1, 300, 900, 1400]
    for window, documents in ((128, None), (None, cuts), (50, cuts)):
        for got, want in zip(*with_logsumexp(case, "cuda", window, documents, deterministic), strict=True):
            assert (got.double() - want).norm() < 1e-2 * want.norm()


def assert_launches_attention(case: Case, device: str, dropout_p: float, deterministic: bool, **tiles) -> None:
    """Both passes against fp64's, by the table's tiles or, of a pass that is named, by those given."""
    q, k, v, dout = inputs = draw(case, device)
    numbers = dropout.draw(case.batch, case.heads, case.seq_q, case.seq_k, q.device) if dropout_p else None
    options = Options(numbers, causal=case.causal, scale=case.head_dim**-0.5, dropout_p=dropout_p)
    out, logsumexp = launch.forward(q, k, v, *options, tiles=tiles.get("forward"))
    arguments = dout, q, k, v, out, logsumexp, None, deterministic, *options
    grads = launch.backward(*arguments, tiles=tiles.get("backward"))
    expected = both_passes(definition, tuple(x.double() for x in inputs), options)
    for got, want in zip((out, *grads), expected, strict=True):
        assert (got.double() - want).norm() < 1e-2 * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, BF16), (80, BF16), (96, BF16), (128, BF16), (128, F16)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_tuned_tiles_are_attention(head_dim, dtype, deterministic, dropout_p):
    """With grouped heads, under both masks, with fewer queries than keys and more; heads of 128 differ in fp16."""
    for causal, seq_q, seq_k in ((True, 700, 700), (True, 200, 330), (True, 330, 200), (False, 257, 140)):
        case = Case(seq_q=seq_q, seq_k=seq_k, heads=4, kv_heads=2, head_dim=head_dim, dtype=dtype, causal=causal)
        assert_launches_attention(case, "cuda", dropout_p, deterministic)


@pytest.mark.gpu
@pytest.mark.parametrize(("pass_", "head_dim", "mask", "config"), specialised_settings(), ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_setting_of_hopper_is_attention(pass_, head_dim, mask, config, dtype):
    """Those for long sequences too, which few other tests are long enough for, and at lengths that no tile divides."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("of Hopper alone")
    causal, dropout_p = mask != "full", 0.2 if mask == "dropout" else 0.0
    for seq_q, seq_k in ((700, 700), (200, 330), (330, 200)) if causal else ((257, 140), (700, 700)):
        case = Case(seq_q=seq_q, seq_k=seq_k, heads=4, kv_heads=2, head_dim=head_dim, dtype=dtype, causal=causal)
        for deterministic in (False, True) if pass_ == "backward" else (False,):
            assert_launches_attention(case, "cuda", dropout_p, deterministic, **{pass_: SPECIALISED[pass_](*config)})


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_the_logsumexp_and_its_gradient_are_fp64s_by_every_kernel_of_the_gpu(head_dim, causal):
    """Of what Hopper's compute no other test saw the one, nor the sign of the other."""
    case = Case(1, seq_q=1500, seq_k=1500, heads=4, kv_heads=2, head_dim=head_dim, causal=causal, dtype=BF16)
    found, expected = with_logsumexp(case, "cuda")
    assert (found[1].double() - expected[1]).abs().max() < 1e-4
    for got, want in zip(found, expected, strict=True):
        assert (got.double() - want).norm() < 1e-2 * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_over_many_tiles_are_attentions(head_dim, causal):
    """Programs walk over more tiles than their rings have slots, of a length that nothing divides."""
    case = Case(2, seq_q=2001, seq_k=2001, heads=16, kv_heads=8, head_dim=head_dim, causal=causal, dtype=BF16)
    inputs = draw(case, "cuda")
    assert_as_accurate(case, outcome(lambda q, k, v: flash2(q, k, v, causal=causal), *inputs), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_on_hopper_a_biass_gradient_is_summed_by_the_kernels(head_dim, causal):
    """As near to fp64's as the sum of the rounded gradient is. A key's is zero, which such a sum never is."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("of Hopper alone")
    qkv = torch.randn(2, 1001, 3, 4, head_dim, device="cuda", dtype=BF16)
    qkv.requires_grad_()
    bias = torch.zeros(12 * head_dim, device="cuda", requires_grad=True)
    out = flash2_packed(qkv, bias=bias, causal=causal)
    dout = torch.randn_like(out)
    dqkv, found = torch.autograd.grad(out, (qkv, bias), dout)
    exact_qkv = qkv.detach().double().requires_grad_()
    q, k, v = exact_qkv.transpose(1, 3).unbind(2)
    exact_out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
    (exact,) = torch.autograd.grad(exact_out, exact_qkv, dout.double())
    exact = exact.sum((0, 1))
    found, summed = found.view_as(exact), dqkv.double().sum((0, 1))
    assert found.dtype == torch.float32 and found[1].eq(0).all() and exact[1].abs().max() < 1e-9
    for part in (0, 2):
        assert (found[part] - exact[part]).norm() <= 1.1 * (summed[part] - exact[part]).norm()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"deterministic": True}, {"dropout_p": 0.1}, {"return_lse": True}], ids=str)
def test_where_the_kernels_cannot_sum_it_a_biass_gradient_is_the_sum_all_the_same(options):
    qkv = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=BF16, requires_grad=True)
    bias = torch.zeros(768, device="cuda", requires_grad=True)
    results = flash2_packed(qkv, bias=bias, causal=True, **options)
    results = results if isinstance(results, tuple) else (results,)
    dqkv, found = torch.autograd.grad(results, (qkv, bias), [torch.randn_like(x) for x in results])
    torch.testing.assert_close(found, dqkv.float().sum((0, 1)).flatten(), rtol=1e-4, atol=1e-3)


def test_return_lse_and_masks_through_the_operator():
    """gradcheck of both outputs, apart and packed, and of a loss that uses the logsumexp alone."""
    qkv = torch.randn(1, 9, 3, 2, 16, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, 4, 9])
    options = {"causal": True, "window": 3, "cu_seqlens": cu_seqlens, "return_lse": True}
    assert torch.autograd.gradcheck(lambda x: flash2_packed(x, **options), qkv)
    assert torch.autograd.gradcheck(lambda x: flash2(*x.unbind(2), **options), qkv)
    assert torch.autograd.gradcheck(lambda x: flash2_packed(x, **options)[1], qkv)


@pytest.mark.parametrize("implementation", [definition, launch], ids=["definition", "kernels"])
def test_logsumexp_is_natural_and_minus_infinity_without_keys(implementation):
    case = Case(seq_q=8, seq_k=5, heads=2, kv_heads=2, head_dim=16)
    q, k, v, _ = draw(case, KERNEL_DEVICE)
    out, logsumexp = implementation.forward(q, k, v, *Options(causal=True, scale=0.25))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * 0.25
    mask = torch.ones(8, 5, dtype=torch.bool, device=q.device).tril(-3)
    torch.testing.assert_close(logsumexp, scores.masked_fill(~mask, float("-inf")).logsumexp(-1))
    assert out[:, :3].eq(0).all()


def test_the_kernels_drop_what_their_definition_says():
    """With v the identity the output is P itself, so its zeros are the dropped probabilities."""
    n = 48
    q, k = torch.randn(2, 2, n, 2, n, device=KERNEL_DEVICE)
    v = torch.eye(n, device=KERNEL_DEVICE)[None, :, None, :].expand(2, n, 2, n)
    for dropout_p in (0.1, 0.7):
        numbers = dropout.draw(2, 2, n, n, q.device)
        out, _ = launch.forward(q, k, v, *Options(numbers, scale=0.1, dropout_p=dropout_p))
        keep = dropout.keep_mask(numbers, n, range(n), range(n), dropout_p)
        assert torch.equal(out.permute(0, 2, 1, 3) != 0, keep)
        assert abs(keep.float().mean().item() - (1 - dropout_p)) < 0.02


@pytest.mark.parametrize("dropout_p", [0.03, 0.1, 0.5])
def test_dropout_is_as_random_as_a_coin(dropout_p):
    """Standardised decisions: their mean, the means of rows and columns, pairs, four at the corners of a rectangle, and
    the spectrum of their matrix are those of independent draws. (x ^ y in place of x y passes all but the last two.)"""
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
    assert torch.linalg.matrix_norm(z, 2).item() / n**0.5 == pytest.approx(2, abs=0.1)


def test_dropout_has_the_gradient_of_the_mask_it_drew():
    case = Case(batch=1, seq_q=150, seq_k=150, dtype=torch.float64)
    inputs = draw(case, "cpu")
    numbers = dropout.draw(1, 2, 150, 150, "cpu")
    keep = dropout.keep_mask(numbers, 150, range(150), range(150), 0.3)
    got = outcome(lambda q, k, v: flash2(q, k, v, causal=True, scale=0.1, dropout_p=0.3, numbers=numbers), *inputs)
    want = outcome(
        lambda q, k, v: standard_attention(q, k, v, causal=True, scale=0.1, dropout_p=0.3, keep=keep), *inputs
    )
    torch.testing.assert_close(got, want)


def test_gradcheck_of_the_definition():
    case = Case(batch=1, seq_q=5, seq_k=7, heads=2, kv_heads=1, head_dim=16, dtype=torch.float64)
    q, k, v, _ = draw(case, "cpu")
    inputs = [x.requires_grad_() for x in (q, k, v)]
    numbers = dropout.draw(1, 2, 5, 7, "cpu")
    assert torch.autograd.gradcheck(lambda *x: flash2(*x, causal=True, dropout_p=0.3, numbers=numbers), inputs)


def test_gradcheck_across_tiles(monkeypatch):
    monkeypatch.setattr(definition, "TILE", 4)
    case = Case(batch=1, seq_q=9, seq_k=7, heads=1, kv_heads=1, head_dim=16, dtype=torch.float64)
    q, k, v, _ = draw(case, "cpu")
    assert torch.autograd.gradcheck(lambda *x: flash2(*x, causal=True), [x.requires_grad_() for x in (q, k, v)])


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_compiles_without_graph_breaks(device):
    case = Case(dtype=F32 if device == "cpu" else BF16)
    inputs = draw(case, device)

    def block(q, k, v):
        return torch.nn.functional.gelu(flash2(q * 2, k, v, causal=True))

    backend = "aot_eager" if device == "cpu" else "inductor"
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    # the compiled region rounds q * 2 and gelu as eager does, but in another order
    torch.testing.assert_close(outcome(compiled, *inputs), outcome(block, *inputs), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    q, k, v, dout = draw(Case(seq_q=40, seq_k=40, dtype=F16), device)
    numbers = dropout.draw(2, 2, 40, 40, q.device)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    options = Options(numbers, causal=True, scale=0.125, dropout_p=0.1)
    library.opcheck(torch.ops.flash2.forward.default, (q, k, v, *options), test_utils=checks)
    out, logsumexp = torch.ops.flash2.forward(q, k, v, *options)
    arguments = dout, q, k, v, out, logsumexp, None, True, *options
    library.opcheck(torch.ops.flash2.backward.default, arguments, test_utils=checks)
    arguments = dout, torch.stack([q, k, v], 2), *arguments[4:]
    for with_sums in (True, False):
        packed = torch.ops.flash2.backward_packed.default
        library.opcheck(packed, (*arguments, with_sums), test_utils=checks)


@pytest.mark.parametrize("device", DEVICES)
def test_modes_and_subclasses_see_the_operators(device):
    """Which eager calls pass by: a mode must not miss them, and a tensor without data must not reach the kernels."""
    seen = []

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    q, k, v, dout = draw(Case(dtype=F32), device)
    with Listener():
        outcome(lambda *x: flash2(*x, causal=True), q, k, v, dout)
    assert {"flash2.forward.default", "flash2.backward.default"} <= set(seen)
    fake = FakeTensorMode().from_tensor(q)
    assert isinstance(flash2(fake, fake, fake), FakeTensor)


def small(**changes):
    q, k, v, dout = draw(Case(batch=1, seq_q=20, seq_k=20, head_dim=16)._replace(**changes), "cpu")
    return q.requires_grad_(), k, v, dout


def test_gradients_can_be_batched():
    q, k, v, dout = small()
    out = flash2(q, k, v, causal=True)
    batched = torch.autograd.grad(out, q, torch.stack([dout, 2 * dout]), is_grads_batched=True, retain_graph=True)[0]
    once = torch.autograd.grad(out, q, dout)[0]
    torch.testing.assert_close(batched, torch.stack([once, 2 * once]))


def test_a_second_derivative_is_refused():
    """The kernels have none, and a graph through them would be silently wrong."""
    q, k, v, dout = small()
    (dq,) = torch.autograd.grad(flash2(q, k, v, causal=True), q, dout.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.square().sum().backward()


def test_random_numbers_changed_before_the_backward_pass_are_noticed():
    q, k, v, _ = small()
    numbers = dropout.draw(1, 2, 20, 20, q.device)
    out = flash2(q, k, v, dropout_p=0.5, numbers=numbers)
    numbers.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@triton.jit
def write_parts(x, y, parts, SPLIT: tl.constexpr, M: tl.constexpr):
    rows = tl.arange(0, M)
    p_parts = parts + rows[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(p_parts, SPLIT(tl.load(x + rows), tl.load(y + rows)))


@pytest.mark.skipif(triton_version() < (3, 6), reason="the specialised kernels are for Triton 3.6 and later")
def test_a_statistic_is_the_sum_of_its_parts():
    from kernels.flash2 import hopper_backward

    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn((2, 128), generator=generator)
    x, y = numbers * 2.0 ** torch.randint(-60, 60, numbers.shape, generator=generator)
    parts = torch.full((128, 16), math.nan, dtype=BF16, device=KERNEL_DEVICE)
    write_parts[(1,)](x.to(KERNEL_DEVICE), y.to(KERNEL_DEVICE), parts, hopper_backward._parts, 128)
    parts = parts.cpu().double()
    for statistic, first in ((x, 0), (y, 3)):
        torch.testing.assert_close(parts[:, first : first + 3].sum(1), statistic.double(), rtol=2.0**-23, atol=0.0)
    assert not parts[:, 6:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_programs_that_walk_over_many_tiles_end(head_dim, causal):
    """At every length of the table: more tiles than multiprocessors, whose consumers own unequal numbers of blocks."""
    for seq_q, batch in ((512, 40), (2048, 10), (6000, 20)):
        for more in (0, 64, -64, 1):
            case = Case(batch, seq_q, seq_q + more, heads=2, kv_heads=2, head_dim=head_dim, causal=causal, dtype=BF16)
            q, k, v, _ = draw(case, "cuda")
            options = Options(causal=causal, scale=head_dim**-0.5)
            out, logsumexp = launch.forward(q, k, v, *options)
            plain = tiles_for("sm_80", head_dim, BF16, causal, "long")  # no settings of Hopper
            plain_out, plain_logsumexp = launch.forward(q, k, v, *options, tiles=plain)
            torch.testing.assert_close(logsumexp, plain_logsumexp, atol=1e-3, rtol=0)
            assert ((out - plain_out).norm(dim=-1) <= 5e-2 * plain_out.norm(dim=-1)).all()
            last = slice(-1, None), slice(-70, None)  # rows aligned at the bottom right, whatever the mask
            expected, _ = definition.forward(q[last].double(), k[-1:].double(), v[-1:].double(), *options)
            assert (out[last].double() - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_cuda_graphs_replay_both_passes(head_dim):
    """Of Hopper's kernels too, which all pass from 1,025 tokens on; deterministic, so as to compare bits."""
    case = Case(1, seq_q=1200, seq_k=1200, head_dim=head_dim, dtype=BF16)
    inputs = draw(case, "cuda")
    attend = lambda q, k, v: flash2(q, k, v, causal=True, deterministic=True)  # noqa: E731
    expected = outcome(attend, *inputs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = outcome(attend, *inputs)
    for x in found:
        x.zero_()
    graph.replay()
    assert all(map(torch.equal, found, expected))


@pytest.mark.gpu
def test_pointers_survive_more_than_two_to_the_31_elements():
    """Rows 2^31 elements apart used to wrap 32-bit offsets: a packed tensor of 9 GiB, checked at its far end."""
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 8}, "head sizes from 16 to 256"),
        ({"kv_heads": 3}, "heads a multiple of kv_heads"),
        ({"dtype": torch.int64}, "takes float32, float16 or bfloat16"),
        ({"seq_k": 0}, "at least one query and one key"),
    ],
    ids=["small_head", "uneven_groups", "integers", "no_keys"],
)
def test_refuses_what_it_cannot_do(change, message):
    q, k, v, _ = draw(Case()._replace(**change), "cpu")
    with pytest.raises(ValueError, match=message):
        flash2(q, k, v)


def test_rows_too_far_apart_for_a_tiles_offsets_are_copied():
    x = torch.zeros(2**24 + 16).as_strided((1, 2, 1, 16), (0, 2**24, 16, 1))
    x[0, 1] = 1
    copy = checks.readable(x)
    assert copy.stride(1) == 16 and torch.equal(copy, x)
    assert checks.readable(x[:, :1]).data_ptr() == x.data_ptr(), "of one row the stride says nothing"


@pytest.mark.parametrize("window", [140, 2**31 - 1, sys.maxsize])
def test_a_window_as_long_as_the_keys_is_none(window):
    """Positions would be beyond what the kernels' integers hold, and the kernels without a window are faster."""
    q, k, v, _ = draw(Case(seq_q=63, seq_k=140), "cpu")
    assert op._prepare(q, k, v, True, None, 0.0, None, window, None, None).window == 0
    assert op._prepare(q, k, v, True, None, 0.0, None, 139, None, None).window == 139


@pytest.mark.parametrize("change", [{"causal": False}, {"cu_seqlens": torch.tensor([0, 50, 300])}, {}])
def test_blocks_listed_for_another_call_are_refused(change):
    """With them keys would be seen that are hidden, or that are not there."""
    q, k, v, _ = draw(Case(batch=1, seq_q=300, seq_k=300), "cpu")
    kept = blocks.listed(blocks.butterfly(3), causal=True, documents=False, ragged=bool(change))
    flash2(q, k, v, causal=True, blocks=kept._replace(ragged=True))
    with pytest.raises(ValueError, match=r"blocks were listed with \w+=\w+, and this call has"):
        flash2(q, k, v, **{"causal": True, "blocks": kept} | change)
    with pytest.raises(ValueError, match=r"what kernels.flash2.blocks.listed makes of a pattern, not a Tensor"):
        flash2(q, k, v, causal=True, blocks=kept.lists)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": -1.0}, "positive, finite scale"),
        ({"dropout_p": 1.0}, r"in \[0, 1\)"),
        ({"window": 8}, "causal=True and an integer of 1 or more"),
        ({"window": 0, "causal": True}, "not 0"),
        ({"window": 2.5, "causal": True}, "not 2.5"),
        ({"scale": math.inf}, "positive, finite scale"),
        ({"cu_seqlens": torch.tensor([0.0, 111.0])}, "cumulative lengths"),
        ({"dropout_p": 0.1, "numbers": torch.ones(1, 1, 16, dtype=torch.int32)}, "int32, contiguous, on cpu, not"),
    ],
)
def test_refuses_options_out_of_range(options, message):
    q, k, v, _ = draw(Case(), "cpu")
    with pytest.raises(ValueError, match=message):
        flash2(q, k, v, **options)


@pytest.mark.skipif(triton_version() < (3, 6), reason="the kernel is written for Triton 3.6 or later")
@settings(deadline=None)
@given(
    heads=st.integers(64, 400),
    length=st.integers(1024, 16384),
    config=st.sampled_from([(128, 2, 2), (64, 4, 2), (128, 3, 3)]),
    programs=st.sampled_from([114, 132]),
)
def test_heads_are_dealt_out_in_sections_that_the_cache_holds_and_programs_share_evenly(
    heads, length, config, programs
):
    """No program has much more to do than the mean, or one of the longest tiles more.

    The cache holds a section, but where all that it holds are clearly less even.
    """
    from kernels.flash2 import hopper_forward
    from kernels.flash2.tiles import SpecialisedForward

    config, bytes_of_head = SpecialisedForward(*config), 512 * length
    shape = heads, length, length
    section = hopper_forward._section(shape, bytes_of_head, programs, config)
    longest = hopper_forward._longest(section, *shape, programs, config)
    held = range(1, max(hopper_forward.CACHED // bytes_of_head, 1) + 1)
    if section not in held:
        others = (hopper_forward._longest(other, *shape, programs, config) for other in held)
        assert min(others) > hopper_forward.BEYOND * longest
    each = [
        min(-(-(i + config.queries) // config.n), -(-length // config.n)) + 1 for i in range(0, length, config.queries)
    ]
    mean = heads * sum(each) / programs
    assert mean <= longest <= max(1.06 * mean, mean + each[-1])
