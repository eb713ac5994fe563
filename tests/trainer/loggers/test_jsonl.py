import json
import math
from pathlib import Path

import pytest

from tests import e2e
from trainer.loggers.jsonl import JsonlLogger, truncate_after


def rows(path: Path) -> list[dict]:
    def no_constant(name):
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=no_constant) for line in path.read_text().splitlines()]


def test_rows_are_on_disk_at_once(tmp_path):
    log = JsonlLogger(tmp_path / "new" / "metrics.jsonl", on_failure=print)
    log.log(10, 5120, {"train/loss": 3.5})
    assert rows(log.path) == [{"step": 10, "tokens": 5120, "train/loss": 3.5}]


def test_values_that_are_not_finite_become_null(tmp_path):
    log = JsonlLogger(tmp_path / "metrics.jsonl", on_failure=print)
    log.log(1, 2, {"train/loss": math.nan, "train/perplexity": math.inf, "train/lr": 0.1})
    assert rows(log.path) == [{"step": 1, "tokens": 2, "train/loss": None, "train/perplexity": None, "train/lr": 0.1}]


def test_rows_after_a_checkpoint_are_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    truncate_after(path, 20, evaluated=20)
    assert not path.exists()
    log = JsonlLogger(path, on_failure=print)
    for step in (10, 20, 30):
        log.log(step, step, {})
    log.close()
    truncate_after(path, 20, evaluated=20)
    assert [row["step"] for row in rows(path)] == [10, 20]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("torn", ['{"step": 20, "tok', '{"step": 2', "{", "2", "\0\0\0"])
def test_an_incomplete_last_line_is_removed(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10, "tokens": 10}\n' + torn)
    truncate_after(path, 10, evaluated=0)
    log = JsonlLogger(path, on_failure=print)
    log.log(20, 20, {})
    assert [row["step"] for row in rows(path)] == [10, 20]


def test_each_outage_of_the_disk_is_reported_once_and_no_row_is_lost(tmp_path):
    """Rows beyond the buffer of Python's file were lost, and a second outage was not reported."""
    reports = []
    log = JsonlLogger(tmp_path / "metrics.jsonl", on_failure=reports.append)
    log.log(1, 10, {"train/loss": 3.5})
    for outage in (1, 2):
        with e2e.largest_file(log.path.stat().st_size + 5):  # half a row fits
            for step in range(1000 * outage - 998, 1000 * outage):
                log.log(step, 10 * step, {"train/loss": 3.5})
        assert len(reports) == outage and "metrics.jsonl cannot be written (File too large)" in reports[-1]
        log.log(1000 * outage, 40, {})
        log.log(1000 * outage + 1, 40, {})
    log.close()
    assert [row["step"] for row in rows(log.path)] == list(range(1, 2002)) and len(reports) == 2


def test_a_disk_that_is_full_at_the_end_is_reported(tmp_path):
    """The run ended with status 0 and did not say that rows are missing."""
    reports = []
    log = JsonlLogger(tmp_path / "metrics.jsonl", on_failure=reports.append)
    with e2e.largest_file(5):
        log.log(1, 10, {})
        log.log(2, 20, {})
        log.close()
    log.close()
    assert len(reports) == 2 and "metrics.jsonl lacks the last 2 rows" in reports[1]
