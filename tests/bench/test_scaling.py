"""bench.scaling without a GPU: two processes train a tiny model. Their times are not checked."""

import json

import pytest

from bench import scaling
from bench.scaling import ScalingCell, ScalingSettings
from errors import UserError


def test_a_row_of_two_processes(tmp_path, monkeypatch):
    monkeypatch.setitem(scaling.CELLS, "tiny", ScalingCell("gpt2-nano", 64, 2, "fsdp"))
    out = tmp_path / "scaling.json"
    given = {"cells": ["tiny"], "gpus": [2], "steps": 1, "rounds": 2, "device": "cpu", "out": out}
    scaling.run(ScalingSettings(**given))
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["status"], row["message"], row["gpus"], row["linear"]) == ("ok", None, 2, None)
    assert len(row["samples"]) == 2 and row["peak_gib"] is None and row["tflops"] > 0 and row["mfu"] is None


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
