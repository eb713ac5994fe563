"""Checkpoints beside training, as on a GPU: whole runs on a CPU that are made to save so."""

import errno
import threading
from pathlib import Path

import pytest
import torch

from data.loader import TrainLoader
from tests.e2e import at_call, curve, load, train
from trainer import checkpoint
from trainer.background import BackgroundCheckpoints, split_state

pytest_plugins = ["tests.e2e"]

EACH_5 = ("train.max_steps=20", "checkpoint.interval=5", "train.eval_interval=5", "checkpoint.dir=kept")
LOSSES = ("train/loss", "train/grad_norm", "val/loss")


class Beside(BackgroundCheckpoints):
    """Takes the place of those of a CPU, and so learns what to make room for from the first state."""

    def __init__(self, folder, keep, writes=True):
        super().__init__(folder, keep, writes, model=None)

    def _parts(self, model):
        return {}

    def _copy(self, state):
        self._host = self._host or {key: torch.empty_like(x) for key, x in split_state(state)[1].items()}
        return super()._copy(state)


@pytest.fixture(autouse=True)
def beside_training(workplace, monkeypatch):
    train("whole", *EACH_5[:3], "checkpoint.keep=9").ok()
    monkeypatch.setattr(checkpoint, "Checkpoints", Beside)


def before_writing(monkeypatch, name: str, act) -> None:
    """`act` is called before a checkpoint of that name is written."""
    write = checkpoint.write_file
    monkeypatch.setattr(checkpoint, "write_file", lambda path, state: (path.name == name and act(), write(path, state)))


def refuse() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_files_are_those_of_a_run_that_waits_for_them():
    outcome = train("run", *EACH_5).ok()
    assert curve("run", *LOSSES) == curve("whole", *LOSSES)
    for name in ("step-00000015.pt", "step-00000020.pt", "best.pt"):
        ours, theirs = load(f"kept/{name}"), load(f"whole/checkpoints/{name}")
        assert ours.keys() == theirs.keys() and ours["step"] == theirs["step"] and ours["loader"] == theirs["loader"]
        torch.testing.assert_close(ours["model"], theirs["model"], rtol=0, atol=0)
        torch.testing.assert_close(ours["optimizer"], theirs["optimizer"], rtol=0, atol=0)
    assert sorted(path.name for path in Path("kept").iterdir()) == ["best.pt", "step-00000015.pt", "step-00000020.pt"]
    assert "saved kept/step-00000020.pt, in " in outcome.out
    train("again", *EACH_5, "checkpoint.resume=kept/step-00000015.pt", "checkpoint.dir=again").ok()
    assert curve("again", *LOSSES) == curve("whole", *LOSSES)[-5:]


def test_steps_go_on_while_a_checkpoint_is_written_and_do_not_change_it(monkeypatch):
    """That of step 5 is not written before the batches of step 9 are asked for."""
    step_9 = threading.Event()
    monkeypatch.setattr(TrainLoader, "next_batches", at_call(9, step_9.set, TrainLoader.next_batches))
    before_writing(monkeypatch, "step-00000005.pt", lambda: step_9.wait(timeout=30) or pytest.fail("training waited"))
    train("run", *EACH_5, "checkpoint.keep=9").ok()
    ours, theirs = (load(f"{folder}/step-00000005.pt") for folder in ("kept", "whole/checkpoints"))
    torch.testing.assert_close(ours["model"], theirs["model"], rtol=0, atol=0)


def test_a_full_disk_is_told_when_the_next_is_saved_and_training_goes_on(monkeypatch):
    before_writing(monkeypatch, "step-00000010.pt", refuse)
    outcome = train("run", *EACH_5, "checkpoint.on_error=continue").ok()
    (told,) = (line for line in outcome.out.splitlines() if "training goes on" in line)
    assert "step-00000010.pt could not be written (No space left on device)" in told
    assert curve("run", *LOSSES) == curve("whole", *LOSSES)
    assert sorted(path.name for path in Path("kept").glob("step-*")) == ["step-00000015.pt", "step-00000020.pt"]


@pytest.mark.parametrize("step", [10, 20])
def test_a_full_disk_ends_the_run_with_the_checkpoint_to_continue(monkeypatch, step):
    before_writing(monkeypatch, f"step-{step:08d}.pt", refuse)
    outcome = train("run", *EACH_5)
    (sentence,) = outcome.err.splitlines()
    assert outcome.code == 2 and f"step-{step:08d}.pt could not be written (No space left on device)" in sentence
    assert f"continue with checkpoint.resume=kept/step-{step - 5:08d}.pt" in sentence
    assert not list(Path("kept").glob("*.partial"))
