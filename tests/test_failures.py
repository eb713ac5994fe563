"""Faults injected into whole runs on a CPU: one clear sentence each, and nothing is lost."""

import os
import re
import signal
from pathlib import Path

from model.gpt2 import GPT2
from tests.e2e import TINY, at_call, curve, largest_file, load, start, train
from trainer import checkpoint
from trainer.checkpoint import find

pytest_plugins = ["tests.e2e"]

LOSSES = ("train/loss", "train/grad_norm", "val/loss")
EACH_5 = ("train.max_steps=20", "checkpoint.interval=5", "checkpoint.dir=kept")


def fill_disk_at(monkeypatch, *names: str) -> None:
    """The disk is full whenever a checkpoint of one of these names is written."""
    write = checkpoint._write

    def write_on_a_full_disk(path, state):
        with largest_file(1000 if path.name in names else 2**40):
            write(path, state)

    monkeypatch.setattr(checkpoint, "_write", write_on_a_full_disk)


def test_full_disk_stops_the_run_with_the_checkpoint_to_continue(workplace, monkeypatch):
    train("whole", *EACH_5[:2]).ok()
    fill_disk_at(monkeypatch, "step-00000015.pt")
    outcome = train("run", *EACH_5)
    (sentence,) = outcome.err.splitlines()
    assert outcome.code == 2
    assert "step-00000015.pt could not be written (File too large); make room, and continue with" in sentence
    assert not list(Path("kept").glob("*.partial"))
    monkeypatch.undo()
    monkeypatch.chdir(workplace)
    train("run", *EACH_5, re.search(r"checkpoint\.resume=\S+10\.pt", sentence).group()).ok()
    assert curve("run", *LOSSES) == curve("whole", *LOSSES)


def test_full_disk_is_told_and_training_goes_on_where_that_is_asked_for(workplace, monkeypatch):
    train("whole", *EACH_5[:2]).ok()
    fill_disk_at(monkeypatch, "step-00000015.pt", "best.pt")
    outcome = train("run", *EACH_5, "checkpoint.on_error=continue").ok()
    told = [line for line in outcome.out.splitlines() if "training goes on" in line]
    assert len([line for line in told if "step-00000015.pt could not be written" in line]) == 1
    assert sorted(path.name for path in Path("kept").iterdir()) == ["step-00000010.pt", "step-00000020.pt"]
    assert curve("run", *LOSSES) == curve("whole", *LOSSES)


def test_run_does_not_end_well_without_its_last_checkpoint(workplace, monkeypatch):
    fill_disk_at(monkeypatch, "step-00000020.pt")
    outcome = train("run", *EACH_5, "checkpoint.on_error=continue")
    assert outcome.code == 2 and outcome.err.startswith("error: kept/step-00000020.pt could not be written")


def test_damaged_checkpoint_is_passed_over_by_the_run_that_resumes(workplace):
    train("whole", *EACH_5[:2]).ok()
    train("run", *EACH_5).ok()
    newest = Path("kept/step-00000020.pt")
    newest.write_bytes(newest.read_bytes()[:-1])
    outcome = train("run", *EACH_5, "checkpoint.resume=auto").ok()
    (line,) = [line for line in outcome.out.splitlines() if "is taken instead" in line]
    assert "step-00000020.pt" in line and "cut off" in line and line.endswith("step-00000015.pt is taken instead")
    assert "continuing after step 15" in outcome.out
    assert curve("run", *LOSSES) == curve("whole", *LOSSES)
    assert load(newest)["step"] == 20


def twice(number: int) -> None:
    for _ in range(2):
        os.kill(os.getpid(), number)


def test_a_second_sigterm_lets_the_run_save(workplace, monkeypatch):
    monkeypatch.setattr(GPT2, "forward", at_call(8, lambda: twice(signal.SIGTERM), GPT2.forward))
    outcome = train("run", "train.max_steps=20")
    assert outcome.code == 128 + signal.SIGTERM, "what Slurm is told to requeue on"
    assert load(find("run"))["step"] == curve("run")[-1][0] == 8


INTERRUPTED = """
import signal, train
from tests.test_failures import GPT2, at_call, twice
GPT2.forward = at_call(8, lambda: twice(signal.SIGINT), GPT2.forward)
train.launch(train.main, "config")
"""


def test_a_second_ctrl_c_stops_at_once(workplace):
    process = start("-c", INTERRUPTED, *TINY, "train.max_steps=20", "checkpoint.interval=5", "hydra.run.dir=run")
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert err == "\nSIGINT: saving after this step; Ctrl-C ends the run at once, without\n"
    assert load(find("run"))["step"] == 5 and curve("run")[-1] == (7,)
