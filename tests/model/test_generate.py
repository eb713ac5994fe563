import math
from collections import Counter

import pytest
import torch
from torch import nn

from errors import UserError
from model.attention import EXACT, VARIANTS, build_attention
from model.generate import draw, generate, restrict
from model.gpt2 import GPT2, ModelConfig


def build(context_length: int, attention: str = "naive") -> GPT2:
    """Return a small model whose likeliest token depends strongly on all tokens before it."""
    torch.manual_seed(0)
    config = ModelConfig(n_layer=2, n_head=2, n_embd=32, context_length=context_length, vocab_size=101)
    model = GPT2(config, build_attention(VARIANTS[attention]())).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.3)
    nn.init.normal_(model.wpe.weight, std=1.0)
    return model


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def continue_from_scratch(model: GPT2, prompt: list[int], max_tokens: int) -> list[int]:
    """Generate greedily and read all visible text again for every token. A full context is cut to its second half."""
    text, start = list(prompt), max(0, len(prompt) - model.config.context_length)
    for _ in range(max_tokens):
        seen = text[start:]
        with torch.no_grad():
            text.append(model(torch.tensor([seen]))[0, -1].argmax().item())
        if len(seen) == model.config.context_length:
            start = len(text) - max(1, model.config.context_length // 2)
    return text[len(prompt) :]


@pytest.mark.parametrize("attention", EXACT)
@pytest.mark.parametrize(
    ("context_length", "prompt_length"),
    [(64, 5), (12, 1), (12, 12), (12, 17), (9, 4), (1, 3)],
    ids=[
        "within the context",
        "from one token past the context",
        "from a full context",
        "from more than the context holds",
        "past an odd context",
        "with a context of one",
    ],
)
def test_a_cached_continuation_is_the_one_read_from_scratch(attention, context_length, prompt_length):
    model = build(context_length, attention)
    prompt = [(7 * i + 3) % 101 for i in range(prompt_length)]
    found = list(generate(model, prompt, max_tokens=30, temperature=0, generator=seeded()))
    assert found == continue_from_scratch(model, prompt, 30)
    assert len(set(found)) > 5 or context_length == 1, "a model that repeats itself would prove nothing"


def positions_read(model: GPT2, prompt: list[int], max_tokens: int) -> list[int]:
    """Return the number of tokens in each forward pass."""
    read = []
    handle = model.register_forward_pre_hook(lambda module, args: read.append(args[0].numel()))
    list(generate(model, prompt, max_tokens=max_tokens, temperature=0, generator=seeded()))
    handle.remove()
    return read


def test_within_the_context_every_token_is_read_once():
    assert positions_read(build(64), [1, 2, 3], 20) == [3] + [1] * 19


def test_beyond_the_context_a_token_costs_two_positions_on_average():
    """With a context of 16, a cycle of 9 tokens reads 8 positions at once and then 8 single ones."""
    read = positions_read(build(16), list(range(16)), 1 + 9 * 10)
    assert read == [16] + ([8] + [1] * 8) * 10


def test_generation_ends_before_the_end_of_text_token():
    model = build(64)
    free = list(generate(model, [5], max_tokens=30, temperature=0, generator=seeded()))
    stop = free[12]
    stopped = generate(model, [5], max_tokens=30, temperature=0, generator=seeded(), stop=stop)
    assert list(stopped) == free[: free.index(stop)]


def test_tokens_beyond_the_tokenizers_vocabulary_are_not_drawn():
    model = build(64)
    free = list(generate(model, [5], max_tokens=30, temperature=0, generator=seeded()))
    known = max(free)
    text = list(generate(model, [5], max_tokens=60, temperature=5.0, generator=seeded(), vocab_size=known))
    assert max(text) < known <= max(free)


def test_a_seed_repeats_its_text_and_another_gives_another():
    model = build(64)

    def text(seed: int, **options) -> list[int]:
        return list(generate(model, [5], max_tokens=20, temperature=1.0, generator=seeded(seed), **options))

    torch.manual_seed(1)
    first = text(7)
    torch.manual_seed(2)
    assert text(7) == first
    assert text(8) != first
    assert text(7, top_k=3, top_p=0.9) == text(7, top_k=3, top_p=0.9)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"top_p": 1e-300}], ids=str)
def test_a_choice_among_one_is_greedy(options):
    model = build(16)
    greedy = list(generate(model, [5], max_tokens=20, temperature=0, generator=seeded()))
    assert list(generate(model, [5], max_tokens=20, temperature=1.5, generator=seeded(), **options)) == greedy


def allowed(logits: torch.Tensor, top_k: int | None = None, top_p: float | None = None) -> set[int]:
    restricted = restrict(logits, top_k, top_p)
    kept = restricted > -math.inf
    assert torch.equal(restricted[kept], logits[kept]), "what stays keeps its logit"
    return set(kept.nonzero().flatten().tolist())


PROBABILITIES = torch.tensor([0.15, 0.5, 0.05, 0.3])


@pytest.mark.parametrize(
    ("top_p", "tokens"),
    [(0.01, {1}), (0.49, {1}), (0.51, {1, 3}), (0.79, {1, 3}), (0.81, {0, 1, 3}), (0.96, {0, 1, 2, 3})],
)
def test_top_p_keeps_the_fewest_likeliest_that_reach_it(top_p, tokens):
    """The cumulated probabilities are 0.5, 0.8, 0.95 and 1."""
    assert allowed(PROBABILITIES.log() + 3, top_p=top_p) == tokens


@pytest.mark.parametrize(
    ("top_k", "tokens"), [(1, {1}), (2, {1, 3}), (3, {0, 1, 3}), (4, {0, 1, 2, 3}), (200, {0, 1, 2, 3})]
)
def test_top_k_keeps_the_k_likeliest(top_k, tokens):
    assert allowed(PROBABILITIES.log() + 3, top_k=top_k) == tokens


def test_top_p_of_1_keeps_every_token():
    """Rounded sums of many probabilities pass 1 early. This must not remove the last tokens."""
    for seed in range(5):
        logits = torch.randn(50_257, generator=seeded(seed))
        assert len(allowed(logits, top_p=1.0)) == 50_257


def test_top_k_keeps_exactly_k_where_logits_tie():
    """GPT-2's bf16 logits lie between -128 and -32, in steps of 1/4 or 1/2, so the likeliest tokens often tie."""
    assert len(allowed(torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0]), top_k=1)) == 1


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(1.0, [0.15, 0.5, 0.05, 0.3]), (0.5, [0.0225, 0.25, 0.0025, 0.09]), (0, [0, 1, 0, 0]), (1e-300, [0, 1, 0, 0])],
    ids=["as they are at 1", "squared at 0.5", "the likeliest at 0", "and at what is nearly 0"],
)
def test_tokens_come_with_their_probabilities(temperature, expected):
    generator, draws = seeded(), 4000
    counts = Counter(draw(PROBABILITIES.log(), temperature, None, None, generator) for _ in range(draws))
    for token, weight in enumerate(expected):
        share = weight / sum(expected)
        assert counts[token] / draws == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / draws))


@pytest.mark.parametrize("attention", EXACT)
def test_under_autocast_the_cache_takes_its_dtype(attention):
    model = build(16, attention)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        text = list(generate(model, [1, 2, 3], max_tokens=30, temperature=0, generator=seeded()))
    assert len(text) == 30
    assert max(text) < 101


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(temperature, weight):
    """They once ended in torch's error about probabilities, or at temperature 0 in a text of token 0."""
    model = build(16)
    nn.init.constant_(model.ln_f.weight, weight)
    with pytest.raises(UserError, match="the model's logits are not finite; give another checkpoint"):
        list(generate(model, [5], max_tokens=3, temperature=temperature, generator=seeded()))
