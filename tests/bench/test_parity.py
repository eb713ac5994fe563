import json
import subprocess

import pytest

from bench import parity


def write_run(folder, val_losses, speeds=(10, 20, 30, 50, 40)):
    """A run of five steps: training rows as train.py logs them, and validation rows of their own between them."""
    lines = [
        {
            "step": step,
            "tokens": 100 * step,
            "train/loss": 10.0 - step,
            "perf/step_ms": 1000 / speed,
            "perf/tokens_per_second": speed,
            "perf/tflops": 2.0 * speed,
            "memory/peak_allocated_gib": 1.5 if step == 2 else 1.0,
        }
        for step, speed in enumerate(speeds, start=1)
    ]
    lines += [{"step": 5, "tokens": 500, "val/loss": loss} for loss in val_losses]
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_is_the_medians_of_its_second_half_and_its_last_validation_loss(tmp_path):
    row = parity.summarise("flash2", write_run(tmp_path / "run", val_losses=[9.0, 4.25]))
    # of the speeds 10, 20, 30, 50 and 40 the second half is 30, 50 and 40
    assert (row["tokens_per_second"], row["step_ms"], row["tflops"]) == (40, 25, 80)
    assert (row["variant"], row["steps"], row["tokens"], row["val_loss"], row["peak_gib"]) == (
        "flash2",
        5,
        500,
        4.25,
        1.5,
    )
    assert row["mfu"] is row["data_wait_fraction"] is None
    assert row["loss_curve"] == [(1, 9), (2, 8), (3, 7), (4, 6), (5, 5)] and row["val_curve"] == [(5, 9), (5, 4.25)]


def compare(losses, tmp_path, monkeypatch):
    """bench.parity with runs that end in the given validation losses; returns the file that it writes."""
    out = tmp_path / "parity.json"
    monkeypatch.setattr(parity, "train", lambda variant, _: write_run(tmp_path / variant, [losses[variant]]))
    monkeypatch.setattr("sys.argv", ["parity", "--variants", ",".join(losses), "--out", str(out), "device=cpu"])
    try:
        parity.main()
    finally:
        written = json.loads(out.read_text())
        assert {row["variant"]: row["val_loss"] for row in written["rows"]} == losses
        assert written["environment"]["torch"]


def test_runs_within_the_tolerance_pass(tmp_path, monkeypatch, capsys):
    compare({"naive": 4.0, "sdpa": 4.019, "flash2": 4.01}, tmp_path, monkeypatch)
    assert "spread over 0.0190 nats (at most 0.02 wanted)" in capsys.readouterr().out


def test_runs_that_spread_beyond_the_tolerance_fail_and_are_written_all_the_same(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        compare({"naive": 4.0, "sdpa": 4.021, "flash2": 4.01}, tmp_path, monkeypatch)
    assert stop.value.code == 1
    assert "spread over 0.0210 nats" in capsys.readouterr().out


def test_a_run_that_fails_is_told_without_a_traceback_and_leaves_the_results(tmp_path, monkeypatch, capsys):
    """train.py has said its sentence by then."""
    out = tmp_path / "parity.json"
    monkeypatch.setattr(parity.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 2))
    monkeypatch.setattr("sys.argv", ["parity", "--variants", "sdpa", "--out", str(out), "device=cpu"])
    with pytest.raises(SystemExit) as ended:
        parity.main()
    assert ended.value.code == 2 and not out.exists()
    assert "error: train.py ended with status 2 for sdpa" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--variants", "naive,flash3"], "--variants names the attention 'flash3'; choose of naive, sdpa,"),
        (["--variants", "sdpa,flash2:data.document_mask=true", "--work", "old"], "has a run already; name another"),
        (["--steps", "1"], "--steps 1 leaves no step to time"),
    ],
    ids=["unknown attention", "old runs", "one step"],
)
def test_what_could_not_be_compared_is_refused_before_anything_is_trained(
    arguments, sentence, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "old" / "flash2-data-document_mask-true", [4.0])
    monkeypatch.setattr(parity, "train", lambda *_: pytest.fail("trained"))
    monkeypatch.setattr("sys.argv", ["parity", "data=tokens", *arguments, "device=cpu", "--out", "rows.json"])
    with pytest.raises(SystemExit) as ended:
        parity.main()
    assert ended.value.code == 2 and sentence in capsys.readouterr().err


def test_without_a_gpu_nothing_is_trained_unasked(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(parity.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["parity", "--out", str(tmp_path / "rows.json")])
    with pytest.raises(SystemExit) as ended:
        parity.main()
    assert ended.value.code == 2 and "torch finds none; device=cpu trains here" in capsys.readouterr().err
