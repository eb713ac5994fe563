"""A small cell of bench.training."""

import pytest

from bench.training.trainers import VOCABULARY, TrainingCell
from model.gpt2 import ModelConfig


@pytest.fixture
def cell(monkeypatch):
    shape = ModelConfig(n_layer=2, n_head=2, n_embd=32, context_length=16, vocab_size=VOCABULARY)
    monkeypatch.setattr(TrainingCell, "shape", lambda self: shape)
    return TrainingCell("gpt2", 16, (1, 2, 4))
