"""The operators of flash2: autograd, torch.compile, the packed form, and the inputs that they refuse."""

import math
import sys

import pytest
import torch
from torch import library
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.common import checks, dropout
from kernels.flash2 import definition, flash2, flash2_packed, op
from kernels.flash2.options import Options
from tests.kernels.accuracy import Case, draw, outcome
from tests.kernels.flash2_cases import (
    BF16,
    F16,
    F32,
)


def test_the_packed_operator_is_flash2_of_its_parts():
    qkv = torch.randn(1, 9, 3, 2, 16, dtype=torch.float64, requires_grad=True)
    assert torch.equal(flash2_packed(qkv, causal=True), flash2(*qkv.unbind(2), causal=True))
    assert torch.autograd.gradcheck(lambda x: flash2_packed(x, causal=True), qkv, fast_mode=True)
    with pytest.raises(ValueError, match="give flash2_packed qkv"):
        flash2_packed(qkv.squeeze(0))


def test_a_bias_of_the_projection_has_its_gradient_from_flash2():
    qkv = torch.randn(2, 9, 3, 2, 16, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(96, dtype=torch.float64, requires_grad=True)

    def project(qkv, bias):
        """Add the bias without a gradient for it."""
        return qkv + bias.detach().view(3, 2, 16)

    expected = torch.autograd.grad(flash2(*project(qkv, bias).unbind(2)).sin().sum(), qkv)
    found = torch.autograd.grad(flash2_packed(project(qkv, bias), bias=bias).sin().sum(), (qkv, bias))
    torch.testing.assert_close(found, (*expected, expected[0].sum((0, 1)).flatten()))
    frozen = flash2_packed(project(qkv, bias), bias=bias.detach())
    torch.testing.assert_close(torch.autograd.grad(frozen.sin().sum(), qkv), expected)
    with pytest.raises(ValueError, match=r"bias is \(3, 32\), and qkv is \(2, 9, 3, 2, 16\); give a bias \(96,\)"):
        flash2_packed(qkv, bias=bias.view(3, 32))


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_sum_to_what_hoppers_kernels_take_for_their_sums(causal):
    """Over the tokens, the gradients of keys sum to zero, and those of values to the sum of dout."""
    qkv, dout = torch.randn(2, 9, 3, 2, 16, dtype=torch.float64), torch.randn(2, 9, 2, 16, dtype=torch.float64)
    qkv.requires_grad_()
    (gradient,) = torch.autograd.grad(flash2_packed(qkv, causal=causal), qkv, dout)
    _, of_keys, of_values = gradient.sum((0, 1))
    torch.testing.assert_close(of_keys, torch.zeros_like(of_keys))
    torch.testing.assert_close(of_values, dout.sum((0, 1)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{"deterministic": True, "documents": True, "causal": False}, {"dropout_p": 0.1}, {"return_lse": True}],
    ids=str,
)
def test_where_the_kernels_cannot_sum_it_a_biass_gradient_is_the_sum_all_the_same(options):
    qkv = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=BF16, requires_grad=True)
    bias = torch.zeros(768, device="cuda", requires_grad=True)
    options = {"causal": True} | options
    if options.pop("documents", False):
        options["cu_seqlens"] = torch.tensor([0, 200, 600], dtype=torch.int32, device="cuda")
    results = flash2_packed(qkv, bias=bias, **options)
    results = results if isinstance(results, tuple) else (results,)
    dqkv, found = torch.autograd.grad(results, (qkv, bias), [torch.randn_like(x) for x in results])
    torch.testing.assert_close(found, dqkv.float().sum((0, 1)).flatten(), rtol=1e-4, atol=1e-3)


def test_return_lse_and_masks_through_the_operator():
    """gradcheck both outputs, apart and packed, and a loss that uses only the logsumexp."""
    qkv = torch.randn(1, 9, 3, 2, 16, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, 4, 9])
    options = {"causal": True, "window": 3, "cu_seqlens": cu_seqlens, "return_lse": True}
    assert torch.autograd.gradcheck(lambda x: flash2_packed(x, **options), qkv, fast_mode=True)
    assert torch.autograd.gradcheck(lambda x: flash2(*x.unbind(2), **options), qkv, fast_mode=True)
    assert torch.autograd.gradcheck(lambda x: flash2_packed(x, **options)[1], qkv, fast_mode=True)


def test_gradcheck_of_the_definition(monkeypatch):
    case = Case(batch=1, seq_q=5, seq_k=7, heads=2, kv_heads=1, head_dim=16, dtype=torch.float64)
    q, k, v, _ = draw(case, "cpu")
    inputs = [x.requires_grad_() for x in (q, k, v)]
    numbers = dropout.draw(1, 2, 5, 7, "cpu")
    monkeypatch.setattr(dropout, "draw", lambda *shape: numbers)
    assert torch.autograd.gradcheck(lambda *x: flash2(*x, causal=True, dropout_p=0.3), inputs)


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
    # The compiled region rounds q * 2 and gelu as eager does, but in another order.
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
    """Eager calls skip the operators. But modes must see them, and fake tensors must not reach the kernels."""
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 8}, "head_dim=8 does not suit flash2, which takes 16 to 256"),
        ({"kv_heads": 3}, "heads a multiple of kv_heads"),
        ({"dtype": torch.int64}, "dtype=torch.int64 .*give float32, float16 or bfloat16"),
        ({"seq_k": 0}, "at least one query and one key"),
        ({"head_dim": 0}, "head_dim=0 does not suit flash2"),
    ],
    ids=["small_head", "uneven_groups", "integers", "no_keys", "no_head"],
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
    """Longer windows would overflow the kernels' integers, and the kernels without a window are faster."""
    q, k, v, _ = draw(Case(seq_q=63, seq_k=140), "cpu")
    assert op._prepare(q, k, v, causal=True, window=window).window == 0
    assert op._prepare(q, k, v, causal=True, window=139).window == 139


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": -1.0}, "positive, finite scale"),
        ({"dropout_p": 1.0}, r"dropout_p=1\.0 is out of range; give"),
        ({"window": 8}, "use causal=True and an integer >= 1"),
        ({"window": 0, "causal": True}, "window=0"),
        ({"window": 2.5, "causal": True}, r"window=2\.5"),
        ({"scale": math.inf}, "positive, finite scale"),
        ({"cu_seqlens": torch.tensor([0.0, 111.0])}, "cumulative lengths"),
    ],
)
def test_refuses_options_out_of_range(options, message):
    q, k, v, _ = draw(Case(), "cpu")
    with pytest.raises(ValueError, match=message):
        flash2(q, k, v, **options)
