"""What the end-to-end tests share: the scripts run inside the test's process, on a tiny model and tiny token files.

PYTEST_DONT_REWRITE: the tests import it before pytest takes its fixtures.
"""

import io
import json
import os
import resource
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from tests.data.conftest import gpt2_tokenizer

__all__ = ["gpt2_tokenizer"]

ROOT = Path(__file__).resolve().parents[1]
TINY = (
    *("model.n_layer=2", "model.n_head=2", "model.n_embd=32", "model.context_length=32"),
    *("train.batch_size=2", "train.log_interval=1", "train.eval_interval=10", "train.eval_tokens=256"),
    *(
        "train.max_steps=5",
        "train.sample_tokens=0",
        "optimizer.lr=1e-2",
        "optimizer.min_lr=1e-3",
        "optimizer.warmup_steps=5",
    ),
    *("data=tokens", "data.dir=tokens", "data.tokenizer=byte", "wandb.mode=disabled", "device=cpu"),
)


@dataclass
class Outcome:
    """How a script ended and what it wrote."""

    code: int
    out: str
    err: str

    def ok(self) -> "Outcome":
        assert self.code == 0, self.err
        return self


def run(script: str, *overrides: str) -> Outcome:
    """`python SCRIPT OVERRIDES` in this process, which spares the seconds that importing torch takes."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is too small to share among cores
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", [script, *overrides])
        GlobalHydra.instance().clear()
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as ended:
            code = ended.code or 0
        finally:
            torch.set_num_threads(threads)
    return Outcome(code, out.getvalue(), err.getvalue())


def train(folder: Path | str, *overrides: str) -> Outcome:
    """A run of the tiny model whose outputs go to `folder`."""
    return run("train.py", *TINY, f"hydra.run.dir={folder}", *overrides)


def rows(folder: Path | str) -> list[dict]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def curve(folder: Path | str, *keys: str) -> list[tuple]:
    """The step and the named metrics of every row, in the order they were written."""
    return [(row["step"], *(row.get(key) for key in keys)) for row in rows(folder)]


def load(path: Path | str) -> dict:
    return torch.load(path, weights_only=True)


def write_tokens(folder: Path) -> None:
    """train.bin and val.bin as nanoGPT writes them, with no meta.json: sums in ASCII, which can be learnt a little."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split, lines in (("train", 400), ("val", 60)):
        text = "".join(f"{a} + {b} = {a + b}\n" for a, b in rng.integers(0, 100, (lines, 2)))
        np.frombuffer(text.encode(), dtype=np.uint8).astype("<u2").tofile(folder / f"{split}.bin")


def python_path() -> str:
    """The project's root before whatever PYTHONPATH holds."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def start(*command: str) -> subprocess.Popen:
    """`python COMMAND` in a process of its own, with the arithmetic of `run`."""
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )


def at_call(number: int, act: Callable[[], None], function: Callable) -> Callable:
    """`function`, but for its call of that number (from 1), before which `act` is called."""
    calls = 0

    def counting(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == number:
            act()
        return function(*args, **kwargs)

    return counting


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process can grow beyond `size` bytes, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """The current folder: a fresh one that holds tokens/train.bin and tokens/val.bin."""
    write_tokens(tmp_path / "tokens")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """The folder of a finished run of 30 steps."""
    folder = tmp_path_factory.mktemp("trained")
    write_tokens(folder / "tokens")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train("run", "train.max_steps=30").ok()
    return folder / "run"


@pytest.fixture(scope="session")
def exported(trained, tmp_path_factory) -> Path:
    """The Hugging Face folder that export.py makes of `trained`."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    run("export.py", f"checkpoint={trained}", f"to={folder}").ok()
    return folder


def wait_for_step(step: int, folder: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if Path(folder, "metrics.jsonl").exists() and f'{{"step": {step},' in Path(folder, "metrics.jsonl").read_text():
            return
        time.sleep(0.01)
    process.kill()
    raise AssertionError(f"step {step} was not reached: {process.communicate()}")
