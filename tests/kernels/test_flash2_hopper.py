"""The warp-specialised kernels of Hopper. Most of these tests need such a GPU."""

import math
from contextlib import nullcontext

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.common import dropout
from kernels.common.checks import document_bounds
from kernels.common.launching import triton_version
from kernels.flash2 import definition, dispatch, flash2_packed
from kernels.flash2.options import Options
from kernels.flash2.tiles import HopperForwardConfig, plain_tiles_for
from tests.kernels.accuracy import Case, draw
from tests.kernels.flash2_cases import (
    BF16,
    F16,
    KERNEL_DEVICE,
    both_passes,
    hopper_configs,
    with_logsumexp,
)


def assert_launches_attention(
    case: Case, device: str, dropout_p: float, deterministic: bool, band: str = "", **tiles
) -> None:
    """Compare both passes with fp64, if asked with a window or documents (`band`).

    `tiles` maps a pass to settings that replace the table's.
    """
    q, k, v, dout = inputs = draw(case, device)
    numbers = dropout.draw(case.batch, case.heads, case.seq_q, case.seq_k, q.device) if dropout_p else None
    options = Options(numbers, causal=case.causal, scale=case.head_dim**-0.5, dropout_p=dropout_p)
    if band == "window":
        options = options._replace(window=65)
    elif band == "documents":
        cuts = torch.tensor([0, 3, 100, 101, 450, 800, case.batch * case.seq_q], dtype=torch.int32, device=device)
        options = options._replace(documents=document_bounds(cuts, case.batch, case.seq_q))
    out, logsumexp = dispatch.forward(q, k, v, *options, tiles=tiles.get("forward"))
    arguments = dout, q, k, v, out, logsumexp, None, deterministic, *options
    grads = dispatch.backward(*arguments, tiles=tiles.get("backward"))
    expected = both_passes(definition, tuple(x.double() for x in inputs), options)
    for got, want in zip((out, *grads), expected, strict=True):
        assert (got.double() - want).norm() < 1e-2 * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, BF16), (80, BF16), (96, BF16), (128, BF16), (128, F16)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_tuned_tiles_are_attention(head_dim, dtype, deterministic, dropout_p):
    """Grouped heads, both masks, fewer and more queries than keys. Heads of 128 use other statistics in fp16."""
    for causal, seq_q, seq_k in ((True, 700, 700), (True, 200, 330), (True, 330, 200), (False, 257, 140)):
        case = Case(seq_q=seq_q, seq_k=seq_k, heads=4, kv_heads=2, head_dim=head_dim, dtype=dtype, causal=causal)
        assert_launches_attention(case, "cuda", dropout_p, deterministic)


@pytest.mark.gpu
@pytest.mark.parametrize(("pass_", "head_dim", "mask", "config"), hopper_configs(), ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_setting_of_hopper_is_attention(pass_, head_dim, mask, config, dtype):
    """Test the settings for long sequences too, which few other tests reach, at lengths that no tile divides."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    dropout_p, band = 0.2 if mask == "dropout" else 0.0, mask if mask in ("window", "documents") else ""
    causal_shapes = (True, 700, 700), (True, 200, 330), (True, 330, 200)
    shapes = {
        "full": ((False, 257, 140), (False, 700, 700)),
        "documents": ((True, 700, 700), (True, 1500, 1500), (False, 1500, 1500)),
    }
    for causal, seq_q, seq_k in shapes.get(mask, causal_shapes):
        case = Case(seq_q=seq_q, seq_k=seq_k, heads=4, kv_heads=2, head_dim=head_dim, dtype=dtype, causal=causal)
        for deterministic in (False, True) if pass_ == "backward" else (False,):
            assert_launches_attention(case, "cuda", dropout_p, deterministic, band, **{pass_: config})


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize(
    ("causal", "window", "documents", "seq_q", "dropout_p"),
    [
        (False, 0, False, 3000, 0.0),
        (True, 0, False, 3000, 0.0),
        (True, 0, False, 3300, 0.1),
        (True, 700, False, 3000, 0.0),
        (True, 65, False, 1300, 0.0),  # no query sees the first keys
        (True, 0, True, 3000, 0.0),
        (False, 0, True, 3000, 0.0),
    ],
)
def test_a_deterministic_backward_repeats_its_bits_with_many_more_programs_than_multiprocessors(
    head_dim, causal, window, documents, seq_q, dropout_p
):
    kv_heads = 24 if head_dim == 128 else 12  # for grouped heads of 128 the plain kernel computes dQ
    case = Case(4, seq_q=seq_q, seq_k=3000, heads=24, kv_heads=kv_heads, head_dim=head_dim, causal=causal, dtype=BF16)
    q, k, v, dout = draw(case, "cuda")
    cuts = torch.tensor([0, 1999, 2000, 2100, 6000, 12000], dtype=torch.int32, device="cuda")
    bounds = document_bounds(cuts, 4, 3000) if documents else None
    numbers = dropout.draw(4, 24, seq_q, 3000, q.device) if dropout_p else None
    options = Options(numbers, bounds, causal=causal, window=window, scale=head_dim**-0.5, dropout_p=dropout_p)
    out, logsumexp = dispatch.forward(q, k, v, *options)
    expected = dispatch.backward(dout, q, k, v, out, logsumexp, None, False, *options)
    first = dispatch.backward(dout, q, k, v, out, logsumexp, None, True, *options)
    for got, want in zip(first, expected, strict=True):
        assert (got.double() - want.double()).norm() < 5e-3 * want.double().norm()
    for _ in range(5):
        again = dispatch.backward(dout, q, k, v, out, logsumexp, None, True, *options)
        assert all(map(torch.equal, again, first))


@pytest.mark.gpu
def test_a_deterministic_gradient_of_a_bias_repeats_its_bits():
    qkv = torch.randn(4, 2000, 3, 12, 64, device="cuda", dtype=BF16, requires_grad=True)
    bias, dout = torch.zeros(2304, device="cuda", requires_grad=True), torch.randn_like(qkv[:, :, 0])
    grads = []
    for _ in range(5):
        out = flash2_packed(qkv, bias=bias, causal=True, deterministic=True)
        grads.append(torch.autograd.grad(out, (qkv, bias), dout))
    dqkv, dbias = grads[0]
    assert (dbias - dqkv.double().sum((0, 1)).flatten()).norm() < 1e-2 * dbias.norm()
    assert all(torch.equal(x, dqkv) and torch.equal(y, dbias) for x, y in grads)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_the_programs_draw_each_tile_of_documents(head_dim, causal, monkeypatch):
    """There are many more tiles than programs. Rows of a tile that no program draws would keep the NaN."""
    case = Case(3, seq_q=2000, seq_k=2000, heads=24, kv_heads=12, head_dim=head_dim, causal=causal, dtype=BF16)
    q, k, v, _ = draw(case, "cuda")
    cuts = torch.tensor([0, 1999, 2000, 2100, 2100, 5000, 6000], dtype=torch.int32, device="cuda")
    options = Options(documents=document_bounds(cuts, 3, 2000), causal=causal, scale=head_dim**-0.5)
    plain = plain_tiles_for("sm_80", head_dim, BF16, causal, 2000)
    plain_out, plain_logsumexp = dispatch.forward(q, k, v, *options, tiles=plain)
    found = {config for pass_, *key, config in hopper_configs() if (pass_, *key) == ("forward", head_dim, "documents")}
    for config in found:
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", lambda sizes, **kind: torch.full(sizes, math.nan, **kind))
            patched.setattr(torch, "empty_like", lambda x, **kind: torch.full_like(x, math.nan, **kind))
            out, logsumexp = dispatch.forward(q, k, v, *options, tiles=config)
        torch.testing.assert_close(logsumexp, plain_logsumexp, atol=1e-3, rtol=0)
        assert ((out - plain_out).norm(dim=-1) <= 5e-2 * plain_out.norm(dim=-1)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_the_logsumexp_and_its_gradient_are_fp64s_by_every_kernel_of_the_gpu(head_dim, causal):
    """No other test checks the Hopper kernels' logsumexp, or the sign of its gradient."""
    case = Case(1, seq_q=1500, seq_k=1500, heads=4, kv_heads=2, head_dim=head_dim, causal=causal, dtype=BF16)
    found, expected = with_logsumexp(case, "cuda")
    assert (found[1].double() - expected[1]).abs().max() < 1e-4
    for got, want in zip(found, expected, strict=True):
        assert (got.double() - want).norm() < 1e-2 * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_on_hopper_a_biass_gradient_is_summed_by_the_kernels(head_dim, causal):
    """The sums are as close to fp64 as sums of the rounded gradient. Those of keys are exactly zero."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
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


@triton.jit
def write_parts(x, y, parts, SPLIT: tl.constexpr, M: tl.constexpr):
    rows = tl.arange(0, M)
    p_parts = parts + rows[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(p_parts, SPLIT(tl.load(x + rows), tl.load(y + rows)))


@pytest.mark.skipif(triton_version() < (3, 6), reason="needs Triton 3.6 or later")
def test_a_statistic_is_the_sum_of_its_parts():
    from kernels.flash2.hopper_backward.statistics import split_in_bf16

    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn((2, 128), generator=generator)
    x, y = numbers * 2.0 ** torch.randint(-60, 60, numbers.shape, generator=generator)
    parts = torch.full((128, 16), math.nan, dtype=BF16, device=KERNEL_DEVICE)
    write_parts[(1,)](x.to(KERNEL_DEVICE), y.to(KERNEL_DEVICE), parts, split_in_bf16, 128)
    parts = parts.cpu().double()
    for statistic, first in ((x, 0), (y, 3)):
        torch.testing.assert_close(parts[:, first : first + 3].sum(1), statistic.double(), rtol=2.0**-23, atol=0.0)
    assert not parts[:, 6:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_programs_that_walk_over_many_tiles_end(head_dim, causal):
    """Every length of the table has more tiles than multiprocessors; consumers own unequal numbers of blocks."""
    for seq_q, batch in ((512, 40), (2048, 10), (6000, 20)):
        for more, window in ((0, 0), (64, 0), (-64, 0), (1, 0), *(((0, 300), (64, 1200)) if causal else ())):
            case = Case(batch, seq_q, seq_q + more, heads=2, kv_heads=2, head_dim=head_dim, causal=causal, dtype=BF16)
            q, k, v, _ = draw(case, "cuda")
            options = Options(causal=causal, window=window if window < seq_q else 0, scale=head_dim**-0.5)
            out, logsumexp = dispatch.forward(q, k, v, *options)
            plain = plain_tiles_for("sm_80", head_dim, BF16, causal, 16384)  # the plain kernels
            plain_out, plain_logsumexp = dispatch.forward(q, k, v, *options, tiles=plain)
            torch.testing.assert_close(logsumexp, plain_logsumexp, atol=1e-3, rtol=0)
            assert ((out - plain_out).norm(dim=-1) <= 5e-2 * plain_out.norm(dim=-1)).all()
            last = slice(-1, None), slice(-70, None)  # aligned at the bottom right, for any mask
            expected, _ = definition.forward(q[last].double(), k[-1:].double(), v[-1:].double(), *options)
            assert (out[last].double() - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.skipif(triton_version() < (3, 6), reason="needs Triton 3.6 or later")
@pytest.mark.parametrize(
    ("causal", "window", "drawn", "section"),
    [(True, 300, False, 64), (True, 0, True, 64), (False, 0, True, 64), (False, 0, False, 1)],
)
def test_only_documents_are_drawn_and_heads_of_short_tiles_are_dealt_out_together(
    causal, window, drawn, section, monkeypatch
):
    """A launch with documents gets a counter of its own, which starts at zero."""
    from kernels.flash2.hopper_forward import host

    launched = []
    monkeypatch.setattr(host, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(host, "launch_kernel", lambda *arguments, **options: launched.append(arguments))
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: nullcontext())
    monkeypatch.setattr(host, "blocks_of", lambda x, *block: block)
    q = torch.zeros(2, 3000, 12, 64, dtype=BF16)
    documents = torch.zeros(2, 2, 3000, dtype=torch.int32) if drawn else None
    host.forward(q, q, q, Options(None, documents, None, causal, window), HopperForwardConfig(128, 3, 2))
    [(_, _, programs, tensors, scalars, _)] = launched
    assert (programs, scalars[5]) == (132, section)
    assert tensors[-1].tolist() == [0] if drawn else tensors[-1] is None


@pytest.mark.skipif(triton_version() < (3, 6), reason="needs Triton 3.6 or later")
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
    """No program has much more work than the mean, or one of the longest tiles more.

    A section fits in the cache, unless all sections that fit are clearly less balanced.
    """
    from kernels.flash2.hopper_forward import schedule

    config, bytes_of_head = HopperForwardConfig(*config), 512 * length
    shape = heads, length, length
    section = schedule.section_size(shape, bytes_of_head, programs, config)
    longest = schedule.longest_program(section, *shape, programs, config)
    held = range(1, max(schedule.CACHED // bytes_of_head, 1) + 1)
    if section not in held:
        others = (schedule.longest_program(other, *shape, programs, config) for other in held)
        assert min(others) > schedule.BEYOND * longest
    last_queries = range(config.queries, length + config.queries, config.queries)
    each = [min(-(-last // config.keys), -(-length // config.keys)) + 1 for last in last_queries]
    mean = heads * sum(each) / programs
    assert mean <= longest <= max(1.06 * mean, mean + each[-1])
