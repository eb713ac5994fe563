"""The README shows what was measured, and CI runs what it tells a stranger to run."""

import json
import re
import shutil
from pathlib import Path

import pytest

from bench.report.readme import README, RESULTS, fill, linear_times, parity_picture, stale_files, training_table
from errors import UserError

ROOT = Path(__file__).parents[1]


def test_tables_are_those_of_the_results():
    assert fill(README.read_text()) == README.read_text(), "run python -m bench.report --readme"


def test_a_changed_result_changes_the_table(tmp_path):
    file = json.loads((RESULTS / "h200" / "parity.json").read_text())
    file["rows"][-1]["tokens_per_second"] = 123456
    shutil.copytree(RESULTS / "h200", tmp_path / "h200")
    (tmp_path / "h200" / "parity.json").write_text(json.dumps(file))
    assert "123,456" in fill(README.read_text(), tmp_path)


def test_pictures_and_pages_are_those_of_the_results(tmp_path):
    assert README.read_text().count("![") == 5 and stale_files() == [], "run python -m bench.report --readme"
    folder = tmp_path / "h200"
    shutil.copytree(RESULTS / "h200", folder)
    (folder / "paper-scaling.svg").write_text("<svg/>")
    file = json.loads((folder / "parity.json").read_text())
    file["rows"][0]["step_ms"] += 1
    (folder / "parity.json").write_text(json.dumps(file))
    assert stale_files(tmp_path) == ["paper-scaling.svg", "parity.svg"]
    parity_picture(tmp_path, folder / "parity.svg")
    file = json.loads((folder / "paper-gpt2.json").read_text())
    next(row for row in file["rows"] if row["measured"] == "perplexity")["perplexity"] = 123456.0
    (folder / "paper-gpt2.json").write_text(json.dumps(file))
    assert stale_files(tmp_path) == ["paper-gpt2.png", "paper-gpt2.svg", "paper-scaling.svg", "paper-gpt2.md"]
    (folder / "paper-blocks.svg").unlink()
    assert stale_files(tmp_path)[0] == "paper-blocks.svg"


def test_times_on_a_line_are_told_as_that_line():
    """1 + 10 x kept, but for a butterfly of twice that."""
    shares = {"all blocks": 1.0, "1 in 2": 0.5, "1 in 4": 0.25, "window 8": 0.8, "window 4": 0.4, "butterfly": 0.1}
    rows = [
        {
            "pattern": name,
            "kept": kept,
            "head_dim": head_dim,
            "pass": pass_,
            "ms": (1 + 10 * kept) * (1 + (kept == 0.1)),
        }
        for name, kept in shares.items()
        for head_dim in (64, 128)
        for pass_ in ("forward", "both")
    ]
    told = linear_times(rows)
    assert told.count("1.00 + 10.00 kept") == 8 and "than 1 %" in told
    assert re.search(r"takes (2.0\d, ){3}2.0\d times", told)


@pytest.mark.parametrize("content", ["", '{"rows": [', "[]", '{"environment": {}, "rows": []}'])
def test_results_that_are_cut_or_none_are_refused_by_name(tmp_path, content):
    shutil.copytree(RESULTS / "h200", tmp_path / "h200")
    (tmp_path / "h200" / "parity.json").write_text(content)
    with pytest.raises(UserError, match=r"parity\.json is no results file of bench"):
        fill(README.read_text(), tmp_path)


def test_a_readme_without_a_mark_is_refused():
    with pytest.raises(UserError, match="lacks the marks <!-- training -->"):
        fill(README.read_text().replace("<!-- training -->", ""))


def test_ci_runs_the_readmes_test_command():
    commands = re.findall(r"^    (.* && pytest)$", README.read_text(), re.M)
    assert commands == ['pip install -e ".[test]" && pytest']
    assert "&& pytest$" in (ROOT / ".ci" / "run").read_text()


def test_every_file_the_readme_names_exists():
    text = README.read_text()
    for path in re.findall(r"`((?:\w+/)+[\w.]+\.(?:py|md))`|\]\(([\w/.-]+)\)", text):
        assert (ROOT / (path[0] or path[1])).is_file(), path


def test_a_trainer_that_failed_when_it_was_timed_in_turn_is_in_no_table(tmp_path):
    """Nor is another's speed told beside its first try; and a file without first steps makes a table too."""
    file = json.loads((RESULTS / "h200" / "training.json").read_text())
    rows = [row for row in file["rows"] if (row["model"], row["context_length"]) == ("gpt3-1.3b", 8192)]
    for row in rows:
        row["status"] = "oom" if row["trainer"] == "nanogpt" else "ok"
    del file["first_step_s"]
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "training.json").write_text(json.dumps(file | {"rows": rows}))
    (line,) = [line for line in training_table(tmp_path).splitlines() if line.startswith("| gpt3-1.3b")]
    assert "ours, flash2" in line and "| - | - |" in line
