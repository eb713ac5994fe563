"""The README's tables match bench/results, its pictures and files exist, and CI runs its test command."""

import json
import re
import shutil
from pathlib import Path

import pytest

from bench.report.readme import README, RESULTS, fill, training_table
from errors import UserError

ROOT = Path(__file__).parents[1]


def changed_results(folder: Path, file: str, change) -> Path:
    """Copy the results to `folder`, with one file changed."""
    shutil.copytree(RESULTS, folder, ignore=shutil.ignore_patterns("*.png", "*.svg", "*.md"))
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))
    return folder


def test_the_tables_match_the_results():
    assert fill(README.read_text()) == README.read_text(), "run python -m bench.report.readme"


@pytest.mark.parametrize(
    ("file", "key"), [("parity.json", "tokens_per_second"), ("paper-gpt2_context.json", "tokens_per_second")]
)
def test_a_changed_result_changes_a_table(tmp_path, file, key):
    results = changed_results(tmp_path / "h200", file, lambda content: content["rows"][-1].update({key: 123456}))
    assert "123,456" in fill(README.read_text(), results)


@pytest.mark.parametrize("content", ["", '{"rows": [', "[]", '{"environment": {}, "rows": []}'])
def test_a_damaged_results_file_is_refused_by_name(tmp_path, content):
    (tmp_path / "parity.json").write_text(content)
    with pytest.raises(UserError, match=r"parity\.json is no"):
        fill(README.read_text(), tmp_path)


def test_a_readme_without_a_mark_is_refused():
    with pytest.raises(UserError, match="lacks the marks <!-- training -->"):
        fill(README.read_text().replace("<!-- training -->", ""))


def test_ci_runs_the_readmes_test_command():
    commands = re.findall(r"^    (.* && pytest)$", README.read_text(), re.M)
    assert commands == ['pip install -e ".[test]" && pytest']
    assert "&& pytest$" in (ROOT / ".ci" / "run").read_text()


def test_every_file_and_picture_of_the_readme_exists():
    text = README.read_text()
    for path in re.findall(r"`((?:\w+/)+[\w.]+\.(?:py|md))`|\]\(([\w/.-]+)\)", text):
        assert (ROOT / (path[0] or path[1])).is_file(), path


def test_a_trainer_that_failed_in_the_final_timing_is_not_in_the_table(tmp_path):
    """Our speed then has no ratio to nanoGPT's, although nanoGPT was timed before."""
    file = json.loads((RESULTS / "training.json").read_text())
    rows = [row for row in file["rows"] if (row["model"], row["context_length"]) == ("gpt3-1.3b", 8192)]
    for row in rows:
        row["status"] = "oom" if row["trainer"] == "nanogpt" else "ok"
    (tmp_path / "training.json").write_text(json.dumps(file | {"rows": rows}))
    (line,) = [line for line in training_table(tmp_path).splitlines() if line.startswith("| gpt3-1.3b")]
    assert "ours, flash2" in line and "| - | - |" in line
