"""GPT-2 itself. That its arithmetic is GPT-2's is shown against transformers, in test_huggingface.py."""

import math
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import nn

import conf
from conf.schema import register
from errors import UserError
from model.attention import EXACT, VARIANTS, Attention, Flash2Config, build_attention
from model.gpt2 import GPT2, KeyValueCache, ModelConfig

with torch.device("meta"):
    torch.empty(0)  # torch lists what makes tensors at first use; the poisoned torch.empty of a test must not be in it

SHAPE = {"n_layer": 2, "n_head": 3, "n_embd": 48, "context_length": 192, "vocab_size": 211}


def build(attention: str = "naive", **changes) -> GPT2:
    torch.manual_seed(0)
    return GPT2(ModelConfig(**SHAPE | changes), build_attention(VARIANTS[attention]()))


def sharpen(model: GPT2) -> GPT2:
    """Draw weights so large that attention is far from uniform, and every bias and LayerNorm has an effect."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            nn.init.normal_(parameter, std=0.2)
            if "ln_" in name and name.endswith("weight"):
                parameter += 1
    return model


def tokens_of(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randint(SHAPE["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def composed(option: str) -> ModelConfig:
    register()
    with initialize_config_dir(str(Path(conf.__file__).parent), version_base="1.3"):
        config = compose("config", [f"model={option}", "model.vocab_size=50257"])
    return OmegaConf.to_object(config.model)


@pytest.mark.parametrize(
    ("option", "published"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        # 50,257 C + T C + L (12 C^2 + 13 C) + 2 C
        ("gpt3-1.3b", 102_926_336 + 4_194_304 + 24 * (50_331_648 + 26_624) + 4_096),
        ("gpt3-2.7b", 128_657_920 + 5_242_880 + 32 * (78_643_200 + 33_280) + 5_120),
    ],
)
def test_a_named_model_has_the_published_number_of_parameters(option, published):
    config = composed(option)
    with torch.device("meta"):
        model = GPT2(config, build_attention(Flash2Config()))
    assert model.wte.weight.shape[0] == 50_304, "50,257 tokens and 47 rows of padding"
    count = sum(p.numel() for p in model.parameters()) - 47 * config.n_embd
    assert count == published
    assert model.n_params() == published + 47 * config.n_embd - config.context_length * config.n_embd


@pytest.mark.parametrize(
    ("option", "heads", "head_dim", "context_length"),
    [
        ("gpt2", 12, 64, 1024),
        ("gpt2-medium", 16, 64, 1024),
        ("gpt2-large", 20, 64, 1024),
        ("gpt2-xl", 25, 64, 1024),
        ("gpt3-1.3b", 16, 128, 2048),
        ("gpt3-2.7b", 32, 80, 2048),
    ],
)
def test_a_named_model_has_the_published_heads_and_context(option, heads, head_dim, context_length):
    config = composed(option)
    assert (config.n_head, config.head_dim, config.context_length) == (heads, head_dim, context_length)


def test_fresh_weights_have_deviation_0_02_and_residual_projections_less():
    """With 8 layers the projections into the residual stream are scaled by 1 / sqrt(2 x 8) = 1/4, to 0.005."""
    model = build(n_layer=8, n_head=4, n_embd=64, vocab_size=1000)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            expected = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
            assert torch.all(parameter == expected), name
            continue
        std = 0.005 if name.endswith("c_proj.weight") else 0.02
        count = parameter.numel()
        assert abs(parameter.mean()) < 5 * std / math.sqrt(count), name
        assert parameter.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * count)), name


def test_a_fresh_model_knows_nothing():
    model, tokens = build(), tokens_of(4, 65)
    assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(math.log(211), abs=0.05)


@pytest.mark.parametrize("attention", EXACT)
def test_a_token_sees_only_those_before_it(attention):
    model, tokens = sharpen(build(attention)), tokens_of(2, 150)
    changed = tokens.clone()
    changed[:, 130] = (changed[:, 130] + 1) % 211
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :130], before[:, :130])
    differs = (after - before).abs().amax(dim=(0, 2)) > 1e-3
    assert differs[130:].all()


@pytest.mark.parametrize("attention", EXACT)
def test_logits_loss_and_every_gradient_agree_with_naive_attention_in_double_precision(attention):
    tokens = tokens_of(2, 151)
    reference, model = sharpen(build("naive")).double(), sharpen(build(attention))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    assert relative_error(model(inputs).double(), reference(inputs)) < 1e-5
    loss, expected = model(inputs, targets), reference(inputs, targets)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    gradients = dict(reference.named_parameters())
    errors = {name: relative_error(p.grad.double(), gradients[name].grad) for name, p in model.named_parameters()}
    assert max(errors.values()) < 1e-5, errors


def test_rows_that_pad_the_vocabulary_get_no_logits_and_no_gradient():
    model, tokens = sharpen(build()), tokens_of(2, 20)
    with torch.no_grad():
        model.wte.weight[211:] = 100.0  # would be the likeliest or the unlikeliest by far
    logits = model(tokens[:, :-1])
    assert logits.shape == (2, 19, 211)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    likelihood = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])
    torch.testing.assert_close(loss, -likelihood.mean())
    loss.backward()
    assert torch.all(model.wte.weight.grad[211:] == 0)
    assert torch.all(model.wte.weight.grad[:211].abs().sum(1) > 0)


@pytest.mark.parametrize("attention", EXACT)
def test_dropout_acts_in_training_alone(attention):
    dropping, plain = (sharpen(build(attention, dropout=dropout)) for dropout in (0.3, 0.0))
    tokens = tokens_of(2, 40)
    with torch.no_grad():
        assert torch.equal(dropping.eval()(tokens), plain.eval()(tokens))
        assert torch.equal(plain.train()(tokens), plain.eval()(tokens))
        dropping.train()
        draws = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            draws.append(dropping(tokens))
    assert torch.equal(draws[0], draws[1])
    assert not torch.allclose(draws[0], draws[2])


def test_dropout_falls_on_embeddings_attention_and_both_residual_branches():
    asked = []

    class Recorded(Attention):
        def __call__(self, q, k, v, *, causal, scale, dropout_p):
            asked.append(dropout_p)
            return v

    model = sharpen(GPT2(ModelConfig(**SHAPE | {"dropout": 0.3}), Recorded()))
    for block in model.h:  # so that what is dropped there is the bias
        nn.init.zeros_(block.attn.c_proj.weight)
        nn.init.zeros_(block.mlp.c_proj.weight)
    dropped = {}

    def record(name):
        def hook(module, inputs, output):
            dropped[name] = (output == 0).float().mean().item()
            kept = output != 0
            torch.testing.assert_close(output[kept], inputs[0][kept] / (0.7 if module.training else 1))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(record(name))
    model.train()(tokens_of(8, 100))
    assert asked == [0.3, 0.3]
    assert len(dropped) == 1 + 2 * 2
    of = 8 * 100 * 48
    assert list(dropped.values()) == pytest.approx([0.3] * 5, abs=5 * math.sqrt(0.3 * 0.7 / of))
    asked.clear()
    dropped.clear()
    model.eval()(tokens_of(1, 4))
    assert asked == [0, 0]
    assert not any(dropped.values())


@pytest.mark.parametrize("attention", EXACT)
@pytest.mark.parametrize("chunk", [1, 7], ids=["one token at a time", "seven tokens at a time"])
def test_reading_in_pieces_with_a_cache_gives_the_logits_of_reading_at_once(attention, chunk):
    model, tokens = sharpen(build(attention)), tokens_of(2, 50)
    cache = KeyValueCache(model.config, 2, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        if attention == "sdpa" and chunk > 1:
            model(tokens[:, :chunk], cache=cache)
            with pytest.raises(ValueError, match="attention=flash2 or naive"):
                model(tokens[:, chunk : 2 * chunk], cache=cache)
            return
        pieces = [model(piece, cache=cache) for piece in tokens.split(chunk, dim=1)]
        assert cache.length == 50
        torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"n_layer": 0}, "model.n_layer=0"),
        ({"n_head": 0}, "model.n_head=0"),
        ({"n_embd": -48}, "model.n_embd=-48"),
        ({"context_length": 0}, "model.context_length=0"),
        ({"n_head": 5}, "model.n_head=5"),
        ({"dropout": 1.0}, "model.dropout=1.0"),
        ({"dropout": -0.1}, "model.dropout=-0.1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_impossible_shape_is_refused_by_name(change, key):
    with pytest.raises(UserError, match=key):
        ModelConfig(**SHAPE | change)


@pytest.mark.parametrize(("vocab_size", "padded"), [(50_257, 50_304), (257, 320), (64, 64), (65, 128), (1, 64)])
def test_the_vocabulary_is_padded_to_a_multiple_of_64(vocab_size, padded):
    assert ModelConfig(vocab_size=vocab_size).padded_vocab_size == padded


@pytest.mark.parametrize("attention", EXACT)
def test_a_document_is_blind_to_those_before_it(attention):
    """The logits after the cut do not change with the tokens before it; without the cut they do."""
    model = sharpen(build(attention)).eval()
    tokens, other = torch.randint(0, 211, (2, 2, 12))
    changed = torch.cat([other[:, :5], tokens[:, 5:]], 1)
    cuts = torch.tensor([0, 5, 12, 17, 24], dtype=torch.int32)
    for options, same in (({"cu_seqlens": cuts}, True), ({}, False)):
        before, after = (model(x, **options)[:, 5:] for x in (tokens, changed))
        assert torch.allclose(before, after, atol=1e-5) is same
