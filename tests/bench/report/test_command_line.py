"""python -m bench.report: the page it writes, and mistakes on the command line."""

from pathlib import Path

import pytest

from bench.report import readme
from errors import UserError
from tests.e2e import largest_file, run

PROGRAM = "bench/report/__main__.py"


@pytest.fixture
def here(write_run, tmp_path, monkeypatch) -> Path:
    for name in ("a", "b", "c,d"):
        write_run(name, {1: {"train/loss": 3.0}})
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_is_written_where_out_says(here):
    assert run(PROGRAM, "runs=[runs/a,runs/b,'runs/c,d']").ok().out == "report in report.html\n"
    assert "<!doctype html>" in Path("report.html").read_text()
    assert run(PROGRAM, "runs=runs", "out=new/folder/page.html").ok().out == "report in new/folder/page.html\n"
    assert Path("new/folder/page.html").read_text() == Path("report.html").read_text()
    run(PROGRAM, "runs=runs/*", "out=glob.html").ok()
    assert Path("glob.html").read_text() == Path("report.html").read_text()


def test_a_full_disk_leaves_the_old_page(here):
    """A cut page once took its place."""
    Path("report.html").write_text("old")
    before = sorted(here.rglob("*"))
    with largest_file(100_000):
        outcome = run(PROGRAM, "runs=runs/a")
    assert outcome.code == 2 and "report.html cannot be written (File too large); make room" in outcome.err
    assert Path("report.html").read_text() == "old" and sorted(here.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", ["runs=FOLDER", "results=FOLDER"]),
        ("out=x.html", ["runs=FOLDER"]),
        ("run=runs", ["run is no", "did you mean runs?"]),
        ("runs=runs/a,runs/b", ["runs", "'runs=[runs/a,runs/b]'"]),
        ("runs=runs/*x", ["runs=runs/*x has no metrics.jsonl"]),
        ("runs=empty", ["runs=empty", "no metrics.jsonl"]),
        ("runs={a:b}", ["has no metrics.jsonl"]),
        ("runs=runs results=empty", ["results=empty", "bench/results"]),
        ("runs=runs results=runs/a/metrics.jsonl", ["results=runs/a/metrics.jsonl", "bench/results"]),
        ("runs=runs out=runs/a/metrics.jsonl", ["out=runs/a/metrics.jsonl does not end in .html", "report.html"]),
        ("runs=runs out=empty", ["out=empty is a folder", "name a file in the folder"]),
        ("runs=runs out=file/page.html", ["out=file/page.html cannot be written", "another file"]),
    ],
)
def test_a_mistake_is_one_sentence(here, arguments, words):
    before = sorted(here.rglob("*"))
    outcome = run(PROGRAM, *arguments.split())
    (sentence,) = outcome.err.splitlines()
    assert outcome.code == 2 and outcome.out == ""
    assert sentence.startswith("error: ") and [word for word in words if word not in sentence] == []
    assert sorted(here.rglob("*")) == before


def test_help_names_every_setting():
    out = run(PROGRAM, "--help").ok().out
    assert [
        word for word in ("runs=outputs", "'runs=[outputs/a,outputs/b]'", "results", "out") if word not in out
    ] == []


def test_the_pages_are_updated(monkeypatch, tmp_path):
    changed, whole = tmp_path / "results.md", readme.PAGES[1].read_text()
    changed.write_text(whole.replace("<!-- parity -->\n", "<!-- parity -->\nedited"))
    monkeypatch.setattr(readme, "PAGES", [changed])
    readme.run(readme.ReadmeSettings())
    assert changed.read_text() == whole


def test_a_full_disk_leaves_the_old_pages(monkeypatch, tmp_path):
    changed = tmp_path / "results.md"
    changed.write_text(before := readme.PAGES[1].read_text())
    monkeypatch.setattr(readme, "PAGES", [changed])
    monkeypatch.setattr(readme, "RESULTS", tmp_path / "results" / "h200")  # update no page of bench/results
    with largest_file(1000), pytest.raises(UserError, match=r"results.md cannot be written \(File too large\)"):
        readme.run(readme.ReadmeSettings())
    assert changed.read_text() == before
