"""Measure cells of bench.paper in the test's process, which saves the seconds of importing torch."""

import io
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bench.paper import runner, worker
from bench.training import steps, trainers
from model.gpt2 import ModelConfig


def run(command, *, input, **options):
    """Replace subprocess.run for `python -m bench.paper.worker TABLE`."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["worker", command[-1]])
        patch.setattr(sys, "stdin", io.StringIO(input.decode()))
        patch.setattr(sys, "stdout", out)
        worker.main()
    return subprocess.CompletedProcess(command, 0, out.getvalue().encode(), b"")


def start_by(patch, start) -> None:
    """Make the runner start its processes with `start`."""
    patch.setattr(runner, "subprocess", SimpleNamespace(run=start, TimeoutExpired=subprocess.TimeoutExpired))


@pytest.fixture
def tiny_models(monkeypatch):
    """Give every trainer one layer and a vocabulary of 1,000, and time few steps."""
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 1000}
    monkeypatch.setattr(
        trainers.TrainingCell, "shape", lambda self: ModelConfig(**sizes, context_length=self.context_length)
    )
    monkeypatch.setattr(trainers, "VOCABULARY", 1000)
    monkeypatch.setattr(trainers, "PADDED", 1024)
    monkeypatch.setattr(steps, "SAMPLE_S", 0)
    trainers.tokens.cache_clear()
    yield
    trainers.tokens.cache_clear()
