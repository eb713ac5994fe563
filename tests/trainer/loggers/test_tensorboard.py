"""TensorBoard's own reader reads back what a run has written."""

import threading
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import e2e
from trainer.loggers.tensorboard import TensorBoardLogger

pytest_plugins = ["tests.e2e"]
OWN = ("tensorboard=true", "train.max_steps=6", "checkpoint.interval=3", "checkpoint.keep=9", "train.eval_interval=2")


def read(folder: str) -> dict[str, list[tuple[int, float]]]:
    """Return the steps and values of each metric that TensorBoard shows."""
    events = EventAccumulator(str(Path(folder, "tensorboard")), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def assert_as_in_metrics_jsonl(folder: str) -> None:
    rows, shown = e2e.rows(folder), read(folder)
    assert {"train/loss", "val/loss", "perf/tokens_per_second", "tokens"} <= shown.keys()
    for key in {key for row in rows for key in row} - {"step"}:
        assert shown[key] == [(row["step"], pytest.approx(row[key])) for row in rows if key in row]


def test_a_resumed_run_shows_each_step_once_and_a_new_run_hides_the_old_one(workplace):
    e2e.train("run", *OWN).ok()
    assert_as_in_metrics_jsonl("run")
    changed = "checkpoint.resume=run/checkpoints/step-00000003.pt", "optimizer.lr=1e-3", "optimizer.min_lr=1e-4"
    e2e.train("run", *OWN, *changed, "checkpoint.dir=later", "train.max_steps=8").ok()
    assert [step for step, _ in read("run")["train/loss"]] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert_as_in_metrics_jsonl("run")
    e2e.train("run", *OWN, "train.max_steps=4", "checkpoint.dir=new").ok()
    assert [step for step, _ in read("run")["train/loss"]] == [1, 2, 3, 4]
    assert_as_in_metrics_jsonl("run")


def test_a_full_disk_is_reported_once_and_a_row_before_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # TensorBoard writes in a thread.
    reports = []
    log = TensorBoardLogger(tmp_path / "tensorboard", None, reports.append)
    log.log(1, 10, {"train/loss": 3.5})
    (file,) = (tmp_path / "tensorboard").iterdir()
    with e2e.largest_file(file.stat().st_size + 5):
        log.log(2, 20, {"train/loss": 3.0})
        log.log(3, 30, {"train/loss": 2.5})
        log.close()
    (report,) = reports
    assert report.startswith("TensorBoard failed and is off from here on (") and "metrics.jsonl goes on" in report
    assert read(str(tmp_path))["train/loss"] == [(1, 3.5)]
