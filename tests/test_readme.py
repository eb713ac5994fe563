"""The tables of README.md and docs/ match bench/results, and CI runs the README's test command."""

import json
import re
import shutil
from pathlib import Path

import pytest

from bench.report.readme import PAGES, RESULTS, TABLE_OF, fill, fits_table, key_heads_table, training_table
from errors import UserError

ROOT = Path(__file__).parents[1]
TEXTS = [page.read_text() for page in PAGES]


def changed_results(folder: Path, file: str, change) -> Path:
    """Copy the results to `folder`, with one file changed."""
    shutil.copytree(RESULTS, folder, ignore=shutil.ignore_patterns("*.png", "*.svg", "*.md"))
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("text", TEXTS)
def test_the_tables_match_the_results(text):
    assert fill(text) == text, "run python -m bench.report.readme"


def test_each_table_is_on_one_page():
    assert sorted(re.findall(r"^<!-- (\w[\w-]*) -->$", "".join(TEXTS), re.M)) == sorted(TABLE_OF)


@pytest.mark.parametrize(
    ("file", "key"), [("parity.json", "tokens_per_second"), ("paper-gpt2_context.json", "tokens_per_second")]
)
def test_a_changed_result_changes_a_table(tmp_path, file, key):
    results = changed_results(tmp_path / "h200", file, lambda content: content["rows"][-1].update({key: 123456}))
    assert "123,456" in fill(TEXTS[1], results)


def test_the_ladder_comes_from_the_gpu_that_measured_it(tmp_path):
    """Without results, the page says how to measure them."""
    mark = "<!-- ladder -->\n<!-- /ladder -->"
    assert "Not measured yet. `python -m bench.paper table=ladder`" in fill(mark, tmp_path / "h200")
    row = {"measured": "kernel", "variant": "step_01_first", "pass": "forward", "head_dim": 64, "causal": True}
    row |= {"tflops": 12.6, "ms": 3.0, "status": "ok", "commit": "0123456789abcdef"}
    where = {"gpu": "NVIDIA H100", "torch": "2.11", "triton": "3.6.0", "commit": "ffff"}
    (tmp_path / "h100").mkdir()
    (tmp_path / "h100" / "paper-ladder.json").write_text(json.dumps({"environment": where, "rows": [row]}))
    made = fill(mark, tmp_path / "h200")
    assert "| 01 first | 12 | - |" in made and "(../bench/results/h100/paper-ladder-forward.svg)" in made
    assert "One NVIDIA H100, torch 2.11, Triton 3.6.0, commit 0123456789ab." in made


def test_a_table_of_the_arena_comes_from_the_gpu_that_measured_it(tmp_path):
    """A page links to its picture. Without results, it says how to measure."""
    mark = "<!-- approximate -->\n<!-- /approximate -->"
    assert "Not measured yet. `python -m bench.paper table=approximate`" in fill(mark, tmp_path / "h200")
    row = {"seq_len": 128, "variant": "flash2", "batch": 16, "heads": 8, "head_dim": 64, "ms": 1.5, "peak_mib": 44.0}
    where = {"gpu": "NVIDIA H100", "torch": "2.11", "triton": "3.6.0", "commit": "ffff", "date": "2026-01-01"}
    results = {"environment": where, "size": "full", "rows": [row | {"status": "ok"}]}
    (tmp_path / "h100").mkdir()
    (tmp_path / "h100" / "paper-approximate.json").write_text(json.dumps(results))
    made = fill(mark, tmp_path / "h200")
    assert "(../bench/results/h100/paper-approximate.svg)" in made and "| `flash2` | exact | 1.50 |" in made
    assert "Measured on NVIDIA H100 (torch 2.11," in made and "# Flash" not in made


@pytest.mark.parametrize("content", ["", '{"rows": [', "[]", '{"environment": {}, "rows": []}'])
def test_a_damaged_results_file_is_refused_by_name(tmp_path, content):
    (tmp_path / "parity.json").write_text(content)
    with pytest.raises(UserError, match=r"parity\.json is no"):
        fill("<!-- parity -->\n<!-- /parity -->", tmp_path)


def test_a_mark_of_no_table_is_refused():
    with pytest.raises(UserError, match="<!-- speed --> names no table; choose one of results, parity"):
        fill("<!-- speed -->\n<!-- /speed -->")


def test_ci_runs_the_readmes_test_command():
    commands = re.findall(r"^    (.* && pytest)$", TEXTS[0], re.M)
    assert commands == ['pip install -e ".[test]" && pytest']
    assert "&& pytest$" in (ROOT / ".ci" / "run").read_text()


def test_a_trainer_that_failed_in_the_final_timing_is_not_in_the_table(tmp_path):
    """Our speed then has no ratio to nanoGPT's, although nanoGPT was timed before."""
    file = json.loads((RESULTS / "training.json").read_text())
    rows = [row for row in file["rows"] if (row["model"], row["context_length"]) == ("gpt3-1.3b", 8192)]
    for row in rows:
        row["status"] = "oom" if row["trainer"] == "nanogpt" else "ok"
    (tmp_path / "training.json").write_text(json.dumps(file | {"rows": rows}))
    lines = training_table(tmp_path).splitlines()
    (line,) = [line for line in lines if line.startswith("| gpt3-1.3b, 8,192 | ours")]
    assert "ours, flash2" in line and "| - |" in line


def test_a_micro_batch_fits_by_the_line_through_the_measured_ones(tmp_path):
    """A model measured with one micro-batch of several sequences is left out: its fixed memory is unknown."""
    common = {"trainer": "ours", "attention": "flash2", "compiled": True, "status": "ok", "context_length": 1024}
    measured = [("a", 2, 20.0, "none"), ("a", 10, 60.0, "none"), ("b", 1, 30.0, "full"), ("c", 4, 9.0, "none")]
    rows = [
        common | dict(zip(("model", "batch_size", "peak_gib", "activation_checkpointing"), row, strict=True))
        for row in [*measured, ("a", 1, 1.0, "none")]
    ]
    rows[-1]["status"] = "oom"
    environment = json.loads((RESULTS / "training.json").read_text())["environment"]
    (tmp_path / "training.json").write_text(json.dumps({"environment": environment, "rows": rows}))
    # 5 GiB a sequence beside 10 GiB, in 21.6, 28.8, 36 and 72 GiB.
    assert fits_table(tmp_path).splitlines()[2:] == [
        "| `a`, 1k | none | 2 | 3 | 5 | 12 |",
        "| `b`, 1k | full | - | - | 1+ | 1+ |",
    ]


def test_key_heads_are_read_from_the_folder_of_any_gpu(tmp_path):
    row = {"model": "gpt2", "context_length": 8192, "n_kv_head": 4, "parameters": 121_250_304, "cache_mib": 96.0}
    row |= {"batch_size": 8, "peak_gib": 20.01, "tokens_per_second": 400_999.9}
    environment = json.loads((RESULTS / "training.json").read_text())["environment"] | {"gpu": "NVIDIA A9 GPU"}
    (tmp_path / "a-gpu").mkdir()
    (tmp_path / "a-gpu" / "features.json").write_text(json.dumps({"environment": environment, "key_heads": [row]}))
    _, _, line, _, caption = key_heads_table(tmp_path / "h200").splitlines()
    assert line == "| A9 | gpt2, 8k | 4 | 121.3 M | 96 MiB | 8 | 20.1 GiB | 400,999 |"
    assert caption.startswith("One NVIDIA A9")
