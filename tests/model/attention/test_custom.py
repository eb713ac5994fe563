"""A kernel of the user's own: how it is found, checked and called, and the message for each mistake in it."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from errors import UserError
from model.attention import (
    VARIANTS,
    Custom,
    CustomConfig,
    NaiveConfig,
    build_attention,
    check_attention,
    load_function,
    restore_attention,
)
from model.gpt2 import CHECKPOINTING, GPT2, ModelConfig
from tests.kernels.accuracy import Case, assert_as_accurate, draw, outcome

KERNEL = """
import torch


def attention(q, k, v, *, causal, scale):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


def without_scale(q, k, v, *, causal):
    return v


def of_tensors_alone(q, k, v):
    return v


def by_position(q, k, v, causal, scale, /):
    return v


def of_one_tensor(q, *, causal, scale):
    return q


def with_more(q, k, v, needed, *, causal, scale):
    return v


def with_any(*tensors, **options):
    return attention(*tensors, **{key: options[key] for key in ("causal", "scale")})


def of_training(q, k, v, *, causal, scale):
    assert q.shape == k.shape, "no kernel for this shape"
    return attention(q, k, v, causal=causal, scale=scale)


def fails(q, k, v, *, causal, scale):
    return undefined_name


def of_another_shape(q, k, v, *, causal, scale):
    return attention(q, k, v, causal=causal, scale=scale).transpose(1, 2)


def of_another_dtype(q, k, v, *, causal, scale):
    return attention(q, k, v, causal=causal, scale=scale).double()


def without_gradient(q, k, v, *, causal, scale):
    return attention(q, k, v, causal=causal, scale=scale).detach()


def without_gradient_of_keys(q, k, v, *, causal, scale):
    return attention(q, k.detach(), v, causal=causal, scale=scale)


def not_causal(q, k, v, *, causal, scale):
    return attention(q, k, v, causal=False, scale=scale)


def of_no_key(q, k, v, *, causal, scale):
    out = attention(q, k, v, causal=causal, scale=scale)
    return torch.cat((out[:, :1] * float("nan"), out[:, 1:]), 1)


def of_one_token_too_many(q, k, v, *, causal, scale, cu_seqlens=None):
    assert q.shape[2] == k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(2)
    return ((q @ k.mT * scale).masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(1, 2)


def of_grouped_heads(q, k, v, *, causal, scale):
    groups = q.shape[2] // k.shape[2]
    return attention(q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2), causal=causal, scale=scale)


def not_causal_with_groups(q, k, v, *, causal, scale):
    return of_grouped_heads(q, k, v, causal=False, scale=scale)


def random(q, k, v, *, causal, scale):
    return attention(q, k + torch.randn_like(k), v, causal=causal, scale=scale)


def of_long_sequences(q, k, v, *, causal, scale):
    assert q.shape[1] % 96 == 0, "no kernel for this length"
    return attention(q, k, v, causal=causal, scale=scale)


def recomputed(q, k, v, *, causal, scale):
    from torch.utils.checkpoint import checkpoint
    return checkpoint(lambda q, k, v: attention(q, k, v, causal=causal, scale=scale), q, k, v, use_reentrant=True)


def with_documents(q, k, v, *, causal, scale, cu_seqlens=None):
    if cu_seqlens is None:
        return attention(q, k, v, causal=causal, scale=scale)
    parts = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        assert end > start, "no kernel for an empty document"
        parts.append(attention(*(x.flatten(0, 1)[None, start:end] for x in (q, k, v)), causal=causal, scale=scale))
    return torch.cat(parts, dim=1).view_as(q)


def of_two_tensors(q, k, v, *, causal, scale):
    return v, v


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        return v.clone()

    @staticmethod
    def backward(ctx, dout):
        raise AssertionError("no backward pass yet")


def without_backward(q, k, v, *, causal, scale):
    return Backward.apply(v)


number = 3
"""
CHECK = {"head_dim": 16, "dtype": torch.float32, "dropout_p": 0.0, "device": torch.device("cpu"), "context_length": 64}


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch) -> Path:
    """Make a current folder with a module of kernels and modules that cannot be imported."""
    (tmp_path / "my_kernels.py").write_text(KERNEL)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "exiting.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "needy.py").write_text("import a_package_that_is_missing\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("my_kernels", "broken", "needy"):
        sys.modules.pop(name, None)


def custom(function: str = "attention") -> CustomConfig:
    return CustomConfig(function=f"my_kernels:{function}")


def test_a_function_of_the_current_folder_is_attention():
    case = Case(seq_q=63, seq_k=63, dtype=torch.float32)
    inputs = draw(case, "cpu")
    attention = build_attention(custom())
    found = outcome(lambda q, k, v: attention(q, k, v, causal=True, scale=case.head_dim**-0.5), *inputs)
    assert_as_accurate(case, found, inputs, 2)
    check_attention(custom(), **CHECK)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_kernels", "function=my_kernels is not module:function; write for example function=my_module:my_attention"),
        ("my_kernels:", "is not module:function"),
        (
            "nowhere:attention",
            "names module nowhere, which Python does not find; run from its folder or add that folder to PYTHONPATH",
        ),
        ("nowhere.at.all:attention", "names module nowhere, which"),
        (
            "my_kernels:atention",
            "names atention, which module my_kernels does not have; choose among attention, without_scale",
        ),
        ("my_kernels:number", "is a int, not a function"),
        ("broken:attention", "cannot be imported .ZeroDivisionError: division by zero.; fix the module"),
        ("exiting:attention", "cannot be imported .SystemExit: 3.; fix the module"),
        ("needy:attention", "cannot be imported .ModuleNotFoundError: No module named 'a_package_that_is_missing'"),
    ],
)
def test_a_name_that_leads_to_no_function_is_refused(name, message):
    with pytest.raises(UserError, match=message):
        load_function(name)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "without_scale",
            r"cannot be called as .* unexpected keyword argument 'scale'.; define it as \(q, k, v, \*",
        ),
        (
            "of_tensors_alone",
            r"cannot be called as \(q, k, v, causal=..., scale=...\) .got an unexpected keyword",
        ),
        ("by_position", "cannot be called as .*keyword.*; define it as"),
        ("of_one_tensor", "cannot be called as .*too many positional arguments.; define it as"),
        ("with_more", "cannot be called as .*missing a required argument: 'needed'.; define it as"),
        ("fails", r"NameError: name 'undefined_name' is not defined in line \d+ of my_kernels.py.; fix the function"),
        ("of_another_shape", r"the output is \(1, 2, 64, 16\) torch.float32 and should be \(1, 64, 2, 16\)"),
        ("of_another_dtype", r"torch.float64 and should be \(1, 64, 2, 16\) torch.float32"),
        ("without_gradient_of_keys", "the output has no gradient for k; return one from the backward pass"),
        ("without_gradient", "the output has no gradient; wrap a kernel in torch.autograd.Function"),
        ("of_two_tensors", "the output is a tuple and should be"),
        ("without_backward", r"AssertionError: no backward pass yet in line \d+ of my_kernels.py"),
    ],
)
def test_a_function_that_cannot_train_is_refused_in_a_sentence_with_its_name(function, message):
    with pytest.raises(UserError, match=message) as refusal:
        check_attention(custom(function), **CHECK)
    assert f"attention.function=my_kernels:{function}" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_function_of_any_arguments_is_accepted_with_every_option():
    check_attention(custom("with_any"), **CHECK | {"dropout_p": 0.1, "documents": True, "sampling": True})


LEAK = "the last key and value change the outputs of earlier queries; mask them if causal=True"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("context_length", [2, 111, 1024])
@pytest.mark.parametrize(
    ("function", "options"),
    [
        ("not_causal", {}),
        ("not_causal", {"head_dim": 64}),
        ("of_one_token_too_many", {}),
        ("not_causal_with_groups", {"groups": 3}),
    ],
)
def test_a_function_that_sees_later_tokens_is_refused(function, options, context_length, dtype):
    """It once trained without a word, to a loss near 0."""
    kind = {"dtype": dtype, "context_length": context_length}
    with pytest.raises(UserError, match=LEAK):
        check_attention(custom(function), **CHECK | kind | options)


def test_a_function_that_sees_later_tokens_of_its_document_is_refused():
    with pytest.raises(UserError, match=LEAK):
        check_attention(custom("of_one_token_too_many"), **CHECK | {"documents": True})


def test_a_function_whose_outputs_are_not_finite_is_refused():
    with pytest.raises(UserError, match="the output is not finite for random q, k and v"):
        check_attention(custom("of_no_key"), **CHECK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("context_length", [1, 2, 111, 1024])
def test_a_causal_function_is_accepted_even_if_it_is_random(context_length, dtype):
    kind = {"dtype": dtype, "context_length": context_length}
    check_attention(custom("random"), **CHECK | kind)
    check_attention(custom("of_grouped_heads"), **CHECK | kind | {"groups": 3})


def test_a_function_may_use_a_backward_pass_that_torch_allows_in_training_alone():
    check_attention(custom("recomputed"), **CHECK)


def test_a_function_is_tried_with_the_length_and_the_documents_of_training():
    check_attention(custom("of_long_sequences"), **CHECK | {"context_length": 192})
    with pytest.raises(UserError, match="no kernel for this length"):
        check_attention(custom("of_long_sequences"), **CHECK)
    with pytest.raises(UserError, match="no kernel for an empty document"):
        check_attention(custom("with_documents"), **CHECK | {"documents": True})


def test_a_function_that_cannot_sample_is_refused_only_if_samples_are_asked_for():
    """It once ended a finished run with a traceback."""
    check_attention(custom("of_training"), **CHECK)
    message = "cannot sample with one query, 63 keys and causal=False .AssertionError: no kernel.*train.sample_tokens=0"
    with pytest.raises(UserError, match=message):
        check_attention(custom("of_training"), **CHECK | {"sampling": True})


def test_the_traceback_of_the_users_code_is_kept():
    with pytest.raises(UserError) as refusal:
        check_attention(custom("fails"), **CHECK)
    assert isinstance(refusal.value.__cause__, NameError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_p": 0.1}, "does not accept dropout_p; set model.dropout=0 or use attention=flash2"),
        ({"documents": True}, "does not accept cu_seqlens; set data.document_mask=false or use attention=flash2"),
    ],
)
def test_what_the_function_has_no_parameter_for_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        check_attention(custom(), **CHECK | options)


@pytest.mark.parametrize("name", ["flex", "fa2", "fa3", "fa4"])
def test_a_library_for_gpus_is_refused_on_a_cpu_with_a_variant_that_runs_there(name, monkeypatch):
    """attention=flex once gave torch's advice about requires_grad, and the remedy to fix the function."""
    monkeypatch.setattr("model.attention.custom.is_installed", lambda package: True)
    with pytest.raises(UserError) as refusal:
        check_attention(VARIANTS[name](), **CHECK)
    assert str(refusal.value) == f"attention={name} does not run on a CPU; use attention=flash2 or set device=cuda"
    check_attention(VARIANTS["flash2"](), **CHECK)


def test_options_are_passed_only_if_they_are_asked_for():
    """Autocast is off inside, as in the kernels of this repository."""
    calls = []

    def record(q, k, v, **options):
        calls.append((options, torch.is_autocast_enabled("cpu")))
        return v

    attend, x, cuts = Custom("record", record), torch.randn(1, 8, 2, 16), torch.tensor([0, 3, 8])
    with torch.autocast("cpu", torch.bfloat16):
        attend(x, x, x, causal=True, scale=0.5)
        attend(x, x, x, causal=True, scale=0.5, dropout_p=0.1, cu_seqlens=cuts)
    plain = {"causal": True, "scale": 0.5}
    assert calls == [(plain, False), (plain | {"dropout_p": 0.1, "cu_seqlens": cuts}, False)]


def test_only_the_command_line_can_name_code():
    """A record names a module that must not be imported."""
    recorded = {"name": "custom", "function": "broken:attention"}
    for given in (None, "my_kernels:attention"):
        with pytest.raises(UserError, match="is not the run's broken:attention; give function=broken:attention"):
            restore_attention(recorded, given)
    assert "broken" not in sys.modules
    assert restore_attention(recorded | {"function": "my_kernels:attention"}, "my_kernels:attention") == custom()
    assert restore_attention({"name": "naive"}, None) == NaiveConfig()


def untraceable(q, k, v, *, causal, scale):
    """Return v scaled by a number that torch.compile cannot know."""
    torch._dynamo.graph_break()
    return v * scale


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("function", ["attention", "untraceable"])
def test_a_compiled_model_gives_the_gradients_of_the_eager_one(function, checkpointing):
    """Also if the graph breaks in the function."""
    attend = Custom("untraceable", untraceable) if function == "untraceable" else build_attention(custom())
    torch.manual_seed(0)
    model = GPT2(ModelConfig(n_layer=2, n_head=2, n_embd=32, context_length=32, vocab_size=64), attend, checkpointing)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    tokens = torch.randint(64, (2, 33))
    gradients = []
    torch._dynamo.reset()
    for called in (model, torch.compile(model, fullgraph=attend.fullgraph, backend="aot_eager")):
        model.zero_grad()
        called(tokens[:, :-1], tokens[:, 1:]).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)
