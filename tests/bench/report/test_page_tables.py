"""Tables of benchmark results."""

import json

import pytest

from bench.report import readme
from bench.report.page_tables import read_tables
from errors import UserError
from tests.e2e import ROOT


def test_results_become_tables_of_the_columns_that_vary(tmp_path):
    rows = [
        {"variant": "naive", "dtype": "bf16", "ms": 0.123456, "seq_len": 16384, "curve": [1], "note": None, "ok": True},
        {"variant": "flash2", "dtype": "bf16", "ms": 12345.6, "seq_len": 8, "curve": [], "note": None, "ok": False},
    ]
    (tmp_path / "gpu").mkdir()
    content = {"environment": {"gpu": "H200", "driver": None}, "model": "gpt2", "rows": rows, "host": rows[:1]}
    (tmp_path / "gpu" / "attention.json").write_text(json.dumps(content))
    (tmp_path / "gpu" / ".ipynb_checkpoints").mkdir()
    (tmp_path / "gpu" / ".ipynb_checkpoints" / "attention-checkpoint.json").write_text(json.dumps(content))
    whole, host = read_tables(str(tmp_path))
    assert (whole.title, host.title) == ("gpu/attention", "gpu/attention, host")
    assert whole.columns == ["variant", "ms", "seq_len", "ok"]
    assert [[cell.text for cell in row] for row in whole.rows] == [
        ["naive", "0.1235", "16,384", "yes"],
        ["flash2", "12,346", "8", "no"],
    ]
    assert whole.note == "gpu H200, model gpt2; dtype bf16"


def test_our_own_results_become_tables():
    results = ROOT / "bench" / "results"
    tables = {table.title: table for table in read_tables(str(results))}
    rows = json.loads((results / "h200" / "attention.json").read_text())["rows"]
    assert [row[0].text for row in tables["h200/attention"].rows] == [row["variant"] for row in rows]
    assert {"h200/parity", "h200/training", "h200/features, memory", "cpu/prepare"} <= set(tables)
    assert all(table.columns and table.rows for table in tables.values())
    paper = tables["FlashAttention-2's table 1: training GPT-3 models"]
    assert paper.columns[:3] == ["model", "context", "naive"] and len(paper.rows) == 4
    assert [row[2].order is None for row in paper.rows] == [row[2].text == "OOM" for row in paper.rows]
    assert paper.note.startswith("TFLOP/s per device") and "Measured on NVIDIA H200" in paper.note
    of_scaling = [table for title, table in tables.items() if title.startswith("Scaling with length")]
    assert [table.columns[0] for table in of_scaling] == ["sequence length", "heads", "batch"]
    assert all(
        row[0].order is not None or row[0].text.startswith("slope") for table in of_scaling for row in table.rows
    )


@pytest.mark.parametrize("content", ["{", "[]", '{"rows": []}', '{"environment": {}, "rows": [1]}'])
def test_a_file_that_is_not_from_a_benchmark_is_refused(tmp_path, content):
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(UserError, match=r"other\.json is not a results file"):
        read_tables(str(tmp_path))


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no JSON files; give a folder"):
        read_tables(str(tmp_path))


def test_a_ratio_of_training_steps_is_relative_to_the_same_run(tmp_path):
    """Of nanoGPT's micro-batches the faster counts, even if it was only tried. A row of another commit has no ratio."""

    def row(trainer: str, batch_size: int, speed: float, commit: str, best: bool) -> dict:
        attention = "sdpa" if trainer == "nanogpt" else "flash2"
        shape = {"model": "gpt2", "context_length": 8192, "batch_size": batch_size, "compiled": True}
        told = {"status": "ok", "message": None, "peak_gib": 1.0, "commit": commit, "best": best}
        return {"trainer": trainer, "attention": attention, "tokens_per_second": speed, **shape, **told}

    rows = [row("ours", 8, 900.0, "new", True), row("nanogpt", 8, 500.0, "new", True)]
    rows += [row("nanogpt", 16, 600.0, "new", False), row("ours", 1, 300.0, "old", True)]
    environment = {"gpu": "GPU", "torch": "2", "triton": "3", "commit": "new"}
    (tmp_path / "training.json").write_text(json.dumps({"environment": environment, "rows": rows}))
    made = readme.training_table(tmp_path)
    assert "| gpt2, 8,192 | ours, flash2 | 8 | 900 | 1.50 | - | 1.0 GiB | new |" in made
    assert "| gpt2, 8,192 | nanoGPT, sdpa | 8 | 500 | 0.84 | - |" in made  # rivals are rounded up
    assert "| gpt2, 8,192 | ours, flash2 | 1 | 300 | - | - | 1.0 GiB | old |" in made


def test_fp8_stands_beside_bf16_and_is_not_taken_for_it(tmp_path):
    """A faster row in FP8 changes neither the README's table nor the largest micro-batches of bf16."""

    def row(trainer: str, batch: int, speed: float, gib: float, **more) -> dict:
        shape = {"model": "gpt2", "context_length": 1024, "batch_size": batch, "compiled": True, "attention": "flash2"}
        told = {"status": "ok", "message": None, "peak_gib": gib, "commit": "new", "best": True}
        results = {"tokens_per_second": speed, "activation_checkpointing": "none"}
        return {"trainer": trainer} | results | shape | told | more

    rows = [row("ours", 4, 900.0, 12.0, best=False), row("ours", 8, 1000.0, 20.0)]
    rows += [row("ours", 16, 1299.9, 19.04, precision="fp8"), row("floor", 8, 1100.0, 0.0, best=False)]
    rows += [row("nanogpt", 8, 500.0, 30.0, attention="sdpa"), row("nanogpt", 4, 600.0, 15.0, best=False)]
    rows += [row("nanogpt", 8, 649.9, 25.0, attention="sdpa", precision="rowwise")]
    rows += [row("nanogpt", 8, 999.0, 25.0, commit="old")]
    environment = {"gpu": "NVIDIA H100 80GB HBM3", "torch": "2", "triton": "3", "commit": "new"}
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "training.json").write_text(json.dumps({"environment": environment, "rows": rows}))
    made = readme.fp8_table(tmp_path / "gpu")
    assert "| H100 | `gpt2`, 1k | 8, 16 | 1,000 | 1,299 | 1.299 | 1.18 | 20.0 GiB | 19.1 GiB |" in made
    cells = [line.strip("| ").split(" | ")[1:5] for line in readme.fp8_peers_table(tmp_path / "gpu").splitlines()[2:6]]
    assert cells == [
        ["ours, flash2, FP8", "16", "1,299", "1"],
        ["ours, flash2", "8", "1,000", "1.29"],
        ["nanoGPT, sdpa", "8", "500", "2.59"],
        ["nanoGPT, sdpa, torchao's FP8 (rowwise)", "8", "650", "2.00"],
    ]
    assert "| gpt2, 1,024 | ours, flash2, FP8 | 16 |" in readme.training_table(tmp_path / "gpu")
    assert readme.fits_table(tmp_path / "gpu").endswith("| `gpt2`, 1k | none | 8 | 12 | 16 | 34 |")
