"""The lines and commands that a run prints at its start and its end."""

import re
from pathlib import Path

import pytest

from tests.e2e import printed_commands, rows, run, train

pytest_plugins = ["tests.e2e"]


@pytest.mark.parametrize("attention", ["flash2", "local"])
def test_the_printed_commands_use_the_model(workplace, attention):
    """They can be pasted into a shell, also if the folder needs quotes, and fit into the lines of a narrow window."""
    own = ["attention.window=8"] if attention == "local" else []
    settings = f"attention={attention}", *own, "train.max_steps=6", "train.eval_interval=2", "data.document_mask=true"
    outcome = train('"odd/a=b, c"', *settings, "optimizer.lr=0.3").ok()
    assert max(map(len, outcome.out.splitlines())) <= 100 and "\x1b" not in outcome.out
    sampling, evaluation = printed_commands(outcome.out, "next")
    assert (sampling[0], Path(sampling[1]).name) == ("python", "sample.py")
    assert len(run("sample.py", *sampling[2:], "max_tokens=5", "device=cpu").ok().out) > 1
    found = run("evaluate.py", *evaluation[2:], "device=cpu").ok().out
    assert "data.tokenizer=byte" in evaluation and "data.document_mask=true" in evaluation and "perplexity" in found


def test_start_and_end_of_a_run(workplace):
    out = train("run", "train.max_steps=6", "train.eval_interval=2", "train.grad_accumulation=3").ok().out
    model, data, settings = out.splitlines()[:3]
    assert re.fullmatch(
        r"model       [\d.]+k parameters, 2 layers x 32, 2 heads, context 32, flash2 \(PyTorch\) attention, fp32", model
    )
    batch = "batch 2 sequences x 32 tokens x 3 micro-steps = 192 tokens"
    assert re.fullmatch(rf"data        tokens, [\d.]+k byte tokens, {batch}", data)
    assert settings == "run         AdamW, lr 0.01, 6 steps, CPU, run"
    losses = {row["step"]: row["val/loss"] for row in rows("run") if "val/loss" in row}
    best = min(losses, key=losses.get)
    assert re.search(r"\nfinished    6 steps, 1,152 tokens, time 0:0\d:\d\d\n", out)
    assert f"\nloss        best validation {losses[best]:.4f} (perplexity " in out
    last = rows("run")[-1]["train/loss"]
    assert f") at step {best}, training {last:.4f} at step 6\noutput      run\n" in out
    assert "\ncheckpoint  run/checkpoints/step-00000006.pt\n" in out


def test_a_resumed_run_remembers_its_best_step(workplace):
    train("run", "train.max_steps=4", "train.eval_interval=2").ok()
    best = re.search(r"best validation \S+ \(perplexity \S+\) at step (\d+)", train(
        "run", "train.max_steps=6", "train.eval_interval=99", "optimizer.lr=1e-9", "optimizer.min_lr=0",
        "train.batch_size=1", "checkpoint.dir=run/checkpoints", "checkpoint.resume=auto").ok().out)  # fmt: skip
    losses = {row["step"]: row["val/loss"] for row in rows("run") if "val/loss" in row}
    assert int(best[1]) == min(losses, key=losses.get)
