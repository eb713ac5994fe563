"""Activation checkpointing: the tensors that a block keeps, the operators that run again, and equal gradients."""

from collections import Counter

import pytest
import torch
from torch import library
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from bench.common.timing import Cpu, Gpu
from model import checkpointing
from model.attention import EXACT, Attention
from model.checkpointing import KEPT, KEPT_WITHOUT_DROPOUT
from model.gpt2 import CHECKPOINTING
from tests.model.test_gpt2 import build, sharpen, tokens_of


class Recorder(TorchDispatchMode):
    """The operators that ran."""

    def __init__(self):
        super().__init__()
        self.ran = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran[func] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("attention", EXACT)
def test_activation_checkpointing_changes_no_gradient_and_keeps_attention(attention):
    """With dropout, whose draws the second computation has to repeat. The fused attentions are not computed twice."""
    gradients, ran = [], []
    tokens, dropout = tokens_of(2, 41), 0.0 if attention == "sdpa" else 0.2  # torch's has none that is fused on a CPU
    for kind in CHECKPOINTING:
        model = sharpen(build(attention, dropout=dropout))
        for block in model.h:
            block.activation_checkpointing = kind
        torch.manual_seed(3)
        with Recorder() as recorder:
            model(tokens[:, :-1], tokens[:, 1:]).backward()
        gradients.append([p.grad for p in model.parameters()])
        ran.append(recorder.ran)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*gradients, strict=True))
    gelu = torch.ops.gelu.forward.default
    assert [of[gelu] for of in ran] == [2, 2, 4], "each block's once more"
    attended = [sum(of[op] for op in KEPT + KEPT_WITHOUT_DROPOUT) for of in ran]
    assert attended == ([0, 0, 0] if attention in ("naive", "fused_softmax") else [2, 2, 2])


def gradients_in_16_bits(attention: str, kind: str) -> list[torch.Tensor]:
    """Return the gradients of all parameters of a sharpened model under bf16 autocast."""
    model, tokens = sharpen(build(attention)), tokens_of(2, 41)
    for block in model.h:
        block.activation_checkpointing = kind
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    return [p.grad for p in model.parameters()]


def test_nor_does_the_full_one_in_16_bits():
    """It gives a block one sum, which the block's LayerNorm would have rounded once."""
    whole, full = (gradients_in_16_bits("flash2", kind) for kind in ("none", "full"))
    for expected, found in zip(whole, full, strict=True):
        assert (found - expected).norm() <= 3e-3 * expected.norm()


@library.custom_op("test_checkpointing::drop", mutates_args=())
def drop(x: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x with a share p dropped, and the factors. The draw is inside, as in torch's fused attentions on a GPU."""
    kept = (torch.rand_like(x) >= p) / (1 - p)
    return x * kept, kept


drop.register_autograd(
    lambda ctx, dout, _: (dout * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


class Dropping(Attention):
    def __call__(self, q, k, v, *, dropout_p, **options):
        return drop(v, dropout_p)[0]


def test_an_operator_that_draws_inside_is_computed_twice_where_it_drops(monkeypatch):
    """If its result were kept, the generator would not advance the second time, and later masks would differ."""
    monkeypatch.setattr(checkpointing, "KEPT_WITHOUT_DROPOUT", [torch.ops.test_checkpointing.drop.default])
    gradients, tokens = [], tokens_of(2, 41)
    for kind in ("none", "full"):
        model = sharpen(build("naive", dropout=0.2))
        for block in model.h:
            block.activation_checkpointing = kind
            block.attn.attention = Dropping()
        torch.manual_seed(3)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(*gradients)


def test_in_16_bits_selective_checkpointing_differs_by_the_rounding_of_gelus_slope():
    found = (gradients_in_16_bits("sdpa", kind) for kind in ("none", "selective"))
    gradients = [torch.cat([x.flatten() for x in of]) for of in found]
    assert 0 < (gradients[0] - gradients[1]).norm() <= torch.finfo(torch.bfloat16).eps * gradients[0].norm()


def test_full_checkpointing_is_given_one_tensor_of_a_block(monkeypatch):
    """The residual stream, which is kept; biases are small."""
    given, tokens, model = [], tokens_of(2, 40), build()
    for block in model.h:
        block.activation_checkpointing = "full"

    def recorded(function, *inputs, **options):
        given.append(sum(isinstance(x, torch.Tensor) and x.ndim > 1 for x in inputs))
        return checkpoint(function, *inputs, **options)

    monkeypatch.setattr(checkpointing, "checkpoint", recorded)
    model(tokens, tokens).backward()
    assert given == [1] * len(model.h)


@pytest.mark.parametrize("attention", ["sdpa", "flash2"])
def test_selective_checkpointing_keeps_no_result_of_gelu(attention):
    """Counted in what autograd saves: 4 n_embd numbers a token and block less, and nothing more."""

    def saved_bytes(kind: str) -> int:
        model, sizes = build(attention), {}
        for block in model.h:
            block.activation_checkpointing = kind

        def pack(x: torch.Tensor) -> torch.Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = model(tokens, tokens)  # alive, so that no storage takes the place of another
        loss.backward()
        return sum(sizes.values())

    tokens = tokens_of(2, 40)
    shape = build(attention).config
    assert saved_bytes("none") - saved_bytes("selective") == shape.n_layer * tokens.numel() * 4 * shape.n_embd * 4


@pytest.mark.parametrize(
    ("clock", "layers"),
    [
        pytest.param(Cpu(), 4, marks=pytest.mark.slow, id="cpu"),
        pytest.param(Gpu(), 12, marks=pytest.mark.gpu, id="gpu"),
    ],
)
def test_a_compiled_model_recomputes_one_block_at_a_time(clock, layers):
    """If 4 blocks were recomputed at once, the peak would be 89 % of the peak without checkpointing, and not 61 %."""
    tokens = tokens_of(8, 192).to(clock.device)

    def peak(kind: str, compiled: bool) -> int:
        model = build("flash2", n_layer=layers).to(clock.device)
        for block in model.h:
            block.activation_checkpointing = kind
        called = torch.compile(model) if compiled else model

        def step() -> None:
            with torch.autocast(clock.device, torch.bfloat16):
                loss = called(tokens, tokens)
            loss.backward()

        return clock.added_peak(step)

    assert peak("full", compiled=True) <= 1.05 * peak("full", compiled=False) <= 0.7 * peak("none", compiled=False)
