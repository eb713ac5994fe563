"""bench.training with a user's attention function: which trainers it adds, and the check of the function."""

from functools import partial

import pytest
import torch

from bench.training.__main__ import TrainingSettings, chosen_trainers, run
from bench.training.steps import search
from bench.training.trainers import Trainer, TrainingCell, ours
from errors import UserError
from tests.bench.stopwatch import Stopwatch


def test_own_function_is_measured_beside_the_others():
    settings = TrainingSettings(function="my_module:my_attention")
    chosen = chosen_trainers(settings, TrainingCell("gpt2", 2048, (1,)))
    assert chosen[0].attention == "flash2"
    assert list(map(str, chosen[1:])) == [f"ours:custom:my_module:my_attention{how}" for how in ("", ":eager")]


def test_own_function_trains_like_the_variant_that_it_calls(cell, tmp_path, monkeypatch):
    code = "from kernels.naive.definition import standard_attention\n\n"
    code += (
        "def attention(q, k, v, *, causal, scale):\n    return standard_attention(q, k, v, causal=causal, scale=scale)"
    )
    (tmp_path / "own_kernel.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    losses = []
    for attention in ("naive", "custom:own_kernel:attention"):
        torch.manual_seed(0)
        losses.append(ours(cell, Trainer("ours", attention, False), "cpu").step(2)[0].item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_function_that_computes_something_else_gets_no_time(cell, tmp_path, monkeypatch):
    (tmp_path / "other_kernel.py").write_text("def values(q, k, v, *, causal, scale):\n    return v + 0 * (q + k)")
    monkeypatch.syspath_prepend(tmp_path)
    trainer = Trainer("ours", "custom:other_kernel:values", False)
    rows, best = search(cell, trainer, partial(ours, cell, trainer, "cpu"), Stopwatch())
    assert best is None and [row["status"] for row in rows] == ["failed"]
    assert rows[0]["message"].startswith("out is off by") and rows[0]["ms"] is None


def test_a_function_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match="function=nowhere:attention names module nowhere, which Python does not find"):
        run(TrainingSettings(function="nowhere:attention"))
    with pytest.raises(UserError, match="function=math:sqrt cannot be called as"):
        run(TrainingSettings(function="math:sqrt"))
