"""Find and read the runs of train.py."""

import math

import pytest

from bench.report.page_tables import changes, common, differences
from bench.report.runs import read_runs
from bench.report.summary import summary
from errors import UserError
from tests.bench.report.made_up import save_run

LOSS = {"train/loss": 3.0}


@pytest.fixture
def outputs(write_run, tmp_path, monkeypatch):
    for name in ("10_naive", "2_sdpa", "old/a", "old/b"):
        write_run(name, {1: LOSS})
    (tmp_path / "runs" / "2_sdpa" / "checkpoints").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("places", "names"),
    [
        (["runs/old/b", "runs/old/a"], ["b", "a"]),
        (["runs"], ["2_sdpa", "10_naive", "old/a", "old/b"]),
        (["runs/*_*"], ["2_sdpa", "10_naive"]),
        (["runs/*"], ["2_sdpa", "10_naive", "old/a", "old/b"]),
        (["runs/old/b", "runs/old", "runs/old/../old/a"], ["b", "a"]),
        (["runs/old/a"], ["a"]),
    ],
    ids=["folders as given", "a parent", "a glob", "a glob of parents", "each run once", "one"],
)
def test_runs_are_found(outputs, places, names):
    assert [run.name for run in read_runs(places)] == names


def test_each_real_run_is_found_once_and_hidden_copies_are_named(outputs, write_run, tmp_path, capsys):
    save_run(tmp_path / "elsewhere" / "c", {1: LOSS})
    (outputs / "linked").symlink_to(tmp_path / "elsewhere")
    (outputs / "latest").symlink_to("10_naive")
    (outputs / "old" / "up").symlink_to(outputs)
    hidden = write_run("old/.ipynb_checkpoints/a", {1: LOSS})
    assert sorted(run.name for run in read_runs(["runs"])) == sorted(
        ["runs/2_sdpa", "runs/10_naive", "runs/old/a", "runs/old/b", "elsewhere/c"]
    )
    assert capsys.readouterr().out == f"skipped 1 hidden files: {hidden.relative_to(tmp_path)}/metrics.jsonl\n"


@pytest.mark.parametrize("place", ["nowhere", "runs/*_flash3", "", "runs/2_sdpa/checkpoints"])
def test_a_place_without_runs_is_refused(outputs, place):
    with pytest.raises(UserError, match=rf"runs={place.replace('*', '.')} has no metrics.jsonl .*give output folders"):
        read_runs(["runs", place])


def test_a_folder_with_the_name_of_a_pattern_is_not_expanded(write_run):
    folder = write_run("lr[12]", {1: LOSS})
    write_run("lr1", {1: LOSS})
    assert [run.name for run in read_runs([str(folder)])] == ["lr[12]"]


def test_the_metrics_of_a_killed_run_are_read(write_run):
    folder = write_run("killed", {1: LOSS, 2: {"train/loss": math.nan}})
    with open(folder / "metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 3, "tok')
    (run,) = read_runs([str(folder)])
    assert run.series("train/loss") == {0: 3.0, 1: None} and run.finite("train/loss") == [3.0]


@pytest.mark.parametrize(
    "line",
    [
        *('{"step": 1, "tok', "[1]", '{"step": 1}', '{"step": 1, "tokens": 2, "val/loss": "x"}'),
        *(f'{{"step": 1, "tokens": 2, "settings_changed": {wrong}}}' for wrong in ('["a"]', '{"a": [1]}', '{"a": 7}')),
    ],
)
def test_a_bad_line_that_is_not_the_last_is_refused(write_run, line):
    folder = write_run("broken", {1: LOSS})
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + line + "\n" + path.read_text())
    with pytest.raises(UserError, match=r"metrics\.jsonl line 2 is not a row of metrics; remove"):
        read_runs([str(folder)])


def test_changed_settings_are_not_metrics(write_run):
    """A resume with other settings writes a row of its own."""
    folder = write_run("resumed", {10: LOSS | {"perf/step_ms": 100.0}})
    with open(folder / "metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 10, "tokens": 1000, "settings_changed": {"optimizer.lr": [0.001, 0.004]}}\n')
        metrics.write('{"step": 20, "tokens": 2000, "train/loss": 2.0, "perf/step_ms": 200.0}\n')
    (run,) = read_runs([str(folder)])
    assert run.changes == {1: {"optimizer.lr": [0.001, 0.004]}} and run.finite("train/loss") == [3.0, 2.0]
    assert run.seconds() == pytest.approx([1.0, 1.0, 3.0])
    assert [cell.text for cell in changes([run]).rows[0]] == ["resumed", "10", "optimizer.lr", "0.001", "0.004"]
    assert summary([run]).rows[0][0].text == "resumed"


@pytest.mark.parametrize("content", ["train: ["])
def test_a_broken_configuration_is_refused_and_a_missing_one_is_empty(write_run, content):
    folder = write_run("a", {1: LOSS})
    (folder / "config.yaml").write_text(content)
    with pytest.raises(UserError, match=r"config\.yaml is not a configuration"):
        read_runs([str(folder)])
    (folder / "config.yaml").unlink()
    assert read_runs([str(folder)])[0].settings == {}


def test_training_time_counts_only_steps(write_run):
    """Windows end at steps 10 and 20; an evaluation at 15 lies in the second."""
    timed = {step: LOSS | {"perf/step_ms": ms} for step, ms in ((10, 100.0), (20, 200.0))}
    rows = {10: timed[10], 15: {"val/loss": 3.0}, 20: timed[20], 22: LOSS}
    runs = read_runs([str(write_run("timed", rows)), str(write_run("not", {1: LOSS}))])
    assert runs[0].seconds() == pytest.approx([1.0, 2.0, 3.0, 3.4])
    assert runs[1].seconds() == []


def test_a_resumed_run_is_timed_from_its_first_step(write_run):
    timed = {step: LOSS | {"perf/step_ms": 100.0} for step in (110, 120)}
    (run,) = read_runs([str(write_run("later", timed, log_interval=10))])
    assert run.seconds() == pytest.approx([1.0, 2.0])


def test_runs_with_unknown_settings_do_not_make_settings_differ(write_run):
    folders = [write_run(name, {1: LOSS}, attention=name, max_steps=7) for name in ("naive", "sdpa", "flash2")]
    (folders[2] / "config.yaml").unlink()
    runs = read_runs(list(map(str, folders)))
    assert differences(runs).columns == ["run", "attention.name", "attention.backend"]
    shared = {key.text: value.text for key, value in common(runs).rows}
    assert shared["train.max_steps"] == "7" and shared["wandb.tags"] == "null" and "attention.name" not in shared
