"""Signals during whole runs on a CPU: the run saves and ends."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from model.gpt2 import GPT2
from tests.e2e import TINY, Fork, at_call, curve, load, train
from trainer.checkpoint.folder import find

pytest_plugins = ["tests.e2e"]

LOSSES = ("train/loss", "train/grad_norm", "val/loss")


def twice(number: int) -> None:
    for _ in range(2):
        os.kill(os.getpid(), number)


def test_a_fork_can_train_after_a_test_with_fake_tensors(workplace):
    """It failed if this was the first backward of the process, as in a test of FSDP. So this test comes first."""
    with FakeTensorMode():
        torch.empty(0)
    torch.ones((), requires_grad=True).backward()
    process = Fork("train.py", *TINY, "hydra.run.dir=run")
    assert (process.wait(), process.stderr.read()) == (0, "")


def test_a_second_sigterm_lets_the_run_save(workplace, monkeypatch):
    monkeypatch.setattr(GPT2, "forward", at_call(8, lambda: twice(signal.SIGTERM), GPT2.forward))
    outcome = train("run", "train.max_steps=20")
    assert outcome.code == 128 + signal.SIGTERM, "Slurm requeues a job with this status"
    assert load(find("run"))["step"] == curve("run")[-1][0] == 8


def test_a_job_out_of_time_is_saved_before_it_is_queued_again(workplace, monkeypatch):
    """The job is queued again by submitit's handler of SIGUSR2, which does not return in the first process."""

    def queue_again(number, frame):
        sys.exit(f"queued again after step {load(find('run'))['step']}")

    monkeypatch.setattr(GPT2, "forward", at_call(8, lambda: os.kill(os.getpid(), signal.SIGUSR2), GPT2.forward))
    before = signal.signal(signal.SIGUSR2, queue_again)
    try:
        outcome = train("run", "train.max_steps=20")
        assert signal.getsignal(signal.SIGUSR2) is queue_again
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert outcome.code == "queued again after step 8" and "SIGUSR2 after step 8," in outcome.out


def interrupted_by(*numbers: int) -> Fork:
    """Start a run that gets the signals in step 8."""

    def interrupt() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPT2, "forward", at_call(8, interrupt, GPT2.forward))
        hang_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and the tests may run under nohup
        process = Fork("train.py", *TINY, "train.max_steps=20", "checkpoint.interval=5", "hydra.run.dir=run")
        signal.signal(signal.SIGHUP, hang_up)
    return process


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM], ids=["alone", "torchrun's"])
def test_a_second_ctrl_c_stops_at_once(workplace, second):
    process = interrupted_by(signal.SIGINT, second)
    assert process.wait() == -second
    assert process.stderr.read() == "\nSIGINT: saving after this step; Ctrl-C ends the run at once, without saving\n"
    assert load(find("run"))["step"] == 5 and curve("run")[-1] == (7,)


def test_a_terminal_that_is_closed_lets_the_run_save(workplace):
    """Close stdout and stderr too, as a closed terminal does."""
    process = interrupted_by(signal.SIGHUP)
    process.stdout.close()
    process.stderr.close()
    assert process.wait() == 128 + signal.SIGHUP
    assert load(find("run"))["step"] == curve("run")[-1][0] == 8


def test_training_goes_on_where_nobody_reads_what_it_says(workplace):
    """Close the pipe early, as `train.py | head` does."""
    process = Fork("train.py", *TINY, "train.max_steps=20", "hydra.run.dir=run", encoding="ascii")
    process.stdout.readline()
    process.stdout.close()
    assert (process.wait(), process.stderr.read()) == (0, "")
    assert load(find("run"))["step"] == curve("run")[-1][0] == 20


def test_what_cannot_be_encoded_is_escaped_in_the_sample_at_the_end(workplace, monkeypatch):
    monkeypatch.setattr("trainer.summary.sample", lambda *_: "\ufffd")
    process = Fork("train.py", *TINY, "hydra.run.dir=run", encoding="ascii")
    assert (process.wait(), process.stderr.read()) == (0, "")
    assert "\\ufffd" in process.stdout.read()


def test_a_terminal_that_is_gone_ends_no_run(workplace, monkeypatch):
    """The live progress line is on that terminal too."""
    monkeypatch.setenv("TERM", "xterm")
    terminal, end = os.openpty()
    process = Fork("train.py", *TINY, "train.max_steps=20", "hydra.run.dir=run", end=end)
    os.close(end)
    told = b""
    while b"first step in" not in told:
        told += os.read(terminal, 4096)
    os.close(terminal)
    assert process.wait() == 0
    assert load(find("run"))["step"] == curve("run")[-1][0] == 20


def test_a_signal_during_an_evaluation_does_not_wait_for_its_end(workplace, monkeypatch):
    """The signal arrives in the second batch of 4, in the evaluation after step 10."""
    monkeypatch.setattr(GPT2, "forward", at_call(12, lambda: os.kill(os.getpid(), signal.SIGTERM), GPT2.forward))
    outcome = train("run", "train.max_steps=20")
    assert outcome.code == 128 + signal.SIGTERM and "SIGTERM after step 10," in outcome.out
    assert load(find("run"))["step"] == 10 and curve("run", "val/loss")[-1] == (10, None)
    assert curve("run", "train/loss")[-1][1] is not None, "the row has the loss of the step"
    monkeypatch.undo()
    monkeypatch.chdir(workplace)
    resume = ("train.max_steps=20", "checkpoint.dir=run/checkpoints", "checkpoint.resume=auto")
    train("run", *resume).ok()
    train("whole", "train.max_steps=20").ok()
    made_up, whole = ({step: loss for step, loss in curve(of, "val/loss") if loss} for of in ("run", "whole"))
    assert made_up == whole and list(whole) == [10, 20], (
        "the resumed run repeats the evaluation that the signal cut short"
    )
    for path in Path("run/checkpoints").iterdir():  # as if a kill came before the next checkpoint
        if path.name != "step-00000010.pt":
            path.unlink()
    train("run", *resume).ok()
    assert [step for step, loss in curve("run", "val/loss") if loss] == [10, 20], "each evaluation has one row"
