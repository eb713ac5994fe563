import itertools

import pytest
import torch

from bench.attention import accuracy
from bench.attention.shapes import PASSES
from kernels.flash2 import flash2
from kernels.naive.definition import standard_attention
from tests.bench.stopwatch import measure


def halved(v: torch.Tensor) -> torch.Tensor:
    """Return v, and leave half of v in the caller's tensor."""
    kept = v.detach().clone()
    v.detach().mul_(0.5)
    return v + (kept - v).detach()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda q, k, v, **options: standard_attention(q, k, v, **options) * 1.1, "out is off by"),
        (lambda q, k, v, causal, scale: standard_attention(q, k, v, causal=False, scale=scale), "out is off by"),
        (lambda q, k, v, **options: standard_attention(q, k.detach() + 0 * k, v, **options), "dk is off by"),
        (lambda q, k, v, **options: standard_attention(q, k, v, **options) / 0, "out is not finite"),
        (
            lambda q, k, v, **options: standard_attention(q, k, v, **options)[:, 1:],
            "out is (2, 32, 2, 16) torch.bfloat16, not (2, 33",
        ),
        (lambda q, k, v, **options: standard_attention(q, k, v, **options).float(), "torch.float32, not"),
        (lambda q, k, v, **options: [standard_attention(q, k, v, **options)], "out is a list, not"),
        (lambda q, k, v, **options: standard_attention(q, k, v, **options).detach(), "out has no gradient"),
        (lambda q, k, v, **options: standard_attention(q, k.detach(), v, **options), "dk is missing"),
        (lambda q, k, v, **options: standard_attention(q, k, halved(v), **options), "q, k or v was changed"),
    ],
    ids=[
        *("10 % off", "no mask", "a gradient of zeros", "not finite", "another shape", "another dtype", "no tensor"),
        *("no backward pass", "no gradient of k", "changed values"),
    ],
)
def test_a_wrong_variant_is_a_failed_row_without_a_timing(wrong, message):
    rows = measure({"flex": wrong, "flash2": flash2})
    for pass_ in PASSES:
        failed = rows["flex", pass_]
        assert failed["status"] == "failed" and message in failed["message"]
        assert failed["ms"] is failed["tflops"] is failed["peak_mib"] is None
        assert rows["flash2", pass_]["status"] == "ok"


def right_once():
    """Return an attention whose results are right in its first call only."""
    calls = itertools.count()
    return lambda q, k, v, **options: standard_attention(q, k, v, **options) * (1 if next(calls) == 0 else 1.1)


def writes_once():
    """Return an attention that computes only in its first call. Later it returns the memory of the first result."""
    results = []

    class Written(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            results.append(out.clone())
            return results[0].view_as(out)

        @staticmethod
        def backward(ctx, dout):
            return dout

    return lambda q, k, v, **options: Written.apply(standard_attention(q, k, v, **options))


@pytest.mark.parametrize(
    ("attend", "message"),
    [(right_once, "out is off by"), (writes_once, "out is not finite")],
    ids=["right once", "writes once"],
)
def test_a_variant_must_be_right_again_when_it_is_called_again(attend, message):
    failed = measure({"flex": attend()})["flex", "forward"]
    assert failed["status"] == "failed" and message in failed["message"] and failed["ms"] is None


def test_three_times_math_attentions_error_is_allowed_and_four_times_for_fused_softmax():
    results = [torch.ones(5), torch.ones(5), torch.zeros(5)]
    truth = accuracy.Truth(pairs=(), exact=results, yardstick=[1e-3, 0.0, 0.0])
    exact = 2 * torch.finfo(torch.float32).eps
    assert truth.allowed("flash2") == truth.allowed("naive") == pytest.approx([3e-3, exact, 10])
    assert truth.allowed("fused_softmax") == pytest.approx([4e-3, exact, 10])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_the_reference_in_chunks_is_the_reference(causal, monkeypatch):
    inputs = torch.randn(4, 3, 40, 2, 8, dtype=torch.float64)
    whole = accuracy.in_chunks(standard_attention, *inputs, causal=causal)
    monkeypatch.setattr(accuracy, "CHUNK", 16)
    chunked = accuracy.in_chunks(standard_attention, *inputs, causal=causal)
    for one, other in zip(chunked, whole, strict=True):
        torch.testing.assert_close(one, other)


def test_picked_pairs_are_sequences_and_groups_of_heads():
    x = torch.arange(3 * 5 * 4).view(3, 5, 4, 1)  # B 3, T 5, H 4
    picked = accuracy.pick(x, 2, (torch.tensor([0, 2]), torch.tensor([1, 0])))
    assert picked.shape == (2, 5, 2, 1)
    assert torch.equal(picked[0], x[0, :, 2:]) and torch.equal(picked[1], x[2, :, :2])
