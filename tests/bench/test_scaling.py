"""bench.scaling without a GPU: a tiny model by two processes, whose times are not looked at."""

import json

import pytest

from bench import scaling
from bench.training.trainers import Cell
from errors import UserError


def test_a_row_of_two_processes(tmp_path, monkeypatch):
    tiny = scaling.Scaling(Cell("gpt2-nano", 64, (2,)), "fsdp")
    monkeypatch.setitem(scaling.CELLS, "gpt2-nano_0k_fsdp", tiny)
    out = tmp_path / "scaling.json"
    settings = ["--cells=gpt2-nano_0k_fsdp", "--gpus=2", "--steps=1", "--rounds=2", "--device=cpu", f"--out={out}"]
    settings.append(f"--checkpoints={tmp_path}")
    scaling.run(scaling.parse(settings))
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["status"], row["message"], row["gpus"], row["linear"]) == ("ok", None, 2, None)
    assert 0 < row["stall_s"] <= row["saved_s"] and list(tmp_path.iterdir()) == [out]
    assert len(row["samples"]) == 2 and row["peak_gib"] > 0 and row["tflops"] > 0 and row["mfu"] is None


def test_linear_is_the_speed_of_one_times_their_number():
    rows = [{"gpus": n, "tokens_per_second": speed} for n, speed in ((1, 100.0), (2, 190.0), (4, None))]
    scaling.add_linear(rows)
    assert [row["linear"] for row in rows] == [1, 0.95, None]
    scaling.add_linear(rows[1:])
    assert [row["linear"] for row in rows] == [1, None, None]


def test_rows_of_other_cells_are_kept_where_that_is_asked_for(tmp_path, monkeypatch):
    """And those of the cell are measured anew, on as many GPUs as is said."""
    tiny = {name: scaling.Scaling(Cell(name, 64, (2,)), "fsdp") for name in ("one", "other")}
    monkeypatch.setattr(scaling, "CELLS", tiny)
    speed = {
        "tokens_per_second": 8.0,
        "status": "failed",
        "message": "",
        "tflops": 0.0,
        "peak_gib": 0.0,
        "stall_s": None,
    }
    keys = {"context_length": 64, "parallel": "fsdp"}

    def row_of(scaling, n, _):
        return {"model": scaling.cell.model, "batch_size": scaling.cell.batches[0], "gpus": n, **keys, **speed}

    monkeypatch.setattr(scaling, "row_of", row_of)
    out = tmp_path / "scaling.json"
    again, larger = ["--cells=other", "--gpus=1,4", "--add"], ["--cells=other", "--gpus=4", "--batch=8", "--add"]
    for given in (["--cells=one,other", "--gpus=1,2"], again, larger):
        scaling.run(scaling.parse([*given, "--device=cpu", f"--out={out}"]))
    rows = [
        tuple(row[key] for key in ("model", "batch_size", "gpus", "linear"))
        for row in json.loads(out.read_text())["rows"]
    ]
    assert rows == [
        ("one", 2, 1, 1),
        ("one", 2, 2, 0.5),
        ("other", 2, 1, 1),
        ("other", 2, 4, 0.25),
        ("other", 8, 4, None),
    ]


def test_the_error_of_a_process_is_what_a_failed_row_tells():
    stderr = "W1121 warning\n[rank1]: Traceback\n[rank1]: torch.OutOfMemoryError: CUDA out of memory\n[rank0]: Error b"
    assert scaling.cause(stderr) == "[rank1]: torch.OutOfMemoryError: CUDA out of memory"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--cells=gpt5"], "--cells gpt5 is unknown"),
        (["--checkpoints=nowhere"], "--checkpoints nowhere is no folder; make it"),
        (["--gpus=64"], "--gpus 64, but torch sees"),
        (["--device=cpu"], "name a file for its rows by --out"),
    ],
)
def test_what_cannot_be_is_refused(given, sentence):
    with pytest.raises(UserError, match=sentence):
        scaling.run(scaling.parse(given))
