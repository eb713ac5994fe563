"""The first table of a report."""

import math

from bench.report.runs import read_runs
from bench.report.summary import summary


def shown(table) -> list[dict[str, str]]:
    return [dict(zip(table.columns, (cell.text for cell in row), strict=True)) for row in table.rows]


def test_summary_has_the_best_run_first_and_no_empty_columns(write_run):
    speeds = {step: {"perf/tokens_per_second": speed} for step, speed in ((1, 10.0), (2, 10.0), (3, 2000.4), (4, 10.0))}
    good = write_run("good", speeds | {5: {"val/loss": 2.0}, 6: {"val/loss": 2.5}}, max_steps=6)
    runs = [
        write_run("blind", {1: {"train/loss": 9.0}}, max_steps=60),
        write_run("burst", {1: {"val/loss": 2.0}, 2: {"val/loss": math.nan}}, max_steps=2),
        write_run("worse", {1: {"val/loss": 3.0}}, max_steps=1),
        good,
    ]
    table = summary(read_runs(list(map(str, runs))))
    rows = shown(table)
    assert [row["run"] for row in rows] == ["good", "worse", "blind", "burst"]
    assert [row["validation loss"] for row in rows] == ["2.5000", "3.0000", "-", "not finite"]
    assert [row["lowest validation loss"] for row in rows] == ["2.0000", "3.0000", "-", "2.0000"]
    assert [row["steps"] for row in rows] == ["6", "1", "1 of 60", "2"]
    assert rows[0]["tokens/s"] == "2,000", "the median of the second half"
    assert not {"MFU", "peak GPU memory", "training time"} & set(table.columns)


def cost(speed: float, gpu_gib: float | None = None) -> dict[int, dict]:
    memory = {} if gpu_gib is None else {"memory/peak_allocated_gib": gpu_gib}
    return {1: {"perf/tokens_per_second": speed, "memory/peak_rss_gib": speed / 100} | memory}


def test_speed_and_memory_are_relative_to_the_first_run_which_the_heading_names(write_run):
    """The order of the table does not matter: the last run given has the lowest loss and comes first."""
    best = {1: cost(150.0, 3.0)[1] | {"val/loss": 1.0}}
    runs = [write_run("base", cost(200.0, 4.0)), write_run("more", cost(266.0, 4.5)), write_run("best", best)]
    runs.append(write_run("blind", {1: {"train/loss": 3.0}}))
    rows = shown(summary(read_runs(list(map(str, runs)))))
    assert [(row["run"], row["speed relative to base"], row["memory relative to base"]) for row in rows] == [
        ("best", "x 0.75", "-25.0%"),
        ("base", "x 1.00", "+0.0%"),
        ("more", "x 1.33", "+12.5%"),
        ("blind", "-", "-"),
    ]


def test_without_a_gpu_the_memory_of_the_process_is_compared(write_run):
    runs = [write_run("a", cost(200.0)), write_run("b", cost(300.0))]
    table = summary(read_runs(list(map(str, runs))))
    assert [row["memory relative to a"] for row in shown(table)] == ["+0.0%", "+50.0%"]
    assert not [column for column in summary(read_runs([str(runs[0])])).columns if "relative" in column]
