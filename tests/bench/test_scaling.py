"""bench.scaling without a GPU: torchrun trains a tiny model. Its times are not checked."""

import json
from types import SimpleNamespace

import pytest

from bench import scaling
from bench.common.timing import Cpu
from bench.scaling import ScalingCell, ScalingSettings
from errors import UserError


@pytest.mark.slow  # A new process imports torch and trains a model.
def test_a_row_of_a_process(tmp_path, monkeypatch):
    monkeypatch.setitem(scaling.CELLS, "tiny", ScalingCell("gpt2-nano", 16, 1, "fsdp"))
    out = tmp_path / "scaling.json"
    given = {"cells": ["tiny"], "gpus": [1], "steps": 1, "rounds": 2, "device": "cpu", "out": out}
    scaling.run(ScalingSettings(**given))
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["status"], row["message"], row["gpus"], row["linear"]) == ("ok", None, 1, 1)
    assert len(row["samples"]) == 2 and row["peak_gib"] is None and row["tflops"] > 0 and row["mfu"] is None


@pytest.mark.parametrize(
    ("given", "files"),
    [
        ({}, ["scaling.json", "scaling.json.old"]),
        ({"cells": ["gpt2_1k_ddp"]}, ["scaling.json"]),
        ({"gpus": [2]}, ["scaling.json"]),
        ({"batch": 4}, ["scaling.json"]),
    ],
)
def test_only_complete_measurements_replace_the_published_results(given, files, tmp_path, monkeypatch):
    folder = tmp_path / "h200x2"
    folder.mkdir()
    (folder / "scaling.json").write_text("published")
    monkeypatch.setattr(scaling.torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(scaling, "results_folder", lambda: tmp_path / "h200")
    row = {key: 1.0 for key in ("tokens_per_second", "tflops", "peak_gib")} | {"status": "ok"}
    monkeypatch.setattr(scaling, "row_of", lambda cell, gpus, settings: row | {"gpus": gpus})
    monkeypatch.setattr(scaling, "print_rows", lambda *given: None)
    scaling.run(ScalingSettings(**{"gpus": [1, 2]} | given))
    assert sorted(file.name for file in folder.iterdir()) == files
    assert (folder / files[-1]).read_text() == "published"


def test_the_speed_is_that_of_all_processes(monkeypatch):
    monkeypatch.setattr(scaling, "ours", lambda *_, world: SimpleNamespace(step=lambda batch: None))
    times = iter([7000.0, 100.0, 400.0, 200.0])  # the first step, and three windows
    monkeypatch.setattr(Cpu, "milliseconds", lambda self, call, calls, spin_ms: next(times))
    row = scaling.measure(ScalingCell("gpt2", 1000, 3, "ddp"), 1, 3, "cpu", SimpleNamespace(size=4))
    assert row["first_step_s"] == 7 and row["samples"] == pytest.approx([120_000, 30_000, 60_000])
    assert row["tokens_per_second"] == pytest.approx(60_000) and row["ms"] == 200


def test_linear_is_relative_to_the_speed_of_one_gpu():
    rows = [{"gpus": n, "tokens_per_second": speed} for n, speed in ((1, 100.0), (2, 190.0), (4, None))]
    scaling.add_linear(rows)
    assert [row["linear"] for row in rows] == [1, 0.95, None]
    scaling.add_linear(rows[1:])
    assert [row["linear"] for row in rows] == [1, None, None]


def test_a_failed_row_has_the_error_of_a_process():
    stderr = "W1121 warning\n[rank1]: Traceback\n[rank1]: torch.OutOfMemoryError: CUDA out of memory\n[rank0]: Error b"
    assert scaling.cause(stderr) == "[rank1]: torch.OutOfMemoryError: CUDA out of memory"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"cells": ["gpt5"]}, "cells=gpt5 is unknown; choose one of gpt2_1k_ddp, "),
        ({"gpus": [64]}, "gpus=64 exceeds the 0 GPUs that torch sees"),
        ({"gpus": []}, r"gpus=\[\] is empty"),
        ({"device": "cpu"}, "device=cpu writes no published results; add out=FILE"),
        ({"steps": 10**12}, "steps=1000000000000 is too large"),
    ],
)
def test_impossible_settings_are_refused(given, sentence, monkeypatch):
    monkeypatch.setattr(scaling.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match=sentence):
        ScalingSettings(**given)
