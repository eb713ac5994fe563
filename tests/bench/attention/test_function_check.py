"""The check of a user's function: a right one, a wrong one, and one that cannot do everything."""

import sys
import types
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from bench.attention import __main__ as attention
from bench.attention import function_check
from bench.attention.__main__ import AttentionSettings
from bench.attention.function_check import check_function
from errors import UserError
from kernels.naive.definition import standard_attention
from tests.bench.stopwatch import Stopwatch


def partly(q, k, v, *, causal, scale):
    """Compute attention without grouped heads, fp16, head size 40, documents and dropout."""
    if q.shape[-1] == 40:
        raise ValueError("head size 40 is not supported")
    if q.dtype == torch.float16:
        raise TypeError("no kernel for fp16")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).transpose(1, 2)


def wrong_at_63(q, k, v, *, causal, scale):
    return standard_attention(q, k, v, causal=causal and q.shape[1] != 63, scale=scale)


def wrong_dropout(q, k, v, *, causal, scale, dropout_p=0.0):
    return standard_attention(q, k, v, causal=causal, scale=scale)


def dropout_of_queries(q, k, v, *, causal, scale, dropout_p=0.0):
    """Drop all keys of a query, or none."""
    out = standard_attention(q, k, v, causal=causal, scale=scale)
    return F.dropout(out.new_ones(*out.shape[:3], 1), dropout_p) * out


def dropout_without_mask(q, k, v, *, causal, scale, dropout_p=0.0):
    return standard_attention(q, k, v, causal=causal and not dropout_p, scale=scale, dropout_p=dropout_p)


def dropout_of_one_mask(q, k, v, *, causal, scale, dropout_p=0.0):
    """Drop the same pairs in all heads and sequences."""
    keep = (torch.rand(q.shape[1], k.shape[1]) >= dropout_p).expand(q.shape[0], q.shape[2], -1, -1).contiguous()
    return standard_attention(q, k, v, causal=causal, scale=scale, dropout_p=dropout_p, keep=keep)


def dropout_of_one_seed(q, k, v, *, causal, scale, dropout_p=0.0):
    """Drop the same pairs in all calls."""
    pairs = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    keep = torch.rand(pairs, generator=torch.Generator().manual_seed(0)) >= dropout_p
    return standard_attention(q, k, v, causal=causal, scale=scale, dropout_p=dropout_p, keep=keep)


class OtherMask(torch.autograd.Function):
    """Drop other probabilities in the backward pass than in the forward pass."""

    @staticmethod
    def forward(ctx, q, k, v, options):
        ctx.save_for_backward(q, k, v)
        ctx.options = options
        return standard_attention(q, k, v, **options)

    @staticmethod
    def backward(ctx, dout):
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            return *torch.autograd.grad(standard_attention(*leaves, **ctx.options), leaves, dout), None


def dropout_with_other_masks(q, k, v, **options):
    return OtherMask.apply(q, k, v, options)


def of_one_scale(q, k, v, *, causal, scale):
    return standard_attention(q, k, v, causal=causal, scale=q.shape[-1] ** -0.5)


def of_square_scores(q, k, v, *, causal, scale):
    k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
    return standard_attention(q, k, v, causal=causal, scale=scale)


def unfinished(q, k, v, *, causal, scale):
    raise NotImplementedError("not written yet")


def forward_only(q, k, v, *, causal, scale):
    return standard_attention(q, k, v, causal=causal, scale=scale).detach()


DROPOUTS = [wrong_dropout, dropout_of_queries, dropout_without_mask, dropout_with_other_masks]
DROPOUTS += [dropout_of_one_mask, dropout_of_one_seed]
FUNCTIONS = [
    standard_attention,
    partly,
    wrong_at_63,
    forward_only,
    of_one_scale,
    of_square_scores,
    unfinished,
    *DROPOUTS,
]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Provide a module my_kernels with the functions, and a small matrix of cases."""
    module = types.ModuleType("my_kernels")
    vars(module).update({function.__name__: function for function in FUNCTIONS})
    monkeypatch.setitem(sys.modules, "my_kernels", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(function_check, "LENGTHS", (1, 63))
    monkeypatch.setattr(function_check, "HEAD_DIMS", (40, 64))


def check(name, capsys):
    counts = check_function(f"my_kernels:{name}", "cpu")
    lines = capsys.readouterr().out.splitlines()
    return counts["wrong"], lines


def test_standard_attention_is_right_in_every_case(capsys):
    wrong, lines = check("standard_attention", capsys)
    assert wrong == 0 and lines[-1] == "60 ok, 0 wrong, 0 unsupported"
    assert len(lines) == 2 + 3 * (4 + 6) + 1
    errors = [float(text) for line in lines[2:-1] for text in line.split()[-2:]]
    assert max(errors) < 0.02


def test_what_a_function_cannot_do_is_named_with_the_reason(capsys):
    wrong, lines = check("partly", capsys)
    assert wrong == 0 and lines[-1] == "14 ok, 0 wrong, 46 unsupported"
    [grouped] = [line for line in lines if line.startswith("float32") and "grouped" in line]
    assert grouped.split()[-2:] == ["unsupported", "unsupported"]
    reasons = [line for line in lines if line.startswith("unsupported: ")]
    for words in ("head size 40 is not supported", "no kernel for fp16", "no parameter cu_seqlens", "dropout_p"):
        assert sum(words in reason for reason in reasons) == 1


def test_a_wrong_result_is_found_and_ends_with_status_2(capsys):
    with pytest.raises(UserError, match="function=my_kernels:wrong_at_63 computes wrong results in 6 cases"):
        attention.run(AttentionSettings(function="my_kernels:wrong_at_63"))
    lines = capsys.readouterr().out.splitlines()
    [reason] = [line for line in lines if line.startswith("wrong: ")]
    assert reason.startswith("wrong: bfloat16, causal, length 63, head size 40: out is off by")
    assert reason.endswith("(5 more like this)")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (wrong_dropout, "dropout_p=0.1 drops 0.000 of the probabilities"),
        (dropout_of_queries, "times the spread of chance"),
        (dropout_without_mask, "out is off by"),
        (dropout_with_other_masks, "dq is off by"),
        (dropout_of_one_mask, "drops nearly the same probabilities in different sequences"),
        (dropout_of_one_seed, "drops nearly the same probabilities in different calls"),
    ],
)
def test_wrong_dropout_is_found(function, reason, capsys):
    wrong, lines = check(function.__name__, capsys)
    assert wrong == 6 and any("dropout_p=0.1, head size" in line and reason in line for line in lines)


@pytest.mark.parametrize(("function", "label"), [(of_one_scale, "another scale"), (of_square_scores, "one query")])
def test_what_training_alone_does_not_need_is_checked_too(function, label, capsys):
    wrong, lines = check(function.__name__, capsys)
    assert wrong == 6 and any(line.startswith("wrong: ") and label in line for line in lines)


def test_a_function_without_a_backward_pass_is_wrong(capsys):
    wrong, lines = check("forward_only", capsys)
    assert wrong == 42 and lines[-1] == "6 ok, 42 wrong, 12 unsupported"


def test_a_function_that_supports_nothing_ends_with_status_2(capsys):
    with pytest.raises(UserError, match="function=my_kernels:unfinished supports none of the cases"):
        attention.run(AttentionSettings(function="my_kernels:unfinished", check=True))
    assert "NotImplementedError: not written yet in line" in capsys.readouterr().out


def test_on_a_gpu_the_function_is_measured_under_its_own_name(monkeypatch, capsys, tmp_path):
    measured = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention, "Gpu", Stopwatch)
    monkeypatch.setattr(attention, "check_function", lambda name, device: Counter(ok=1))
    monkeypatch.setattr(attention, "measure_all", lambda shapes, variants, *others: measured.append(variants) or [])
    attention.run(AttentionSettings(function="my_kernels:partly", variants=["flash2"]))
    attention.run(AttentionSettings(function="my_kernels:partly", check=True))
    assert [list(variants) for variants in measured] == [["flash2", "my_kernels:partly"]]


def test_a_function_that_fails_in_a_timed_shape_ends_with_status_2(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention, "check_function", lambda name, device: Counter(ok=1))
    failed = {"variant": "my_kernels:partly", "status": "failed", "message": "out is off by 1"}
    others = [{"variant": "flash2", "status": "failed"}, {"variant": "my_kernels:partly", "status": "oom"}]
    monkeypatch.setattr(attention, "measure_all", lambda *given: [*others, failed])
    with pytest.raises(UserError, match="function=my_kernels:partly failed in a timed shape: out is off by 1; see"):
        attention.run(AttentionSettings(function="my_kernels:partly", seq_len=64))


def test_a_crash_of_the_gpu_ends_the_check_and_names_the_case(monkeypatch, capsys):
    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(UserError, match="ended the work of the GPU at bfloat16, causal, length 1, head size 40 "):
        check("partly", capsys)
