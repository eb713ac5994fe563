"""What the tests of bench.paper share: cells measured in the test's process, which spares the seconds of importing."""

import io
import subprocess
import sys

import pytest

from bench.paper import cell, runner
from bench.training import steps, trainers
from model.gpt2 import ModelConfig


def run(command, *, input, **options):
    """runner.run_group for `python -m bench.paper.cell TABLE`."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["cell", command[-1]])
        patch.setattr(sys, "stdin", io.StringIO(input))
        patch.setattr(sys, "stdout", out)
        cell.main()
    return subprocess.CompletedProcess(command, 0, out.getvalue(), "")


def start_by(patch, start) -> None:
    """Makes the runner start its processes by `start`."""
    patch.setattr(runner, "run_group", start)


@pytest.fixture
def tiny_models(monkeypatch):
    """Every trainer gets one layer and a thousand tokens, and takes few steps."""
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 1000}
    monkeypatch.setattr(trainers.Cell, "shape", lambda self: ModelConfig(**sizes, context_length=self.context_length))
    monkeypatch.setattr(trainers, "VOCABULARY", 1000)
    monkeypatch.setattr(trainers, "PADDED", 1024)
    monkeypatch.setattr(steps, "SAMPLE_S", 0)
    trainers.tokens.cache_clear()
    yield
    trainers.tokens.cache_clear()
