"""Runs with precision=fp8. A CPU emulates the arithmetic."""

import math
import re

import pytest
import torch

from tests.e2e import curve, load, rows, run, train, write_tokens
from tests.several import GLOBAL, LOSSES, train_together
from tests.test_broken_steps import replayed, spoil

pytest_plugins = ["tests.e2e"]

LONG = "train.max_steps=6", "checkpoint.interval=3", "checkpoint.keep=9", "train.grad_accumulation=2"
FP8 = ("precision=fp8", *LONG)
METRICS = [f"fp8/{what}_{role}" for what in ("amax", "underflow") for role in ("input", "weight", "gradient")]


def test_a_resumed_run_continues_bit_for_bit(workplace):
    """The scales are part of its state, and the rows have metrics of them."""
    train("whole", *FP8).ok()
    from_3 = "checkpoint.resume=whole/checkpoints/step-00000003.pt", "checkpoint.dir=later"
    train("resumed", *FP8, *from_3, "train.activation_checkpointing=full").ok()
    names = "train/loss", "train/grad_norm", "val/loss", *METRICS
    assert curve("resumed", *names) == curve("whole", *names)[3:]
    assert all(row.keys() >= set(METRICS) and row["fp8/amax_gradient"] > 0 for row in rows("whole"))
    final, resumed = load("whole/checkpoints/step-00000006.pt"), load("later/step-00000006.pt")
    assert final["fp8_scales"] == resumed["fp8_scales"] != load("whole/checkpoints/step-00000003.pt")["fp8_scales"]
    assert final["model"].keys() == resumed["model"].keys()
    assert all(torch.equal(weight, resumed["model"][name]) for name, weight in final["model"].items())
    data = "data=tokens", "data.dir=tokens", "data.tokenizer=byte"
    run("evaluate.py", "checkpoint=whole", *data, "device=cpu").ok()
    run("export.py", "checkpoint=whole", "to=exported").ok()


@pytest.mark.parametrize(("first", "second"), [("bf16", "fp8"), ("fp8", "bf16")])
def test_a_run_can_change_to_fp8_and_back(workplace, first, second):
    train("run", f"precision={first}", *LONG, "train.max_steps=3").ok()
    from_3 = "checkpoint.resume=run/checkpoints", "checkpoint.dir=later"
    outcome = train("run", f"precision={second}", *LONG, *from_3).ok()
    assert f"precision.name {first} -> {second}" in outcome.out
    losses = [loss for _, loss in curve("run", "train/loss")]
    assert len(losses) == 6 and losses[3] < losses[0]
    assert bool(load("later/step-00000006.pt")["fp8_scales"]) == (second == "fp8")
    has_metrics = [METRICS[0] in row for row in rows("run")]
    assert has_metrics == [first == "fp8"] * 3 + [second == "fp8"] * 3


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("model.n_embd=40",), "unlike with model.n_embd=40; choose another model.n_embd, or set precision=bf16"),
        (("model.context_length=24",), "unlike with model.context_length=24; choose another model.context_length"),
        (
            ("attention=naive", "model.n_head=8", "model.n_kv_head=1"),
            "unlike with model.n_kv_head=1; choose another model.n_kv_head",
        ),
    ],
)
def test_sizes_that_are_no_multiples_of_16_are_refused_in_one_sentence(workplace, settings, sentence):
    outcome = train("run", *FP8, *settings)
    assert outcome.code == 2 and len(outcome.err.splitlines()) == 1
    assert "precision=fp8 needs matrices whose sides are multiples of 16" in outcome.err and sentence in outcome.err


@pytest.mark.parametrize("script", ["evaluate.py", "sample.py"])
def test_fp8_is_refused_outside_of_training(workplace, script):
    outcome = run(script, "checkpoint=run", "precision=fp8", "device=cpu")
    assert outcome.code == 2 and "precision=fp8 is for training only; set precision=bf16" in outcome.err


def test_a_recorded_step_is_replayed_in_fp8_with_the_scales_of_its_checkpoint(workplace, monkeypatch):
    often = "precision=fp8", "checkpoint.interval=1", "checkpoint.keep=9", "train.max_steps=4"
    train("whole", *often).ok()
    expected = curve("whole", "train/loss", "train/grad_norm")[3][1:]
    spoil(monkeypatch, math.nan, 4)
    file = re.search(r"python replay.py (record=\S+)", train("run", *often).err).group(1)
    monkeypatch.undo()
    monkeypatch.chdir(workplace)
    result = replayed(run("replay.py", file, "device=cpu"))
    assert result["checkpoint"].endswith("00000003.pt") and (result["loss"], result["grad_norm"]) == expected
    in_bf16 = replayed(run("replay.py", file, "device=cpu", "precision=bf16"))
    assert in_bf16["loss"] != expected[0] and in_bf16["loss"] == pytest.approx(expected[0], rel=0.01)


@pytest.mark.slow
def test_several_processes_train_the_same_model_as_one(tmp_path, monkeypatch):
    """All processes share their largest numbers. Gradients are rounded for each micro-batch, so the bits differ."""
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path / "tokens")
    settings = f"{GLOBAL} precision=fp8 device=cpu train.compile=false"
    train("alone", *settings.split()).ok()
    train_together(2, f"ddp {settings}", f"fsdp {settings} parallel=fsdp")
    for folder in ("ddp", "fsdp"):
        for (step, *ours), (_, *theirs) in zip(curve(folder, *LOSSES), curve("alone", *LOSSES), strict=True):
            assert ours == [value if value is None else pytest.approx(value, rel=0.02) for value in theirs], step
        for ours, theirs in zip(*(curve(where, *METRICS[:2]) for where in (folder, "alone")), strict=True):
            assert ours == pytest.approx(theirs, rel=0.05)
