"""bench.features without a GPU: small shapes, and a stopwatch for a clock."""

import json

import pytest
import torch

from bench import features
from bench.common import timing
from bench.training import trainers
from bench.training.trainers import TrainingCell
from tests.bench.stopwatch import Stopwatch


@pytest.fixture(autouse=True)
def small(monkeypatch):
    small = {
        "TOKENS": 96,
        "WINDOW": 16,
        "DOCUMENT": 32,
        "HIDDEN": 64,
        "HEAD_DIMS": [16],
        "SPEED_LENGTHS": [48],
        "ERROR_SHAPE": (1, 70, 2),
    }
    for name, value in (small | {"MEMORY_LENGTHS": [32, 64], "MEMORY_HEADS": 1}).items():
        monkeypatch.setattr(features, name, value)
    for module in (features, timing):  # one order, so that a list of times says whose time each is
        monkeypatch.setattr(module, "in_turn", lambda variants, rounds: [*variants] * rounds)


def test_speed_is_the_plain_time_over_the_features(monkeypatch):
    times = [x for _ in range(50) for x in (9.0, 9.0, 2.0, 8.0)]  # two samplers settle, then one sample of each
    rows = list(features.speed_rows(Stopwatch(times), rounds=1))
    assert {row["feature"] for row in rows} >= {"window 16", "dropout 0.1", "deterministic", "grouped heads 4 to 1"}
    assert all((row["ms"], row["plain_ms"], row["speed"]) == (2, 8, 4) for row in rows)


def test_the_blocks_that_are_left_are_counted(monkeypatch):
    """Of 4 x 4 blocks 10 are under the diagonal; a window of 2 reaches into one more than its own, of 130 into two."""
    for name, value in {"TOKENS": 512, "SPARSE_LENGTH": 512, "SPARSE_WINDOWS": (511, 130, 129, 2, 1)}.items():
        monkeypatch.setattr(features, name, value)
    times = [x for _ in range(80) for x in (9.0, 9.0, 2.0, 8.0)]
    rows = {row["pattern"]: row for row in features.sparsity_rows(Stopwatch(times), rounds=1) if row["pass"] == "both"}
    assert rows["all blocks"]["kept"] == rows["no list"]["kept"] == 1 and rows["butterfly"]["kept"] == 0.9
    windows = {name: row["kept"] for name, row in rows.items() if name.startswith("window")}
    assert windows == {"window 511": 1, "window 130": 0.9, "window 129": 0.7, "window 2": 0.7, "window 1": 0.4}
    assert all((row["ms"], row["speed"]) == (2, 4) for row in rows.values())


def test_errors_are_those_of_bf16_and_of_hard_inputs(monkeypatch):
    monkeypatch.setattr(features, "ERROR_DRAWS", 2)
    rows = list(features.error_rows(Stopwatch(), rounds=1))
    assert len(rows) == 8 and {row["variant"] for row in rows} == {"flash2", "sdpa_flash"}
    assert all(0 <= row[name] < 0.05 for row in rows for name in ("out", "dv"))


def test_the_parts_before_a_failure_are_written_and_the_old_file_is_kept(tmp_path, monkeypatch):
    def fails(gpu, rounds):
        yield {"ms": 2}
        raise torch.OutOfMemoryError("full")

    out = tmp_path / "features.json"
    out.write_text("published")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(features, "Gpu", Stopwatch)
    monkeypatch.setattr(features, "environment", lambda: {"commit": "e"})
    monkeypatch.setattr(features, "PARTS", {"speed": lambda gpu, rounds: [{"ms": 1}], "memory": fails})
    with pytest.raises(torch.OutOfMemoryError):
        features.run(features.FeatureSettings(out=out))
    assert json.loads(out.read_text()) == {"environment": {"commit": "e"}, "speed": [{"ms": 1}]}
    assert (tmp_path / "features.json.old").read_text() == "published"


def test_scores_reach_ten_thousand():
    inputs = {name: inputs for name, _, inputs in features.hard_inputs(16, "cpu")}
    q, k, *_ = inputs["scores up to 1e4"]
    scores = (q.double().transpose(1, 2) @ k.double().permute(0, 2, 3, 1)) / 4
    assert scores.abs().max().item() == pytest.approx(1e4, rel=0.02)
    assert inputs["a single key"][1].shape[1] == 1


def test_memory_of_inputs_and_results_is_not_counted(monkeypatch):
    """The stopwatch has 1 MiB before the call and a peak of 4 MiB. Each of out, dq, dk and dv has 2 bytes a number."""
    monkeypatch.setattr(features, "MEMORY_HEADS", 4)
    monkeypatch.setattr(features, "HEAD_DIMS", (16,))
    short, long = features.memory_rows(Stopwatch(), rounds=1)
    assert (short["seq_len"], long["seq_len"]) == (32, 64)
    assert short["extra_mib"] * 2**20 == 3 * 2**20 - 4 * 32 * 4 * 16 * 2
    assert long["extra_mib"] * 2**20 == 3 * 2**20 - 4 * 64 * 4 * 16 * 2
    assert long["bytes_per_query_and_head"] == (3 * 2**20 - 4 * 64 * 4 * 16 * 2) / 64 / 4


def test_grouped_heads_have_fewer_parameters_and_a_smaller_cache(monkeypatch):
    """gpt2-nano: 4 heads of 32, 4 layers and a width of 128. The times are 2 ms, 4 ms and 6 ms, in turn."""
    monkeypatch.setattr(trainers, "VOCABULARY", 64)
    monkeypatch.setattr(features, "KEY_HEADS", (4, 2, 1))
    monkeypatch.setattr(features, "KEY_HEADS_CELL", TrainingCell("gpt2-nano", 32, batches=(2,)))
    rows = list(features.key_head_rows(Stopwatch([2.0, 4.0, 6.0] * 2), rounds=2))
    assert [row["tokens_per_second"] for row in rows] == pytest.approx([32_000, 16_000, 64_000 / 6])
    assert [rows[0]["parameters"] - row["parameters"] for row in rows] == [0, *(4 * 2 * n * 32 * 129 for n in (2, 3))]
    assert [row["cache_mib"] * 2**20 for row in rows] == [4 * 2 * 32 * heads * 32 * 2 for heads in (4, 2, 1)]
