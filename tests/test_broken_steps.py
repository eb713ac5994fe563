"""Steps that are not finite, and spikes: skipped, recorded and replayed."""

import itertools
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from model.gpt2 import GPT2, Block
from tests.e2e import curve, largest_file, load, rows, run, train
from tests.test_failures import fill_disk_at
from trainer.checkpoint.files import write_file
from trainer.watch import Watch

pytest_plugins = ["tests.e2e"]

LOSSES = ("train/loss", "train/grad_norm", "val/loss")


def spoil(monkeypatch, factor: float, *calls: int) -> None:
    """Multiply the model's loss by `factor` at the calls with these numbers (the first is 1)."""
    forward, count = GPT2.forward, itertools.count(1)
    monkeypatch.setattr(
        GPT2, "forward", lambda *args, **kw: forward(*args, **kw) * (factor if next(count) in calls else 1)
    )


def within(size: int, function: Callable) -> Callable:
    """Return `function` with files of at most `size` bytes, as on a full disk."""

    def limited(*args):
        with largest_file(size):
            return function(*args)

    return limited


def test_steps_that_are_not_finite_are_skipped_counted_and_told(workplace, monkeypatch):
    spoil(monkeypatch, math.nan, 7, 8)
    outcome = train("run", "train.max_steps=10", "train.on_nan=skip").ok()
    skips = curve("run", "train/skipped_steps")
    assert skips == [(step, max(0, min(step, 8) - 6)) for step in range(1, 11)]
    assert outcome.out.count("the weights did not take this step (train.on_nan=skip") == 2
    assert [row["train/loss"] is None for row in rows("run")] == [step in (7, 8) for step in range(1, 11)]
    state = load("run/checkpoints/step-00000010.pt")
    assert state["skipped"] == 2 and all(weight.isfinite().all() for weight in state["model"].values())
    assert {int(moments["step"]) for moments in state["optimizer"]["state"].values()} == {8}


def test_too_many_steps_in_a_row_that_are_not_finite_stop_the_run(workplace, monkeypatch):
    spoil(monkeypatch, math.nan, *range(3, 12), *range(13, 23))
    outcome = train("run", "train.max_steps=40", "train.on_nan=skip", "train.log_interval=4", "train.eval_interval=99")
    assert outcome.code == 2 and "the loss was nan and the gradient norm nan at step 22;" in outcome.err
    assert "Lower optimizer.lr" in outcome.err and len(outcome.err.splitlines()) == 1
    record = Path(re.search(r"record=(\S+)", outcome.err).group(1))
    again = run("replay.py", f"record={record}", "device=cpu").ok()
    assert "the batch of step 22 with " in again.out and "24.pt (of a later step), flash2 attention" in again.out
    content = json.loads(record.read_text())
    content["loader"]["position"] = -5
    record.write_text(json.dumps(content))
    refused = run("replay.py", f"record={record}", "device=cpu")
    assert (refused.code, refused.err.count("is not the record of a step")) == (2, 1)


@pytest.mark.parametrize(
    ("factor", "last", "advice"),
    [
        (math.nan, 6, "No later step was finite either"),
        (math.inf, 6, "No later step was finite either"),
        (math.nan, 5, "Lower optimizer.lr, or check the data"),
    ],
)
def test_the_advice_depends_on_whether_a_later_step_was_finite(workplace, monkeypatch, factor, last, advice):
    """If none was, the weights have diverged, so the saved state cannot be continued. The run logs step 6."""
    spoil(monkeypatch, factor, *range(3, last + 1))
    outcome = train("run", "train.max_steps=40", "train.log_interval=6", "train.eval_interval=99")
    assert "at step 3; the weights did not take this step. The state is saved in" in outcome.err
    assert f"step-00000006.pt. {advice}" in outcome.err and "python replay.py" in outcome.err


def test_a_resumed_run_goes_on_counting_the_steps_in_a_row_that_are_not_finite(workplace, monkeypatch):
    """The count was not in the checkpoint, so a run that was killed often enough never stopped."""
    spoil(monkeypatch, math.nan, *range(1, 99))
    settings = "train.on_nan=skip", "train.eval_interval=99", "checkpoint.resume=auto"
    train("run", *settings, "train.max_steps=6").ok()
    outcome = train("run", *settings, "train.max_steps=20")
    assert outcome.code == 2 and "the gradient norm nan at step 10;" in outcome.err


def test_the_advice_to_replay_names_the_function_of_the_user(workplace):
    """replay.py needs the function on its command line, because a record cannot name code to import."""
    wrong = "float('nan') if len(q) > 1 else 1"  # the try before the training has one sequence
    kernel = f"def attention(q, k, v, *, causal, scale):\n    return (q + k + v) * ({wrong})\n"
    Path("bad_kernel.py").write_text(kernel)
    outcome = train("run", "attention=custom", "attention.function=bad_kernel:attention", "train.max_steps=2")
    assert re.search(r"python replay.py record=\S+step-00000001.json function=bad_kernel:attention", outcome.err)


def test_no_checkpoint_holds_steps_that_were_not_judged(workplace, monkeypatch):
    """A run that resumes after a kill does not see them again. Here, metrics are rarer than checkpoints."""
    often = ("train.log_interval=20", "train.eval_interval=99", "checkpoint.interval=10", "train.max_steps=20")
    spoil(monkeypatch, math.nan, 7)
    outcome = train("run", *often)
    assert outcome.code == 2 and "the loss was nan and the gradient norm nan at step 7;" in outcome.err
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-00000010.pt"], "saved as it stops"
    spoil(monkeypatch, math.nan, 7)
    train("skipping", *often, "train.on_nan=skip").ok()
    assert load("skipping/checkpoints/step-00000010.pt")["skipped"] == 1


def test_a_loss_that_is_no_number_is_told_though_the_disk_is_full(workplace, monkeypatch):
    spoil(monkeypatch, math.nan, 3)
    fill_disk_at(monkeypatch, "step-00000003.pt")
    (sentence,) = train("run").err.splitlines()
    assert "The state is lost: " in sentence
    assert "the loss was nan and the gradient norm nan at step 3; the weights did not take this step." in sentence
    assert "step-00000003.pt cannot be written (File too large); free some space" in sentence
    assert Path(re.search(r"record=(\S+)", sentence).group(1)).is_file()


def test_a_run_finishes_though_its_model_has_no_finite_logits(workplace):
    """The sample at its end once raised an error of torch, and sample.py too."""
    broken = {"optimizer.lr": 1e20, "optimizer.warmup_steps": 0, "optimizer.grad_clip": 0, "train.max_steps": 1}
    outcome = train("run", *(f"{key}={value}" for key, value in broken.items()), "train.sample_tokens=5").ok()
    assert "\nno sample: the model's logits are not finite\n" in outcome.out and "finished" in outcome.out
    refused = run("sample.py", "checkpoint=run", "device=cpu")
    *_, sentence = refused.err.splitlines()
    assert refused.code == 2
    assert sentence == "error: the model's logits are not finite; give another checkpoint, or set precision=fp32"


def test_what_is_usual_is_known_after_a_resume(workplace, monkeypatch):
    train("run", "train.max_steps=25", "train.eval_interval=99", "checkpoint.dir=kept").ok()
    assert load("kept/step-00000025.pt")["norms"] == [norm for _, norm in curve("run", "train/grad_norm")]
    spoil(monkeypatch, 100.0, 2)
    outcome = train(
        "run", "train.max_steps=28", "train.eval_interval=99", "checkpoint.dir=kept", "checkpoint.resume=auto"
    )
    assert outcome.ok().out.count("times the usual") == 1 and "at step 27," in outcome.out


def replayed(outcome) -> dict:
    return json.loads(Path(outcome.ok().out.splitlines()[-1].removeprefix("outputs in "), "replay.json").read_text())


def test_spike_is_recorded_and_its_batch_replayed_to_the_bit(workplace, monkeypatch):
    """Log every 4 steps, so that the loader is further on when the step is recorded."""
    often = ("train.max_steps=28", "checkpoint.interval=1", "checkpoint.keep=9", "train.grad_accumulation=2")
    spoil(monkeypatch, 100.0, 49, 50)  # the two micro-batches of step 25
    outcome = train("run", *often, "train.log_interval=4", "train.eval_interval=99")
    (line,) = [line for line in outcome.ok().out.splitlines() if "times the usual" in line]
    file = re.search(r"python replay.py (record=\S+)", line).group(1)
    assert "at step 25," in line and file.endswith("run/replay/step-00000025.json")
    monkeypatch.undo()
    monkeypatch.chdir(workplace)
    result = replayed(run("replay.py", file, "device=cpu"))
    recorded = json.loads(Path(file.removeprefix("record=")).read_text())
    assert result["checkpoint"].endswith("step-00000024.pt")
    assert [100 * result[key] for key in ("loss", "grad_norm")] == pytest.approx(
        [recorded[key] for key in ("loss", "grad_norm")], rel=1e-6
    )
    by_others = replayed(run("replay.py", file, "device=cpu", "checkpoint=run/checkpoints/step-00000020.pt"))
    assert by_others["loss"] != result["loss"] and by_others["checkpoint"].endswith("20.pt")
    Path("run/checkpoints/step-00000024.pt").unlink()
    assert replayed(run("replay.py", file, "device=cpu"))["checkpoint"].endswith("step-00000023.pt")
    shutil.rmtree("run/checkpoints")
    refused = run("replay.py", file, "device=cpu")
    assert refused.code == 2 and "run/checkpoints; give one as checkpoint=" in refused.err


def test_a_replay_refuses_a_checkpoint_of_another_tokenizer(workplace, monkeypatch):
    """It once ran the bytes of the record through a model of GPT-2's tokens."""
    spoil(monkeypatch, math.nan, 3)
    file = re.search(r"record=(\S+)", train("run").err).group(1)
    monkeypatch.undo()
    monkeypatch.chdir(workplace)
    (path,) = Path("run/checkpoints").iterdir()
    write_file(Path("other") / path.name, load(path) | {"tokenizer": "gpt2"})
    refused = run("replay.py", f"record={file}", "device=cpu", "checkpoint=other")
    problem = f"checkpoint=other was trained on gpt2 tokens, but record={file} has byte tokens"
    assert (refused.code, refused.err) == (2, f"error: {problem}; give a checkpoint of the recorded run\n")


def test_a_spike_that_the_disk_cannot_record_is_told_and_training_goes_on(workplace, monkeypatch):
    spoil(monkeypatch, 100.0, 25)
    Path("run").mkdir()
    Path("run/replay").write_text("in the way of the folder")
    outcome = train("run", "train.max_steps=28", "train.eval_interval=99").ok()
    assert "times the usual norm; the record " in outcome.out


def test_a_full_disk_leaves_no_part_of_a_record(workplace, monkeypatch):
    spoil(monkeypatch, math.nan, 3)
    monkeypatch.setattr(Watch, "_record", within(100, Watch._record))
    outcome = train("run")
    assert outcome.code == 2 and "step-00000003.json cannot be written (File too large)" in outcome.err
    assert not list(Path("run/replay").iterdir())


@pytest.mark.parametrize("script", ["replay", "evaluate"])
def test_a_full_disk_leaves_the_old_result_of_a_script(workplace, monkeypatch, script):
    spoil(monkeypatch, math.nan, 3)
    record = re.search(r"record=\S+", train("run").err).group()
    data = "data=tokens", "data.dir=tokens", "data.tokenizer=byte"
    given = {"replay": (record,), "evaluate": ("checkpoint=run", *data)}[script]
    again = f"{script}.py", *given, "device=cpu", "hydra.run.dir=out"
    run(*again).ok()
    (file,) = Path("out").iterdir()
    before = file.read_bytes()
    with largest_file(20):
        refused = run(*again)
    assert refused.code == 2 and "error: the disk cannot be used (File too large); make room" in refused.err
    assert file.read_bytes() == before and list(Path("out").iterdir()) == [file]


def test_what_is_recorded_is_replayed_as_asked(workplace, monkeypatch):
    """The replay has the run's activation checkpointing, and the precision of its own command line."""
    spoil(monkeypatch, math.nan, 3)
    outcome = train("run", "train.activation_checkpointing=full")
    file = re.search(r"record=\S+", outcome.err).group()
    seen, forward = set(), Block.forward

    def watched(block, *args):
        seen.add(block.activation_checkpointing)
        return forward(block, *args)

    monkeypatch.setattr(Block, "forward", watched)
    told = run("replay.py", file, "device=cpu", "precision=bf16", "checkpoint=run/checkpoints")
    assert "CPU, bf16" in told.ok().out and seen == {"full"}
