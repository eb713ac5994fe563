"""Helpers of the end-to-end tests: they run the scripts in the test's process, on a tiny model and tiny token files.

PYTEST_DONT_REWRITE: the tests import this module before pytest loads its fixtures.
"""

import io
import json
import multiprocessing
import os
import re
import resource
import runpy
import shlex
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
    """Hold the exit status of a script and its output."""

    code: int
    out: str
    err: str

    def ok(self) -> "Outcome":
        assert self.code == 0, self.err
        return self


def run(script: str, *overrides: str) -> Outcome:
    """Run `python SCRIPT OVERRIDES` in this process, which saves the seconds for importing torch."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # The model is too small for several threads.
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
    """Train the tiny model, with the outputs in `folder`."""
    return run("train.py", *TINY, f"hydra.run.dir={folder}", *overrides)


def logged(folder: Path | str) -> list[dict]:
    """Return all rows of metrics.jsonl."""
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def rows(folder: Path | str) -> list[dict]:
    """Return the rows of metrics."""
    return [row for row in logged(folder) if "settings_changed" not in row]


def curve(folder: Path | str, *keys: str) -> list[tuple]:
    """Return the step and the named metrics of every row, in the order of the file."""
    return [(row["step"], *(row.get(key) for key in keys)) for row in rows(folder)]


def load(path: Path | str) -> dict:
    return torch.load(path, weights_only=True)


def printed_commands(out: str, label: str) -> list[list[str]]:
    """Return the words of each command after a label of the summary, as a shell reads them."""
    text = re.split(rf"^{label} +", out, flags=re.MULTILINE)[1].replace("\\\n", "")
    return [shlex.split(line) for line in text.splitlines()]


def write_tokens(folder: Path) -> None:
    """Write train.bin and val.bin in nanoGPT's format, without meta.json. The text is sums, which a model can learn."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split, lines in (("train", 400), ("val", 60)):
        text = "".join(f"{a} + {b} = {a + b}\n" for a, b in rng.integers(0, 100, (lines, 2)))
        np.frombuffer(text.encode(), dtype=np.uint8).astype("<u2").tofile(folder / f"{split}.bin")


def python_path() -> str:
    """Return PYTHONPATH with the project's root in front."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def start(*command: str, start_new_session: bool = False) -> subprocess.Popen:
    """Start `python COMMAND` as a process, with as many threads as `run`."""
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=start_new_session,
        env=os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )


class Fork:
    """`python SCRIPT OVERRIDES` in a fork of this process, which saves the seconds for importing torch.

    The process ends without Python's clean-up. Its output is in two pipes, or goes to the terminal `end`.
    """

    def __init__(self, script: str, *overrides: str, end: int | None = None, encoding: str = "utf-8"):
        pipes = [(None, end), (None, end)] if end else [os.pipe(), os.pipe()]

        def child() -> None:
            for number, name, (_, writer) in zip((1, 2), ("stdout", "stderr"), pipes, strict=True):
                os.dup2(writer, number)
                stream = io.TextIOWrapper(io.FileIO(number, "w", closefd=False), encoding, write_through=True)
                setattr(sys, name, stream)
                setattr(sys, f"__{name}__", stream)
            os.closerange(3, 1024)  # A reader that is still open here would keep a pipe from breaking.
            sys.argv = [script, *overrides]
            torch.set_num_threads(1)
            GlobalHydra.instance().clear()
            runpy.run_path(str(ROOT / script), run_name="__main__")

        self.process = multiprocessing.get_context("fork").Process(target=child)
        self.process.start()
        if not end:
            for _, writer in pipes:
                os.close(writer)
            self.stdout, self.stderr = (os.fdopen(reader) for reader, _ in pipes)

    def wait(self) -> int:
        """Return the exit status, or minus the number of the signal that ended the process."""
        self.process.join(60)
        self.process.kill()
        return self.process.exitcode


def at_call(number: int, act: Callable[[], None], function: Callable) -> Callable:
    """Return `function` with a counter that calls `act` before call `number` (the first is 1)."""
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
    """Limit the files of this process to `size` bytes, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """Make a new current folder with tokens/train.bin and tokens/val.bin."""
    write_tokens(tmp_path / "tokens")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """Return the folder of a finished run of 30 steps."""
    folder = tmp_path_factory.mktemp("trained")
    write_tokens(folder / "tokens")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train("run", "train.max_steps=30").ok()
    return folder / "run"


@pytest.fixture(scope="session")
def exported(trained, tmp_path_factory) -> Path:
    """Return the Hugging Face folder that export.py writes for `trained`."""
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
