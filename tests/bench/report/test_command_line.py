"""python -m bench.report: what it takes, and what it refuses in one sentence."""

import sys
from pathlib import Path

import pytest

from bench.report.__main__ import main


def report(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["report", *arguments])
    try:
        main()
    except SystemExit as ended:
        return ended.code or 0
    return 0


@pytest.fixture
def here(write_run, tmp_path, monkeypatch) -> Path:
    for name in ("a", "b"):
        write_run(name, {1: {"train/loss": 3.0}})
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_page_of_named_runs_is_written_where_told(here, monkeypatch, capsys):
    assert report(monkeypatch, "runs=runs/a,runs/b") == 0
    assert "<!doctype html>" in Path("report.html").read_text()
    assert report(monkeypatch, "runs=runs", "out=new/folder/page.html") == 0
    assert Path("new/folder/page.html").read_text() == Path("report.html").read_text()
    assert capsys.readouterr().out == "report in report.html\nreport in new/folder/page.html\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", ["runs=FOLDER", "--readme"]),
        ("out=x.html", ["runs=FOLDER"]),
        ("run=runs", ["run is no setting", "runs, results, out"]),
        ("runs", ["runs has no value", "runs=..."]),
        ("runs=runs/*x", ["runs=runs/*x does not exist"]),
        ("runs=empty", ["runs=empty", "no metrics.jsonl"]),
        ("runs=runs results=empty", ["results=empty", "bench/results"]),
        ("runs=runs out=empty", ["out=empty is a folder", "out=empty/report.html"]),
        ("runs=runs out=file/page.html", ["out=file/page.html cannot be written", "another file"]),
        ("--check", ["--check", "--readme"]),
        ("--readme runs=runs", ["--readme takes no runs=runs"]),
    ],
)
def test_mistake_is_refused_in_one_sentence(here, monkeypatch, capsys, arguments, words):
    before = sorted(here.rglob("*"))
    assert report(monkeypatch, *arguments.split()) == 2
    out, err = capsys.readouterr()
    (sentence,) = err.splitlines()
    assert out == "" and sentence.startswith("error: ") and [word for word in words if word not in sentence] == []
    assert sorted(here.rglob("*")) == before


def test_help_tells_both_uses(monkeypatch, capsys):
    assert report(monkeypatch, "--help") == 0
    out = capsys.readouterr().out
    assert [word for word in ("runs=", "results=", "out=", "--readme", "--check") if word not in out] == []


def test_readme_is_checked(monkeypatch, tmp_path, capsys):
    from bench.report import readme

    assert report(monkeypatch, "--readme", "--check") == 0
    changed = tmp_path / "README.md"
    changed.write_text(readme.README.read_text().replace("<!-- parity -->\n", "<!-- parity -->\nedited"))
    monkeypatch.setattr(readme, "README", changed)
    assert report(monkeypatch, "--readme", "--check") == 2
    assert "run python -m bench.report --readme" in capsys.readouterr().err
    assert "edited" in changed.read_text(), "a check changes nothing"
