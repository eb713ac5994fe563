"""The check of a user's function: a right one, a wrong one, and one that cannot do everything."""

import sys
import types

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


def forward_only(q, k, v, *, causal, scale):
    return standard_attention(q, k, v, causal=causal, scale=scale).detach()


FUNCTIONS = [standard_attention, partly, wrong_at_63, wrong_dropout, forward_only]


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
    wrong = check_function(f"my_kernels:{name}", "cpu")
    lines = capsys.readouterr().out.splitlines()
    return wrong, lines


def test_standard_attention_is_right_in_every_case(capsys):
    wrong, lines = check("standard_attention", capsys)
    assert wrong == 0 and lines[-1] == "48 ok, 0 wrong, 0 unsupported"
    assert len(lines) == 2 + 3 * (4 + 4) + 1
    errors = [float(text) for line in lines[2:-1] for text in line.split()[-2:]]
    assert max(errors) < 0.02


def test_what_a_function_cannot_do_is_named_with_the_reason(capsys):
    wrong, lines = check("partly", capsys)
    assert wrong == 0 and lines[-1] == "10 ok, 0 wrong, 38 unsupported"
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


def test_dropout_that_drops_nothing_is_wrong(capsys):
    wrong, lines = check("wrong_dropout", capsys)
    assert wrong == 6 and any("sums of kept probabilities are 1.000 +- 0.0000" in line for line in lines)


def test_a_function_without_a_backward_pass_is_unsupported(capsys):
    wrong, lines = check("forward_only", capsys)
    assert wrong == 0 and lines[-1] == "0 ok, 0 wrong, 48 unsupported"


def test_on_a_gpu_the_function_is_measured_under_its_own_name(monkeypatch, capsys, tmp_path):
    measured = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention, "Gpu", Stopwatch)
    monkeypatch.setattr(attention, "check_function", lambda name, device: 0)
    monkeypatch.setattr(attention, "measure_all", lambda shapes, variants, *others: measured.append(variants) or [])
    attention.run(AttentionSettings(function="my_kernels:partly", variants=["flash2"]))
    attention.run(AttentionSettings(function="my_kernels:partly", check=True))
    assert [list(variants) for variants in measured] == [["flash2", "my_kernels:partly"]]
