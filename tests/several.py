"""Runs of train.py on several processes: torchrun tests/several.py "FOLDER OVERRIDES" ...

The runs share one launch, because each process takes seconds to import torch.
"""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from data.loader import DataError, TrainLoader
from errors import UserError
from tests.e2e import at_call, curve, largest_file, python_path, train
from trainer.checkpoint import sharded, single
from trainer.checkpoint.policy import Checkpoints
from trainer.loggers.base import Loggers

SINGLE_NODE = ("--standalone",)
# 16 sequences a step, in micro-steps of 2. 13 windows of validation, which do not divide among 2 or 4 processes.
GLOBAL = "train.batch_size=2 train.grad_accumulation=8 train.eval_tokens=416 train.eval_interval=3 train.max_steps=6"
GLOBAL += " optimizer.grad_clip=0.5 checkpoint.interval=3"
LOSSES = ("train/loss", "train/grad_norm", "train/lr", "val/loss")


def torchrun(processes: int, *command: str, options: tuple[str, ...] = SINGLE_NODE) -> subprocess.Popen:
    """Start `torchrun COMMAND` with this number of processes on this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", *options, f"--nproc_per_node={processes}"]
    environment = os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*launcher, *command], text=True, env=environment, **pipes)


def ended(process: subprocess.Popen, timeout_s: int = 240) -> tuple[str, str]:
    """Wait for the end of a job, and return its stdout and stderr."""
    try:
        return process.communicate(timeout=timeout_s)
    finally:
        process.kill()


def train_together(processes: int, *runs: str) -> None:
    """Train the tiny model once for each of `runs`. None of the launches may fail."""
    process = torchrun(processes, __file__, *runs)
    _, err = ended(process)
    assert process.returncode == 0, err


def train_on_two_nodes(processes: int, *runs: str) -> None:
    """Do the same with two agents of torchrun, as on two machines, with this number of processes each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    options = ("--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}")
    agents = [torchrun(processes, __file__, *runs, options=options) for _ in range(2)]
    for agent in agents:
        _, err = ended(agent)
        assert agent.returncode == 0, err


def assert_same_curve(found: Path, expected: Path, after: int = 0) -> None:
    """Compare up to fp32 rounding. `found` began after step `after`."""
    for (step, *ours), (_, *theirs) in zip(curve(found, *LOSSES), curve(expected, *LOSSES)[after:], strict=True):
        assert ours == [value if value is None else pytest.approx(value, rel=2e-5) for value in theirs], step


def terminated(patch: pytest.MonkeyPatch) -> None:
    """Send SIGTERM to the second process when it first saves the best weights."""
    save = Checkpoints.save_if_best
    if os.environ["RANK"] == "1":
        patch.setattr(Checkpoints, "save_if_best", at_call(1, lambda: os.kill(os.getpid(), signal.SIGTERM), save))


def terminated_late(patch: pytest.MonkeyPatch) -> None:
    """Send SIGTERM to the second process after the last step."""
    save = Checkpoints.save_last
    if os.environ["RANK"] == "1":
        patch.setattr(Checkpoints, "save_last", at_call(1, lambda: os.kill(os.getpid(), signal.SIGTERM), save))


def before_writing(patch: pytest.MonkeyPatch, step: int, act: Callable[[Callable], str]) -> None:
    """Replace the writing of this process's part of the checkpoint of `step` by `act`, which gets the original."""
    write = sharded._write_part

    def write_or_not(path: Path, *args):
        is_due = path.parent.name == f"step-{step:08d}.partial"
        return act(lambda: write(path, *args)) if is_due else write(path, *args)

    patch.setattr(sharded, "_write_part", write_or_not)


def slow(patch: pytest.MonkeyPatch) -> None:
    """Write the checkpoint of step 2 only when training asks for the batches of step 4.

    A checkpoint that is reported before it is complete stops the run.
    """
    step_4, message = threading.Event(), Loggers.message
    patch.setattr(TrainLoader, "next_batches", at_call(4, step_4.set, TrainLoader.next_batches))

    def wait(write):
        assert step_4.wait(timeout=30), "training stood still while a checkpoint was written"
        return write()

    def check(self: Loggers, text: str) -> None:
        if told := re.match(r"saved (\S+) in", text):
            assert Path(told[1]).exists(), f"process {os.environ['RANK']} prints {told[0]} too early"
        message(self, text)

    before_writing(patch, 2, wait)
    patch.setattr(Loggers, "message", check)


def full_disk(patch: pytest.MonkeyPatch) -> None:
    """Fill the disk of the second process before its part of the checkpoint of step 4."""

    def write_on_a_full_disk(write):
        with largest_file(1000):
            return write()

    if os.environ["RANK"] == "1":
        before_writing(patch, 4, write_on_a_full_disk)


def killed(patch: pytest.MonkeyPatch) -> None:
    """Kill the second process after its part of the checkpoint of step 4, unless torchrun has restarted it."""

    def write_and_die(write):
        write()
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        before_writing(patch, 4, write_and_die)


def unreadable(patch: pytest.MonkeyPatch) -> None:
    """Let the second process fail to read its tokens for step 5. A step has four micro-steps."""

    def refuse():
        raise DataError("train.bin can no longer be read; put it back as it was")

    if os.environ["RANK"] == "1":
        patch.setattr(TrainLoader, "next_batch", at_call(4 * 4 + 2, refuse, TrainLoader.next_batch))


def unreadable_while_slow(patch: pytest.MonkeyPatch) -> None:
    """Do the same, with a state that takes longer to write than a process waits after an error."""
    write = single.write_file
    patch.setattr(single, "write_file", lambda *args: (time.sleep(4 * args[0].name.count("4.pt")), write(*args)))
    unreadable(patch)


def locked(patch: pytest.MonkeyPatch) -> None:
    """Let another run hold the lock of the first process's folder."""

    def refuse(folder: Path, setting: str):
        raise UserError(f"another run writes to {folder.name}")

    if os.environ["RANK"] == "0":
        patch.setattr("trainer.folders._claimed", refuse)


def refused(patch: pytest.MonkeyPatch) -> None:
    """Let the disk refuse the checkpoints of the first process, which writes them for all."""

    def write(path: Path, state: dict):
        raise OSError(errno.ENOSPC, "No space left on device")

    if os.environ["RANK"] == "0":
        for module in (single, sharded):
            patch.setattr(module, "write_file", write)


def wordless(patch: pytest.MonkeyPatch) -> None:
    """Take the vocabulary for the sample away from the second process."""

    def get_tokenizer(name: str):
        raise UserError(f"no {name}")

    if os.environ["RANK"] == "1":
        patch.setattr("trainer.summary.get_tokenizer", get_tokenizer)


def compiled(patch: pytest.MonkeyPatch) -> None:
    """Compile each block, as on a GPU, with a compiler that does not change it. Nothing fails."""
    patch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


FAULTS = {
    "locked": locked,
    "nowhere": lambda _: None,  # data.dir does not exist
    "refused": refused,
    "wordless": wordless,
    "compiled": compiled,
    "unreadable": unreadable,
    "slow_unreadable": unreadable_while_slow,
    "terminated": terminated,
    "late": terminated_late,
    "slow": slow,
    "full": full_disk,
    "stopped": full_disk,
    "killed": killed,
}


def rendezvous_of_run(number: int) -> Callable:
    """Return dist.rendezvous with keys of their own, as each run of a real launch has a store of its own."""
    rendezvous = dist.rendezvous

    def prefixed(*args, **kwargs):
        store, rank, size = next(rendezvous(*args, **kwargs))
        yield dist.PrefixStore(f"run {number}", store), rank, size

    return prefixed


if __name__ == "__main__":
    for number, arguments in enumerate(sys.argv[1:]):
        folder, *overrides = arguments.split()  # The folder's name selects the fault.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "rendezvous", rendezvous_of_run(number))
            FAULTS.get(folder, lambda _: None)(patch)
            outcome = train(folder, *overrides)
        if dist.is_initialized():  # The run failed.
            dist.destroy_process_group()
        if folder not in FAULTS:
            outcome.ok()
        if told := re.search(r"The state is saved in (\S+)\.", outcome.err):
            assert Path(told[1]).exists(), f"process {os.environ['RANK']} prints {told[0]} too early"
        if os.environ["RANK"] == "0":
            Path(folder).mkdir(exist_ok=True)  # A run that was refused has removed it.
            Path(folder, "out.txt").write_text(f"{outcome.code}\n{outcome.out}{outcome.err}")
