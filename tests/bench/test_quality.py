"""bench.quality on a CPU: the fast step follows Hugging Face's GPT-2, step by step."""

import json

import numpy as np
import pytest

from bench import quality


@pytest.fixture
def tokens(tmp_path):
    ids = np.random.default_rng(0).integers(0, 50257, 4000).astype(np.uint16)
    for split in ("train", "val"):
        ids.tofile(tmp_path / f"{split}.bin")
    return tmp_path


def test_the_fast_step_follows_a_plain_one(tokens, monkeypatch):
    out = tokens / "quality.json"
    given = [str(tokens), "--model", "gpt2-nano", "--context-length", "32", "--batch", "2", "--steps", "5"]
    monkeypatch.setattr("sys.argv", ["quality", *given, "--device", "cpu", "--out", str(out)])
    quality.main()
    fast, plain = (row["loss_curve"] for row in json.loads(out.read_text())["rows"])
    assert len(fast) == 5 and fast == pytest.approx(plain, abs=2e-3)
    assert abs(fast[0] - fast[1]) > 5e-3, "steps that differ by more than the two trainers do"
