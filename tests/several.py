"""Runs of train.py by several processes, in one launch: torchrun tests/several.py "FOLDER OVERRIDES" ..."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.e2e import at_call, python_path, train
from trainer.checkpoint import Checkpoints

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


def train_terminated(folder: str, *overrides: str) -> None:
    """A run of which the second process alone gets SIGTERM, at its first evaluation."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            terminate = at_call(1, lambda: os.kill(os.getpid(), signal.SIGTERM), Checkpoints.save_best)
            patch.setattr(Checkpoints, "save_best", terminate)
        assert train(folder, *overrides).code == 128 + signal.SIGTERM


if __name__ == "__main__":
    for arguments in sys.argv[1:]:
        folder, *overrides = arguments.split()
        if folder == "terminated":
            train_terminated(folder, *overrides)
        else:
            train(folder, *overrides).ok()
