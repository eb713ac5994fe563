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


def test_the_fast_step_follows_a_plain_one(tokens, monkeypatch, capsys):
    out = tokens / "quality.json"
    given = [str(tokens), "--model", "gpt2-nano", "--context-length", "32", "--batch", "2", "--steps", "5"]
    monkeypatch.setattr("sys.argv", ["quality", *given, "--seeds=1,2", "--control", "--device=cpu", f"--out={out}"])
    quality.main()
    rows = {(row["seed"], row["trained_by"]): row["loss_curve"] for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == [(seed, name) for seed in (1, 2) for name in ("fast", "plain", "control")]
    for seed in (1, 2):
        fast, plain, control = (rows[seed, name] for name in ("fast", "plain", "control"))
        assert len(fast) == 5 and fast == pytest.approx(plain, abs=2e-3) and control == pytest.approx(plain, abs=2e-3)
        assert abs(fast[0] - fast[1]) > 5e-3, "steps that differ by more than the two trainers do"
    assert rows[1, "fast"] != pytest.approx(rows[2, "fast"], abs=2e-3)
    ends = [sum(rows[seed, name]) / 5 for name in ("fast", "plain") for seed in (1, 2)]
    assert f"fast {(sum(ends[:2]) - sum(ends[2:])) / 2:+.4f}, control" in capsys.readouterr().out
