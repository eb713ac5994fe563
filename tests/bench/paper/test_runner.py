"""The runner of bench.paper with a table of made-up cells, and processes that fail."""

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure

from bench.paper import pages, runner, worker
from bench.paper.settings import PaperSettings
from bench.paper.tables import TABLES, attention_memory
from errors import UserError
from tests.bench.paper import in_process
from tests.e2e import run

SMOKE = PaperSettings(size="smoke")
RESULTS = runner.SMOKE_FOLDER / "paper-letters.json"
LETTERS = [{"letter": letter, "lengths": [1, 2]} for letter in "abc"]


@pytest.fixture(autouse=True)
def terminal():
    """Handle signals as a terminal's processes do: a shell's `&` ignores SIGINT."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Return a log of the letters that are measured, in order. Tests set the outcome of each in `outcomes`."""
    monkeypatch.chdir(tmp_path)
    letters = SimpleNamespace(
        TITLE="Letters",
        cells=lambda settings: LETTERS,
        markdown=lambda rows: f"{len(rows)} rows",
        pictures=lambda rows, device: {"-picture": Figure()},
    )
    monkeypatch.setattr(runner, "TABLES", {"letters": "letters"})
    for module in (runner, pages):
        monkeypatch.setattr(module, "load_table", lambda name: letters)
    log = SimpleNamespace(table=letters, letters=[], written=[], outcomes={})

    def measure(table, cell, settings):
        log.letters.append(cell["letter"])
        log.written.append(len(json.loads(RESULTS.read_text())["rows"]) if RESULTS.exists() else 0)
        return [
            {**cell, "n": 1, "status": "ok"},
            {**cell, "n": 2, **log.outcomes.get(cell["letter"], {"status": "ok"})},
        ]

    monkeypatch.setattr(runner, "measure", measure)
    return log


def test_results_are_written_after_every_cell_and_nothing_is_measured_twice(measured):
    runner.run(SMOKE)
    assert measured.letters == ["a", "b", "c"] and measured.written == [0, 2, 4]
    runner.run(SMOKE)
    assert measured.letters == ["a", "b", "c"]
    runner.run(replace(SMOKE, resume=False))
    assert measured.letters == ["a", "b", "c"] * 2
    names = {
        "paper-letters.json",
        "paper-letters.json.old",
        "paper-letters.md",
        "paper-letters-picture.png",
        "paper-letters-picture.svg",
    }
    assert {path.name for path in RESULTS.parent.iterdir()} == names
    assert "# Letters\n\n6 rows" in RESULTS.with_suffix(".md").read_text()


def interrupted_at(letter, measure, number=signal.SIGINT):
    """Return `measure` with a signal (by default Ctrl-C's) before `letter` is measured."""

    def interrupted(table, cell, settings):
        if cell["letter"] == letter:
            os.kill(os.getpid(), number)
            time.sleep(5)
        return measure(table, cell, settings)

    return interrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_goes_on_where_it_was(measured, monkeypatch, capsys, number):
    whole = runner.measure
    monkeypatch.setattr(runner, "measure", interrupted_at("b", whole, number))
    with pytest.raises(KeyboardInterrupt):
        runner.run(SMOKE)
    assert "paper-smoke; the same command continues\n" in capsys.readouterr().out
    assert "# Letters\n\n2 rows" in RESULTS.with_suffix(".md").read_text()
    monkeypatch.setattr(runner, "measure", whole)
    runner.run(SMOKE)
    assert measured.letters == ["a", "b", "c"]


def test_a_run_that_is_interrupted_before_its_first_cell_leaves_the_pages_there_are(measured, monkeypatch):
    runner.run(SMOKE)
    page = RESULTS.with_suffix(".md").read_text()
    monkeypatch.setattr(runner, "measure", interrupted_at("a", runner.measure))
    with pytest.raises(KeyboardInterrupt):
        runner.run(replace(SMOKE, resume=False))
    assert RESULTS.with_suffix(".md").read_text() == page


def test_what_failed_is_tried_again_in_its_place_and_what_did_not_fit_is_not(measured):
    measured.outcomes |= {"a": {"status": "oom"}, "b": {"status": "failed", "message": "a wire was loose"}}
    with pytest.raises(SystemExit) as ended:
        runner.run(SMOKE)
    assert ended.value.code == 1
    assert "- letter b, lengths [1, 2], n 2: a wire was loose" in RESULTS.with_suffix(".md").read_text()
    measured.outcomes.pop("b")
    runner.run(SMOKE)
    assert measured.letters == ["a", "b", "c", "b"]
    rows = json.loads(RESULTS.read_text())["rows"]
    assert sorted((row["letter"], row["n"], row["status"]) for row in rows) == [
        *[("a", 1, "ok"), ("a", 2, "oom")],
        *[(letter, n, "ok") for letter in "bc" for n in (1, 2)],
    ]


def test_a_failure_of_a_cell_that_the_settings_leave_out_is_no_failure_of_this_run(measured):
    runner.run(SMOKE)
    results = json.loads(RESULTS.read_text())
    left_out = {"letter": "z", "lengths": [1, 2], "status": "failed", "message": "timeout", "commit": "e"}
    RESULTS.write_text(json.dumps(results | {"rows": [*results["rows"], left_out]}))
    runner.run(SMOKE)
    assert measured.letters == ["a", "b", "c"] and json.loads(RESULTS.read_text())["rows"][-1] == left_out


def test_results_of_another_commit_are_refused_and_kept(measured, monkeypatch):
    monkeypatch.setenv("GIT_COMMIT", "first")
    runner.run(SMOKE)
    monkeypatch.setenv("GIT_COMMIT", "second")
    before = RESULTS.read_text()
    refused = "paper-letters.json has commit first, not second; measure all again with resume=false, or add"
    with pytest.raises(UserError, match=refused):
        runner.run(SMOKE)
    assert RESULTS.read_text() == before and len(measured.letters) == 3


def test_nothing_is_measured_if_the_results_folder_cannot_be_created(measured):
    runner.SMOKE_FOLDER.parent.mkdir(parents=True)
    runner.SMOKE_FOLDER.touch()
    with pytest.raises(UserError, match=f"results={re.escape(str(runner.SMOKE_FOLDER))}.* cannot be written"):
        runner.run(SMOKE)
    assert measured.letters == []


def test_what_is_missing_is_added_to_another_commits_results_if_asked_for(measured, monkeypatch):
    whole = runner.measure
    monkeypatch.setenv("GIT_COMMIT", "first")
    monkeypatch.setattr(runner, "measure", interrupted_at("b", whole))
    with pytest.raises(KeyboardInterrupt):
        runner.run(SMOKE)
    monkeypatch.setattr(runner, "measure", whole)
    monkeypatch.setenv("GIT_COMMIT", "second")
    runner.run(replace(SMOKE, any_commit=True))
    assert measured.letters == ["a", "b", "c"]
    assert "commits first (2 rows), second (4 rows), begun 20" in RESULTS.with_suffix(".md").read_text()


def test_what_is_measured_anew_is_resumed_like_anything_else(measured, monkeypatch, capsys):
    """And what was there before is set aside."""
    monkeypatch.setenv("GIT_COMMIT", "first")
    runner.run(SMOKE)
    before, whole = RESULTS.read_text(), runner.measure
    monkeypatch.setenv("GIT_COMMIT", "second")
    monkeypatch.setattr(runner, "measure", interrupted_at("b", whole))
    with pytest.raises(KeyboardInterrupt):
        runner.run(replace(SMOKE, resume=False))
    assert "paper-smoke; the same command without resume=false continues\n" in capsys.readouterr().out
    assert RESULTS.with_name(f"{RESULTS.name}.old").read_text() == before
    monkeypatch.setattr(runner, "measure", whole)
    runner.run(SMOKE)
    assert measured.letters == ["a", "b", "c", "a", "b", "c"]


@pytest.mark.parametrize("content", ["", '{"rows": [', "[]", '{"environment": {}, "rows": []}'])
def test_results_that_cannot_be_read_are_refused_and_kept(measured, content):
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(content)
    with pytest.raises(UserError, match=r"paper-letters\.json is not a results file of bench"):
        runner.run(SMOKE)
    assert RESULTS.read_text() == content


def test_a_process_that_dies_leaves_what_it_had_measured_and_a_failed_row(monkeypatch):
    started = {"letter": "a"}
    line = json.dumps({**started, "n": 1, "status": "ok"}).encode() + b"\n"

    def start(command, **options):
        assert command[1:] == ["-m", "bench.paper.worker", "kernels"] and options["timeout"] == 600
        return subprocess.CompletedProcess(command, -9, line, b"")

    in_process.start_by(monkeypatch, start)
    rows = runner.measure("kernels", started, SMOKE)
    assert [row["status"] for row in rows] == ["ok", "failed"]
    assert rows[1] == {"letter": "a", "status": "failed", "message": "the process was killed by signal 9"}


def test_a_process_that_takes_too_long_is_a_failed_row(monkeypatch):
    def start(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout, output=b'{"letter": "a", "status": "ok"}\n')

    in_process.start_by(monkeypatch, start)
    rows = runner.measure("kernels", {"letter": "a"}, SMOKE)
    assert [row["status"] for row in rows] == ["ok", "failed"]
    assert rows[1]["message"] == "not done within timeout_s=600"


def test_a_cell_takes_free_memory_in_pieces_unless_the_user_configures_the_allocator(monkeypatch):
    configured = []

    def start(command, env, **options):
        configured.append(env["PYTORCH_ALLOC_CONF"])
        return subprocess.CompletedProcess(command, 0, b"", b"")

    in_process.start_by(monkeypatch, start)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    runner.measure("kernels", {"letter": "a"}, SMOKE)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")
    runner.measure("kernels", {"letter": "a"}, SMOKE)
    assert configured == ["expandable_segments:True", "backend:cudaMallocAsync"]


def raising(error):
    def measure(cell, gpu, settings):
        print("a library's output, which is not a row")
        yield {"n": 1, "status": "ok"}
        raise error

    return SimpleNamespace(measure=measure)


@pytest.mark.parametrize(
    ("error", "last"),
    [
        (torch.OutOfMemoryError("of course"), {"letter": "a", "status": "oom"}),
        (RuntimeError("bad\nluck"), {"letter": "a", "status": "failed", "message": "bad"}),
    ],
    ids=["memory", "a bug"],
)
def test_what_a_measurement_raises_becomes_a_row_after_what_it_measured(error, last, monkeypatch):
    in_process.start_by(monkeypatch, in_process.run)
    monkeypatch.setattr(worker, "load_table", lambda name: raising(error))
    assert runner.measure("letters", {"letter": "a"}, SMOKE) == [{"letter": "a", "n": 1, "status": "ok"}, last]


def test_an_unknown_attention_is_a_failed_row(monkeypatch):
    in_process.start_by(monkeypatch, in_process.run)
    (row,) = runner.measure("memory", {"variant": "flash9"}, SMOKE)
    assert row["status"] == "failed" and row["message"].startswith("attention=flash9 is unknown; choose one of naive")


def test_a_cell_really_has_a_process_of_its_own():
    rows = runner.measure("memory", {"variant": "naive"}, SMOKE)
    assert [(row["seq_len"], row["status"]) for row in rows] == [(n, "ok") for n in attention_memory.SIZES["smoke"][1]]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("table=gpt5 size=smoke", ["table=gpt5 is unknown", "gpt2_context", "all"]),
        ("size=huge", ["size=huge", "full, smoke"]),
        ("size=smoke steps=0", ["steps=0", "positive"]),
        ("size=smoke tokens=nowhere", ["tokens=nowhere has no train.bin"]),
        ("table=io tokens=nowhere", ["tokens=nowhere has no effect with table=io", "leave tokens out"]),
        ("table=gpt2 steps=5", ["steps=5 has no effect without tokens", "add tokens=FOLDER"]),
        ("size=smoke colour=red", ["colour", "table, size"]),
    ],
)
def test_mistakes_are_one_sentence_and_leave_nothing(given, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = run("bench/paper/__main__.py", *given.split())
    assert outcome.code == 2 and outcome.out == ""
    (sentence,) = outcome.err.splitlines()
    assert sentence.startswith("error: ") and [word for word in words if word not in sentence] == []
    assert not any(tmp_path.iterdir())


def test_without_a_gpu_the_full_size_is_refused_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    outcome = run("bench/paper/__main__.py", "table=kernels")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "error: size=full finds no GPU; use size=smoke\n"
    assert not any(tmp_path.iterdir())


def test_help_names_every_table_and_setting(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = run("bench/paper/__main__.py", "--help").ok().out
    keys = [key for key in PaperSettings.__dataclass_fields__ if key != "table"]
    assert [word for word in (*TABLES, *keys) if f" {word} " not in out.replace(",", " ")] == []
