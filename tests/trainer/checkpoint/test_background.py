"""Checkpoints that a thread writes: whole runs on a CPU with checkpoint.asynchronous=true, the default on a GPU."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from data.loader import DataError, TrainLoader
from errors import UserError
from tests.e2e import at_call, curve, load, train
from trainer.checkpoint import single
from trainer.checkpoint.background import ADAMW, BackgroundStore, host_memory
from trainer.checkpoint.files import CheckpointError
from trainer.checkpoint.load import load as load_checkpoint

pytest_plugins = ["tests.e2e"]
pytestmark = pytest.mark.usefixtures("workplace")

EACH_5 = ("train.max_steps=20", "checkpoint.interval=5", "train.eval_interval=5")
BESIDE = (*EACH_5, "checkpoint.asynchronous=true", "checkpoint.dir=kept")
LOSSES = ("train/loss", "train/grad_norm", "val/loss")


@pytest.fixture
def whole(workplace):
    """Train a run that waits for its checkpoints."""
    train("whole", *EACH_5, "checkpoint.keep=9").ok()


def before_writing(monkeypatch, name: str, act) -> None:
    """Call `act` before a checkpoint called `name` is written. Without links, no checkpoint is a link to best.pt."""
    write = single.write_file
    monkeypatch.setattr(single, "write_file", lambda path, state: (path.name == name and act(), write(path, state)))
    monkeypatch.setattr(single, "link", lambda *_: False)


def refuse() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_files_are_those_of_a_run_that_waits_for_them(whole):
    outcome = train("run", *BESIDE).ok()
    assert curve("run", *LOSSES) == curve("whole", *LOSSES)
    for name in ("step-00000015.pt", "step-00000020.pt", "best.pt"):
        ours, theirs = load(f"kept/{name}"), load(f"whole/checkpoints/{name}")
        assert ours.keys() == theirs.keys() and ours["step"] == theirs["step"] and ours["loader"] == theirs["loader"]
        torch.testing.assert_close(ours["model"], theirs["model"], rtol=0, atol=0)
        torch.testing.assert_close(ours["optimizer"], theirs["optimizer"], rtol=0, atol=0)
    assert sorted(path.name for path in Path("kept").iterdir()) == ["best.pt", "step-00000015.pt", "step-00000020.pt"]
    assert "saved kept/step-00000020.pt in " in outcome.out
    train("again", *BESIDE, "checkpoint.resume=kept/step-00000015.pt", "checkpoint.dir=again").ok()
    assert curve("again", *LOSSES) == curve("whole", *LOSSES)[-5:]


def test_steps_go_on_while_a_checkpoint_is_written_and_do_not_change_it(whole, monkeypatch):
    """The checkpoint of step 5 is written only after training asks for the batches of step 9."""
    step_9 = threading.Event()
    monkeypatch.setattr(TrainLoader, "next_batches", at_call(9, step_9.set, TrainLoader.next_batches))
    before_writing(monkeypatch, "step-00000005.pt", lambda: step_9.wait(timeout=30) or pytest.fail("training waited"))
    train("run", *BESIDE, "checkpoint.keep=9").ok()
    ours, theirs = (load(f"{folder}/step-00000005.pt") for folder in ("kept", "whole/checkpoints"))
    torch.testing.assert_close(ours["model"], theirs["model"], rtol=0, atol=0)
    torch.testing.assert_close(ours["optimizer"], theirs["optimizer"], rtol=0, atol=0)


def test_a_full_disk_is_told_when_the_next_is_saved_and_training_goes_on(whole, monkeypatch):
    before_writing(monkeypatch, "step-00000010.pt", refuse)
    outcome = train("run", *BESIDE, "checkpoint.on_error=continue").ok()
    (told,) = (line for line in outcome.out.splitlines() if "training continues" in line)
    assert "step-00000010.pt cannot be written (No space left on device)" in told
    assert curve("run", *LOSSES) == curve("whole", *LOSSES)
    assert sorted(path.name for path in Path("kept").glob("step-*")) == ["step-00000015.pt", "step-00000020.pt"]


def test_a_save_that_was_refused_before_does_not_cost_the_last_one(monkeypatch):
    """The disk refuses best.pt of step 5 in the background. Then the token file is cut, and the state is saved."""
    before_writing(monkeypatch, "best.pt", refuse)
    cut = at_call(6, lambda: os.truncate("tokens/train.bin", 1024), TrainLoader.next_batches)
    monkeypatch.setattr(TrainLoader, "next_batches", cut)
    outcome = train("run", *BESIDE, "checkpoint.interval=50")
    (sentence,) = outcome.err.splitlines()
    assert "train.bin went from" in sentence and "The state is saved in kept/step-000000" in sentence
    assert "best.pt cannot be written (No space left on device)" in outcome.out


def test_the_best_one_that_is_refused_does_not_cost_the_state_of_its_own_step(monkeypatch):
    """The tokens of step 6 cannot be read while the disk refuses best.pt of step 5 in the background."""
    refused = threading.Event()
    before_writing(monkeypatch, "best.pt", lambda: refused.wait(timeout=30) and refuse())

    def unreadable():
        refused.set()
        raise DataError("train.bin can no longer be read")

    monkeypatch.setattr(TrainLoader, "next_batches", at_call(6, unreadable, TrainLoader.next_batches))
    outcome = train("run", *BESIDE, "checkpoint.interval=50")
    assert outcome.err.endswith("The state is saved in kept/step-00000005.pt.\n")
    assert load_checkpoint("kept")["step"] == 5


def test_a_save_that_is_refused_leaves_the_other_save_of_its_state_alone(tmp_path, monkeypatch):
    """The disk refuses best.pt while another file of the same state waits. The next save once overwrote its memory."""
    refused = threading.Event()
    before_writing(monkeypatch, "best.pt", lambda: refused.set() or refuse())
    before_writing(monkeypatch, "step-00000001.pt", lambda: refused.wait(timeout=30) and time.sleep(0.2))
    with saving(tmp_path) as checkpoints:
        checkpoints.save(state_of(1), best=True)
        checkpoints.save(state_of(1))
        with pytest.raises(CheckpointError, match="best.pt cannot be written"):
            checkpoints.settle(before=2)
        checkpoints.save(state_of(2))
    for step in (1, 2):
        assert load(tmp_path / f"step-{step:08d}.pt")["model"]["weight"].eq(step).all()


def test_the_next_state_waits_until_the_one_before_is_written(tmp_path, monkeypatch):
    before_writing(monkeypatch, "step-00000001.pt", lambda: time.sleep(0.3))
    with saving(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(state_of(step))
    for step in (1, 2):
        assert load(tmp_path / f"step-{step:08d}.pt")["model"]["weight"].eq(step).all()


def test_a_state_that_was_refused_is_copied_again(tmp_path, monkeypatch):
    """The same step is saved again, with other weights to tell the copies apart."""
    before_writing(monkeypatch, "best.pt", refuse)
    with saving(tmp_path) as checkpoints:
        checkpoints.save(state_of(1), best=True)
        with pytest.raises(CheckpointError, match="best.pt cannot be written"):
            checkpoints.settle()
        checkpoints.save(state_of(1, weight=5.0))
    assert load(tmp_path / "step-00000001.pt")["model"]["weight"].eq(5).all()


@contextmanager
def saving(folder: Path) -> Iterator[BackgroundStore]:
    """Yield a store for the states of state_of. It keeps all checkpoints."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = BackgroundStore(folder, keep=9, writes=True, model=model, optimizer=optimizer)
    checkpoints.tell = lambda text: None
    yield checkpoints
    checkpoints.settle()
    checkpoints.close()


def state_of(step: int, weight: float | None = None) -> dict:
    """Return a state whose weights all equal the step, or `weight`, and whose optimizer has no moments yet."""
    names, value = ("weight", "bias"), float(step) if weight is None else weight
    weights = {"weight": torch.full((2, 2), value), "bias": torch.full((2,), value)}
    rest = {"model_config": {}, "tokenizer": "byte", "parameters": list(names)}
    return rest | {"step": step, "model": weights, "optimizer": {"state": {}, "param_groups": []}}


@pytest.mark.parametrize("step", [10, 20])
def test_a_full_disk_ends_the_run_with_the_checkpoint_to_continue(monkeypatch, step):
    before_writing(monkeypatch, f"step-{step:08d}.pt", refuse)
    outcome = train("run", *BESIDE)
    (sentence,) = outcome.err.splitlines()
    assert outcome.code == 2 and f"step-{step:08d}.pt cannot be written (No space left on device)" in sentence
    assert f"continue with checkpoint.resume=kept/step-{step - 5:08d}.pt" in sentence
    assert not list(Path("kept").glob("*.partial"))


def test_a_host_without_room_for_the_copy_is_told_how_to_do_without(monkeypatch):
    def no_room(*size, **options):
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")

    monkeypatch.setattr(torch, "empty", no_room)
    weights = {"wte": torch.zeros(2**20), "wpe": torch.zeros(2**20)}
    told = r"in the background needs 0\.0 GiB .*\(RuntimeError: CUDA error: out of memory\); set checkpoint"
    with pytest.raises(UserError, match=told):
        host_memory(weights, dict.fromkeys(weights, ADAMW))
