"""The model with its linear layers in FP8 beside the same model without."""

import pytest
import torch
from torch import Tensor

from model.attention import VARIANTS, build_attention
from model.gpt2 import CHECKPOINTING, GPT2, ModelConfig
from trainer.scales import ScaleUpdates

BF16 = torch.bfloat16
CONFIG = ModelConfig(n_layer=1, n_head=2, n_embd=32, context_length=32, vocab_size=65)


def build(fp8: bool = True, checkpointing: str = "none", attention: str = "flash2") -> GPT2:
    torch.manual_seed(0)
    model = GPT2(CONFIG, build_attention(VARIANTS[attention]()), checkpointing, fp8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.02)  # so that a bias left out is seen
    ScaleUpdates(model)
    return model


def outcome(model: GPT2, call=None) -> dict[str, Tensor]:
    """Return the loss and all gradients of a batch."""
    tokens = torch.randint(65, (4, 33), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", BF16):
        loss = (model if call is None else call)(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return {"loss": loss.detach()} | {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("attention", ["flash2", "naive"])
def test_loss_and_gradients_are_close_to_the_model_without_fp8(attention):
    found, wanted = (outcome(build(fp8, attention=attention)) for fp8 in (True, False))
    losses = found.pop("loss").item(), wanted.pop("loss").item()
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=2e-3)
    for name, gradient in found.items():
        cosine = torch.cosine_similarity(gradient.flatten().double(), wanted[name].flatten().double(), 0)
        assert cosine > 0.97 and 0.9 < gradient.norm() / wanted[name].norm() < 1.1, name
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            assert cosine < 0.9999, f"{name} does not come from FP8"


def test_activation_checkpointing_changes_no_gradient_and_no_statistic():
    models = [build(checkpointing=checkpointing) for checkpointing in CHECKPOINTING]
    outcomes = [outcome(model) for model in models]
    for found in outcomes[1:]:
        assert all(torch.equal(gradient, found[name]) for name, gradient in outcomes[0].items())
    updates = [ScaleUpdates(model) for model in models]
    for of_model in updates:
        of_model.update()
    assert updates[0].metrics() == updates[1].metrics() == updates[2].metrics()


@pytest.mark.parametrize("checkpointing", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_the_compiled_model_has_no_graph_break_and_computes_the_same(checkpointing):
    eager, model = (build(checkpointing=checkpointing) for _ in range(2))
    found, wanted = outcome(model, torch.compile(model, backend="aot_eager", fullgraph=True)), outcome(eager)
    assert all(torch.equal(gradient, found[name]) for name, gradient in wanted.items())
    updates = [ScaleUpdates(of) for of in (model, eager)]
    for of_model in updates:
        of_model.update()
    assert updates[0].metrics() == updates[1].metrics() and torch.equal(updates[0].peaks, updates[1].peaks)


@pytest.mark.parametrize(("checkpointing", "of_bf16"), [("none", 32), ("selective", 24)])
def test_a_block_keeps_a_byte_for_each_input_and_weight(checkpointing, of_bf16):
    """Count what autograd saves: 23 C bytes a token, not 32 C or 24 C; and 12 C² for the weights, not 24 C²."""

    def saved_bytes(fp8: bool, sequences: int) -> int:
        model, sizes = build(fp8, checkpointing), {}
        own = {parameter.data_ptr() for parameter in model.parameters()}

        def pack(x: Tensor) -> Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        tokens = torch.zeros((sequences, 32), dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.autocast("cpu", BF16):
            loss = model(tokens, tokens)  # alive, so that no storage takes the place of another
        loss.backward()
        return sum(size for place, size in sizes.items() if place not in own)

    bf16, fp8 = ([saved_bytes(fp8, sequences) for sequences in (2, 4)] for fp8 in (False, True))
    more = (bf16[1] - bf16[0]) - (fp8[1] - fp8[0])
    assert more == 2 * 32 * CONFIG.n_embd * (of_bf16 - 23)
    assert bf16[0] - fp8[0] - more == pytest.approx(12 * CONFIG.n_embd**2, rel=0.01)


def test_evaluation_and_checkpoints_know_nothing_of_fp8():
    ours, other, tokens = build().eval(), build(fp8=False).eval(), torch.arange(64).view(2, 32)
    with torch.no_grad(), torch.autocast("cpu", BF16):
        assert torch.equal(ours(tokens), other(tokens))
        assert not torch.equal(ours.train()(tokens), other(tokens))
    weights = other.state_dict()
    assert ours.state_dict().keys() == weights.keys()
    ours.load_state_dict(weights)
