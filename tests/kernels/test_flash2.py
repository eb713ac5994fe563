"""flash2: its Triton kernels (interpreted where there is no GPU), its PyTorch definition, and their operator."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.flash2 import definition, flash2, flash2_packed, launch, philox
from kernels.standard import standard_attention
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


def kernels(case: Case, inputs: tuple, seed: torch.Tensor | None = None, dropout_p: float = 0.0) -> tuple:
    """Output and gradients by the Triton kernels, whatever the device."""
    q, k, v, dout = inputs
    options = seed, case.causal, case.head_dim**-0.5, dropout_p
    out, logsumexp = launch.forward(q, k, v, *options)
    return out, *launch.backward(dout, q, k, v, out, logsumexp, *options)


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


@settings(max_examples=12, deadline=None, derandomize=True)
@given(case=SIZES, dropout_p=st.sampled_from([0.0, 0.25]))
def test_kernels_and_definition_agree_at_any_size(case, dropout_p):
    """Dropout included, so both draw the same random bits in both passes."""
    q, k, v, dout = draw(case, KERNEL_DEVICE)
    seed = torch.tensor([2**40 + 7], device=KERNEL_DEVICE)
    options = seed, case.causal, case.head_dim**-0.5, dropout_p
    out, logsumexp = definition.forward(q, k, v, *options)
    expected = out, *definition.backward(dout, q, k, v, out, logsumexp, *options)
    for got, want in zip(kernels(case, (q, k, v, dout), seed, dropout_p), expected, strict=True):
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
    options = None, True, 0.2, 0.0
    out, logsumexp = implementation.forward(q, k, v, *options)
    apart = implementation.backward(dout, q, k, v, out, logsumexp, *options)
    packed = implementation.backward_packed(dout, qkv, out, logsumexp, *options)
    assert torch.equal(packed, torch.stack(apart, dim=2))


def test_the_packed_operator_is_flash2_of_its_parts():
    qkv = torch.randn(1, 9, 3, 2, 16, dtype=torch.float64, requires_grad=True)
    assert torch.equal(flash2_packed(qkv, causal=True), flash2(*qkv.unbind(2), causal=True))
    assert torch.autograd.gradcheck(lambda x: flash2_packed(x, causal=True), qkv)
    with pytest.raises(ValueError, match="flash2_packed takes qkv"):
        flash2_packed(qkv.squeeze(0))


@pytest.mark.parametrize("implementation", [definition, launch], ids=["definition", "kernels"])
def test_logsumexp_is_natural_and_minus_infinity_without_keys(implementation):
    case = Case(seq_q=8, seq_k=5, heads=2, kv_heads=2, head_dim=16)
    q, k, v, _ = draw(case, KERNEL_DEVICE)
    out, logsumexp = implementation.forward(q, k, v, None, True, 0.25, 0.0)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * 0.25
    mask = torch.ones(8, 5, dtype=torch.bool, device=q.device).tril(-3)
    torch.testing.assert_close(logsumexp, scores.masked_fill(~mask, float("-inf")).logsumexp(-1))
    assert out[:, :3].eq(0).all()


def test_the_kernels_drop_what_philox_says():
    """With v the identity the output is P itself, so its zeros are the dropped probabilities."""
    n = 48
    q, k = torch.randn(2, 2, n, 2, n, device=KERNEL_DEVICE)
    v = torch.eye(n, device=KERNEL_DEVICE)[None, :, None, :].expand(2, n, 2, n)
    seed = torch.tensor([123456789123456789], device=KERNEL_DEVICE)
    out, _ = launch.forward(q, k, v, seed, False, 0.1, 0.4)
    keep = philox.keep_mask(seed, 2, 2, range(n), range(n), 0.4)
    assert torch.equal(out.permute(0, 2, 1, 3) != 0, keep)
    assert abs(keep.float().mean().item() - 0.6) < 0.02


def test_philox_gives_the_published_numbers():
    """Known answers of Philox 4x32-10 in the Random123 distribution: counter and key all zeros, then all ones."""
    zero, ones = torch.tensor(0), torch.tensor(0xFFFFFFFF)
    assert philox.random_bits(torch.tensor([0]), zero, zero, zero, zero).item() == 0x6627E8D5
    assert philox.random_bits(torch.tensor([-1]), ones, ones, ones, ones).item() == 0x408F276D


def test_dropout_has_the_gradient_of_the_mask_it_drew():
    case = Case(batch=1, seq_q=150, seq_k=150, dtype=torch.float64)
    inputs = draw(case, "cpu")
    seed = torch.tensor([5])
    keep = philox.keep_mask(seed, 1, 2, range(150), range(150), 0.3)
    got = outcome(lambda q, k, v: flash2(q, k, v, causal=True, scale=0.1, dropout_p=0.3, seed=seed), *inputs)
    want = outcome(
        lambda q, k, v: standard_attention(q, k, v, causal=True, scale=0.1, dropout_p=0.3, keep=keep), *inputs
    )
    torch.testing.assert_close(got, want)


def test_gradcheck_of_the_definition():
    case = Case(batch=1, seq_q=5, seq_k=7, heads=2, kv_heads=1, head_dim=16, dtype=torch.float64)
    q, k, v, _ = draw(case, "cpu")
    inputs = [x.requires_grad_() for x in (q, k, v)]
    seed = torch.tensor([11])
    assert torch.autograd.gradcheck(lambda *x: flash2(*x, causal=True, dropout_p=0.3, seed=seed), inputs)


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
    seed = torch.tensor([3], device=device)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    options = seed, True, 0.125, 0.1
    torch.library.opcheck(torch.ops.flash2.forward.default, (q, k, v, *options), test_utils=checks)
    out, logsumexp = torch.ops.flash2.forward(q, k, v, *options)
    arguments = dout, q, k, v, out, logsumexp, *options
    torch.library.opcheck(torch.ops.flash2.backward.default, arguments, test_utils=checks)


@pytest.mark.gpu
def test_cuda_graphs_replay_it():
    case = Case(seq_q=128, seq_k=128, dtype=BF16)
    q, k, v, _ = draw(case, "cuda")
    expected = flash2(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash2(q, k, v, causal=True)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


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
    attend = lambda q, k, v: flash2(q, k, v, causal=True)  # noqa: E731
    for far, near in zip(outcome(attend, q, k, v, dout), outcome(attend, *small, dout), strict=True):
        assert torch.equal(far, near)


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


@pytest.mark.parametrize(
    ("options", "message"), [({"scale": -1.0}, "positive scale"), ({"dropout_p": 1.0}, r"in \[0, 1\)")]
)
def test_refuses_options_out_of_range(options, message):
    q, k, v, _ = draw(Case(), "cpu")
    with pytest.raises(ValueError, match=message):
        flash2(q, k, v, **options)
