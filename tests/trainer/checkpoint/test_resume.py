"""A resumed run: the same state, the same random draws, and the same model."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from data.loader import TrainLoader
from errors import UserError
from model.attention import NaiveConfig, build_attention
from model.gpt2 import GPT2, ModelConfig
from tests.trainer.checkpoint.states import small
from trainer.build import fix_randomness
from trainer.checkpoint.load import check_resumable, load
from trainer.checkpoint.single import SingleFileStore
from trainer.config import TrainConfig
from trainer.optimizer import OptimizerConfig, build_optimizer, clip_gradients, set_learning_rate
from trainer.state import TrainState, random_state, set_random_state

SHAPE = ModelConfig(n_layer=1, n_head=2, n_embd=32, context_length=8, vocab_size=65, dropout=0.1)


@contextmanager
def training(seed: int, loader_seed: int = 5, n_kv_head: int | None = None) -> Iterator[TrainState]:
    """Yield the state of a small model with dropout. Its loss is scaled, so that the scaler has a state."""
    torch.manual_seed(seed)
    model = GPT2(replace(SHAPE, n_kv_head=n_kv_head), build_attention(NaiveConfig())).train()
    tokens = (np.arange(300) * 7 % 65).astype(np.uint16)
    with TrainLoader(
        tokens, batch_size=2, context_length=8, seed=loader_seed, device="cpu", vocab_size=65, name="train.bin"
    ) as loader:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        yield TrainState(model, build_optimizer(model, OptimizerConfig()), scaler, loader, "byte")


def advance(state: TrainState, steps: int) -> list[float]:
    """Train, and return the losses."""
    losses = []
    for _ in range(steps):
        loss = state.model(*state.loader.next_batch())
        state.scaler.scale(loss).backward()
        set_learning_rate(state.optimizer, 0.01)
        clip_gradients(state.optimizer, state.scaler, 1.0)
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad()
        state.step += 1
        losses.append(loss.item())
    return losses


def flat(value, path: str = "") -> dict[str, object]:
    """Return every leaf of nested dicts and lists by its path, with tensors as lists."""
    if isinstance(value, torch.Tensor):
        return {path: (value.dtype, value.tolist())}
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: leaf for name, item in items for key, leaf in flat(item, f"{path}/{name}").items()}
    return {path: value}


@pytest.mark.parametrize("n_kv_head", [None, 1])
def test_a_resumed_run_has_the_same_state_and_continues_to_the_bit(tmp_path, n_kv_head):
    with training(seed=1, n_kv_head=n_kv_head) as first:
        advance(first, 5)
        first.best_loss, first.skipped = 2.5, 3
        saved = flat(first.state_dict())
        SingleFileStore(tmp_path, keep=1).save(first.state_dict())
        uninterrupted = advance(first, 4)
        final = flat(first.state_dict())
    with training(seed=2, n_kv_head=n_kv_head) as second:
        second.load_state_dict(load(tmp_path))
        assert flat(second.state_dict()) == saved
        assert advance(second, 4) == uninterrupted
        assert flat(second.state_dict()) == final
    groups = {path.split("/")[1] for path in saved}
    assert groups >= {"model", "model_config", "optimizer", "scaler", "loader", "tokenizer", "step", "best_loss", "rng"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"n_layer": 3}, "model.n_layer=3, but checkpoint.resume=this has 1; set model.n_layer=1"),
        ({"vocab_size": 99}, "set model.vocab_size=65"),
        ({"context_length": 9}, "but checkpoint.resume=this has 8; set model.context_length=8"),
        ({"context_length": 7}, "set model.context_length=8"),
    ],
)
def test_a_run_of_another_shape_is_not_continued(change, sentence):
    state = small(model_config=vars(SHAPE), path="this")
    check_resumable(state, asdict(replace(SHAPE, dropout=0.0)), "byte")
    with pytest.raises(UserError, match=sentence):
        check_resumable(state, asdict(replace(SHAPE, **change)), "byte")


def test_a_run_on_other_tokens_is_not_continued():
    with pytest.raises(UserError, match="trained on byte tokens, not on gpt2 tokens"):
        check_resumable(small(model_config=vars(SHAPE), path="this"), asdict(SHAPE), "gpt2")


def draws() -> list[float]:
    """Draw from every generator. The odd number of normal draws leaves half of a pair in the generator."""
    python = [random.random(), *(random.gauss(0, 1) for _ in range(3))]
    numpy = [np.random.random(), *np.random.standard_normal(3)]
    return [*python, *numpy, *torch.randn(3).tolist(), torch.rand(()).item()]


def test_the_draws_after_a_restored_state_are_those_after_the_saved_one(tmp_path):
    before = random_state()
    try:
        draws()
        SingleFileStore(tmp_path, keep=1).save(small(rng=[random_state()]))
        expected = draws()
        assert draws() != expected
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        set_random_state(load(tmp_path)["rng"][0])
        assert draws() == expected
    finally:
        set_random_state(before)


def test_the_seed_decides_the_draws_of_every_generator():
    before = random_state()
    try:
        found = []
        for seed in (5, 5, 6):
            fix_randomness(TrainConfig(seed=seed))
            found.append(draws())
        assert found[0] == found[1] and not any(x == y for x, y in zip(found[1], found[2], strict=True))
    finally:
        set_random_state(before)
