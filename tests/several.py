"""Runs of train.py by several processes, in one launch: torchrun tests/several.py "FOLDER OVERRIDES" ..."""

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

from data.loader import DataError, TrainLoader
from errors import UserError
from tests.e2e import at_call, largest_file, python_path, train
from trainer import checkpoint, sharded

SINGLE_NODE = ("--standalone",)


def torchrun(processes: int, *command: str, options: tuple[str, ...] = SINGLE_NODE) -> subprocess.Popen:
    """`torchrun COMMAND` with so many processes on this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", *options, f"--nproc_per_node={processes}"]
    environment = os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*launcher, *command], text=True, env=environment, **pipes)


def ended(process: subprocess.Popen, timeout_s: int = 240) -> tuple[str, str]:
    """What a job printed until its end."""
    try:
        return process.communicate(timeout=timeout_s)
    finally:
        process.kill()


def train_together(processes: int, *runs: str) -> None:
    """Runs of the tiny model, one after another; none may fail."""
    process = torchrun(processes, __file__, *runs)
    _, err = ended(process)
    assert process.returncode == 0, err


def train_on_two_nodes(processes: int, *runs: str) -> None:
    """The same by two agents of torchrun, each with so many processes, which meet as those of two machines do."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    options = ("--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}")
    agents = [torchrun(processes, __file__, *runs, options=options) for _ in range(2)]
    for agent in agents:
        _, err = ended(agent)
        assert agent.returncode == 0, err


def terminated(patch: pytest.MonkeyPatch) -> None:
    """The second process alone gets SIGTERM, when it is to save the best weights the first time."""
    save_best = sharded.ShardedCheckpoints.save_best
    if os.environ["RANK"] == "1":
        terminate = at_call(1, lambda: os.kill(os.getpid(), signal.SIGTERM), save_best)
        patch.setattr(sharded.ShardedCheckpoints, "save_best", terminate)


def before_writing(patch: pytest.MonkeyPatch, step: int, act: Callable[[Callable], str]) -> None:
    """`act` is called with what writes this process's part of the checkpoint of that step, and does it or not."""
    write = sharded._write_part

    def write_or_not(path: Path, *args):
        is_due = path.parent.name == f"step-{step:08d}.partial"
        return act(lambda: write(path, *args)) if is_due else write(path, *args)

    patch.setattr(sharded, "_write_part", write_or_not)


def slow(patch: pytest.MonkeyPatch) -> None:
    """The checkpoint of step 2 is not written before the batches of step 4 are asked for."""
    step_4 = threading.Event()
    patch.setattr(TrainLoader, "next_batches", at_call(4, step_4.set, TrainLoader.next_batches))

    def wait(write):
        assert step_4.wait(timeout=30), "training stood still while a checkpoint was written"
        return write()

    before_writing(patch, 2, wait)


def full_disk(patch: pytest.MonkeyPatch) -> None:
    """The second process alone finds no room for its part of the checkpoint of step 4."""

    def write_on_a_full_disk(write):
        with largest_file(1000):
            return write()

    if os.environ["RANK"] == "1":
        before_writing(patch, 4, write_on_a_full_disk)


def killed(patch: pytest.MonkeyPatch) -> None:
    """The second process is killed when it has written its part of the checkpoint of step 4, in its first life."""

    def write_and_die(write):
        write()
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        before_writing(patch, 4, write_and_die)


def unreadable(patch: pytest.MonkeyPatch) -> None:
    """The second process alone cannot read what it needs for step 5, of four micro-steps each."""

    def refuse():
        raise DataError("train.bin can no longer be read: put it back as it was.")

    if os.environ["RANK"] == "1":
        patch.setattr(TrainLoader, "next_batch", at_call(4 * 4 + 2, refuse, TrainLoader.next_batch))


def unreadable_while_slow(patch: pytest.MonkeyPatch) -> None:
    """The same, and the state takes longer to write than a process that has told of an error waits for the others."""
    write = checkpoint.write_file
    patch.setattr(checkpoint, "write_file", lambda *args: (time.sleep(4 * args[0].name.count("4.pt")), write(*args)))
    unreadable(patch)


def locked(patch: pytest.MonkeyPatch) -> None:
    """The first process alone finds that another run writes to the folder."""

    def refuse(folders: dict):
        raise UserError(f"another run writes to {next(iter(folders)).name}")

    if os.environ["RANK"] == "0":
        patch.setattr("trainer.folders.claimed", refuse)


def refused(patch: pytest.MonkeyPatch) -> None:
    """The disk takes no checkpoint of the first process, which alone writes them."""

    def write(path: Path, state: dict):
        raise OSError(errno.ENOSPC, "No space left on device")

    if os.environ["RANK"] == "0":
        patch.setattr(checkpoint, "write_file", write)


def wordless(patch: pytest.MonkeyPatch) -> None:
    """The second process alone lacks the vocabulary that a sample needs."""

    def get_tokenizer(name: str):
        raise UserError(f"no {name}")

    if os.environ["RANK"] == "1":
        patch.setattr("data.tokenizers.get_tokenizer", get_tokenizer)


def compiled(patch: pytest.MonkeyPatch) -> None:
    """Nothing goes wrong: as on a GPU each block is compiled, though by a compiler that leaves it as it is."""
    patch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


FAULTS = {
    "locked": locked,
    "nowhere": lambda _: None,  # there is no such data.dir
    "refused": refused,
    "wordless": wordless,
    "compiled": compiled,
    "unreadable": unreadable,
    "slow_unreadable": unreadable_while_slow,
    "terminated": terminated,
    "slow": slow,
    "full": full_disk,
    "stopped": full_disk,
    "killed": killed,
}

if __name__ == "__main__":
    for arguments in sys.argv[1:]:
        folder, *overrides = arguments.split()  # the folder's name says what is to go wrong
        with pytest.MonkeyPatch.context() as patch:
            FAULTS.get(folder, lambda _: None)(patch)
            outcome = train(folder, *overrides)
        if folder not in FAULTS:
            outcome.ok()
        if told := re.search(r"The state is saved in (\S+)\.", outcome.err):
            assert Path(told[1]).exists(), f"{told[0]} says process {os.environ['RANK']} before it is"
        if os.environ["RANK"] == "0":
            Path(folder).mkdir(exist_ok=True)  # of a run that was refused it is gone
            Path(folder, "out.txt").write_text(f"{outcome.code}\n{outcome.out}{outcome.err}")
