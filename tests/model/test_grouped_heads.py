"""model.n_kv_head: several query heads that share a head of keys and values."""

import pytest
import torch

from errors import UserError
from model.attention import (
    BUILT_IN,
    VARIANTS,
    AttentionConfig,
    CustomConfig,
    SdpaConfig,
    build_attention,
    check_attention,
)
from model.generate import generate
from model.gpt2 import GPT2, KeyValueCache, ModelConfig
from model.huggingface import read_config, save_pretrained
from trainer.checkpoint.load import check_resumable

SHAPE = {"n_layer": 2, "n_head": 4, "n_embd": 64, "context_length": 160, "vocab_size": 101}


def config_of(variant: str) -> AttentionConfig:
    """Return a variant that computes all pairs of 160 tokens: the butterfly of two blocks leaves none out."""
    return VARIANTS[variant](**({"window": 2048} if variant == "local" else {}))


def build(variant: str, n_kv_head: int | None, **changes) -> GPT2:
    """Return a model with weights so large that attention is far from uniform, and every bias has an effect."""
    torch.manual_seed(0)
    model = GPT2(ModelConfig(**SHAPE | {"n_kv_head": n_kv_head} | changes), build_attention(config_of(variant)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2).add_("ln_" in name and name.endswith("weight"))
    return model


def with_own_heads(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return c_attn's weight or bias for as many key heads as query heads: each shared head is repeated."""
    q, k, v = x.unflatten(0, (4 + 2 * kv_heads, 16)).split((4, kv_heads, kv_heads))
    copies = [head for head in range(kv_heads) for _ in range(4 // kv_heads)]
    return torch.cat([q, k[copies], v[copies]]).flatten(0, 1)


@pytest.mark.parametrize(("variant", "n_kv_head"), [("flash2", 1), *((variant, 2) for variant in BUILT_IN)])
def test_loss_and_gradients_are_those_of_repeated_key_heads_with_naive_attention_in_fp64(variant, n_kv_head):
    model, reference = build(variant, n_kv_head), build("naive", None).double()
    expanded = {
        name: (with_own_heads(x, n_kv_head) if "c_attn" in name else x).detach().double().requires_grad_()
        for name, x in model.named_parameters()
    }
    tokens = torch.randint(101, (2, 151))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    expected = torch.func.functional_call(reference, expanded, (inputs, targets))
    loss = model(inputs, targets)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    for name, parameter in model.named_parameters():
        gradient = expanded[name].grad
        if "c_attn" in name:  # the gradient of a shared head is the sum over its copies
            rows = with_own_heads(torch.arange(len(parameter)), n_kv_head)
            gradient = torch.zeros(parameter.shape, dtype=torch.float64).index_add(0, rows, gradient)
        assert (parameter.grad - gradient).norm() < 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("variant", BUILT_IN)
def test_a_smaller_cache_gives_the_logits_of_reading_at_once(variant):
    model, tokens = build(variant, 2).eval(), torch.randint(101, (2, 20))
    cache = KeyValueCache(model.config, 2, torch.device("cpu"), torch.float32)
    assert cache.kv.shape == (2, 2, 2, 160, 2, 16)
    with torch.no_grad():
        pieces = [model(piece, cache=cache) for piece in tokens.split(1, dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), rtol=1e-4, atol=1e-4)


def test_sampling_past_the_context_is_reading_from_scratch():
    model = build("flash2", 1, context_length=12).eval()
    torch.nn.init.normal_(model.wpe.weight)
    found = list(generate(model, [3, 5], max_tokens=11, temperature=0, generator=torch.Generator()))
    text = [3, 5]
    with torch.no_grad():
        for _ in range(11):
            text.append(model(torch.tensor([text[-12:]]))[0, -1].argmax().item())
    assert found == text[2:] and len(set(found)) > 3


def test_as_many_key_heads_as_query_heads_change_no_bit():
    plain, explicit = build("flash2", None), build("flash2", 4)
    tokens = torch.randint(101, (2, 41))
    for model in (plain, explicit):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    for (name, a), b in zip(plain.named_parameters(), explicit.parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize(("n_kv_head", "saved"), [(12, 0), (4, 9_449_472), (1, 12_993_024)])
def test_the_projection_of_gpt2_loses_the_columns_of_the_missing_heads(n_kv_head, saved):
    """12 layers x 2 x (12 - G) heads x 64 columns x (768 weights + 1 bias)."""
    config = ModelConfig(n_kv_head=n_kv_head, vocab_size=50257)
    with torch.device("meta"):
        model = GPT2(config, build_attention(config_of("flash2")))
    assert model.h[0].attn.c_attn.weight.shape == ((12 + 2 * n_kv_head) * 64, 768)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808 + 47 * 768 - saved


@pytest.mark.parametrize(
    ("n_head", "n_kv_head", "remedy"),
    [(12, 5, "1, 2, 3, 4, 6 or 12"), (12, 24, "1, 2, 3, 4, 6 or 12"), (12, 0, "1, 2, 3, 4, 6 or 12"), (1, -1, "1")],
)
def test_a_number_that_does_not_divide_the_heads_is_refused(n_head, n_kv_head, remedy):
    with pytest.raises(UserError) as refusal:
        ModelConfig(n_head=n_head, n_kv_head=n_kv_head)
    assert str(refusal.value) == f"model.n_kv_head={n_kv_head} does not divide model.n_head={n_head}; use {remedy}"


def test_a_checkpoint_keeps_its_key_heads_and_an_older_one_has_as_many_as_query_heads():
    saved = {"path": "this", "tokenizer": "byte", "model_config": vars(ModelConfig(**SHAPE, n_kv_head=2))}
    check_resumable(saved, saved["model_config"], "byte")
    with pytest.raises(UserError, match="model.n_kv_head=4, but checkpoint.resume=this has 2; set model.n_kv_head=2"):
        check_resumable(saved, vars(ModelConfig(**SHAPE)), "byte")
    older = dict(vars(ModelConfig(**SHAPE)))
    del older["n_kv_head"]
    for n_kv_head in (None, 4):
        check_resumable(saved | {"model_config": older}, vars(ModelConfig(**SHAPE, n_kv_head=n_kv_head)), "byte")


def without_grouped_heads(q, k, v, *, causal, scale):
    """Attend with as many key heads as query heads only."""
    return ((q * scale) @ k.mT @ v)[:, :, : k.shape[2]] + 0 * (q + k)


def test_a_function_that_cannot_share_heads_is_refused_before_training():
    config = CustomConfig(function=f"{__name__}:without_grouped_heads")
    options = {"head_dim": 16, "dtype": torch.float32, "dropout_p": 0.0, "context_length": 64}
    check_attention(config, device=torch.device("cpu"), **options)
    named = "with head_dim 16, 3 query heads per key head.*such as naive, sdpa or flash2, or set model.n_kv_head=null"
    with pytest.raises(UserError, match=named):
        check_attention(config, device=torch.device("cpu"), groups=3, **options)
    for variant in BUILT_IN:
        check_attention(config_of(variant), device=torch.device("cpu"), groups=3, sampling=True, **options)


def test_hugging_faces_gpt2_neither_takes_nor_gives_shared_heads(tmp_path):
    model = build("naive", 2)
    with pytest.raises(UserError, match="model.n_kv_head=2 is below model.n_head=4, .* cannot hold; use sample.py"):
        save_pretrained(model.config, model.state_dict(), tmp_path / "new", eot=0)
    assert not (tmp_path / "new").exists()
    save_pretrained(ModelConfig(**SHAPE), build("naive", None).state_dict(), tmp_path / "new", eot=0)
    for n_kv_head in (None, 4):
        read_config(tmp_path / "new", ModelConfig(**SHAPE, n_kv_head=n_kv_head))
    with pytest.raises(UserError, match="model.n_kv_head=2 contradicts the 4 key heads of model.pretrained=.*leave"):
        read_config(tmp_path / "new", ModelConfig(**SHAPE, n_kv_head=2))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [VARIANTS["flash2"](), VARIANTS["flash1"](), VARIANTS["flex"](), SdpaConfig(backend="flash")],
    ids=lambda config: config.name,
)
def test_a_gpu_trains_shared_heads_like_naive_attention_in_fp32(config):
    shape = ModelConfig(**SHAPE | {"n_embd": 256, "n_kv_head": 2})
    tokens = torch.randint(101, (4, 129), device="cuda")
    gradients = []
    for attention, precise in ((VARIANTS["naive"](), True), (config, False)):
        torch.manual_seed(0)
        model = GPT2(shape, build_attention(attention)).cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=not precise):
            model(tokens[:, :-1], tokens[:, 1:]).backward()
        gradients.append(model.h[0].attn.c_attn.weight.grad)
    assert (gradients[1] - gradients[0]).norm() < 0.03 * gradients[0].norm()
