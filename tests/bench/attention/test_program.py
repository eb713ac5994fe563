"""bench.attention without a GPU: the clock is a stopwatch made of plain numbers, the rest is as it runs there."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from bench.attention import program as attention
from bench.attention.shapes import LENGTHS, PASSES, Cell
from errors import UserError
from kernels.flash2 import flash2
from kernels.naive.definition import standard_attention
from tests.bench.stopwatch import TINY, Stopwatch, made_up_rows, measure
from tests.e2e import ROOT

SHAPE = ["batch", "heads", "kv_heads", "seq_len", "head_dim", "causal", "dtype"]
KEYS = ["variant", "pass", *SHAPE, "ms", "ms_p20", "ms_p80", "tflops", "peak_mib", "error", "status", "message"]


def test_what_finds_no_room_beside_the_others_is_measured_alone():
    """Memory is out at its first call; by itself it has what it needs. What does not fit alone either stays so."""
    calls = itertools.count()

    def crowded(*inputs, **options):
        if next(calls) == 0:
            raise torch.OutOfMemoryError("no room")
        return standard_attention(*inputs, **options)

    def huge(*inputs, **options):
        raise torch.OutOfMemoryError("no room at all")

    rows = measure({"naive": standard_attention, "crowded": crowded, "huge": huge})
    found = {name: set() for name, _ in rows}
    for (name, _), row in rows.items():
        found[name].add((row["status"], row.get("alone")))
    assert found == {"naive": {("ok", None)}, "crowded": {("ok", True)}, "huge": {("oom", True)}}


def call_main(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["attention", *map(str, arguments)])
    attention.main()


def test_rows_have_the_keys_of_the_design_and_say_what_was_timed():
    rows = measure({"naive": standard_attention, "flash2": flash2}, gpu=Stopwatch())
    assert list(rows) == [(variant, pass_) for variant in ("naive", "flash2") for pass_ in PASSES]
    for (_, pass_), measured in rows.items():
        assert list(measured) == KEYS
        assert (measured["status"], measured["message"], measured["peak_mib"]) == ("ok", None, 3.0)
        assert (measured["ms"], measured["ms_p20"], measured["ms_p80"]) == (2, 2, 2)
        # 4 B H T^2 D / 2 = 2 x 2 x 2 x 33^2 x 16 operations in 2 ms
        times = {"forward": 1, "backward": 2.5, "both": 3.5}[pass_]
        assert measured["tflops"] == pytest.approx(times * 139_392 / 2e-3 / 1e12)
        assert 0 < measured["error"] < 0.02


def test_results_are_written_after_every_cell_and_a_spent_budget_skips_the_rest(tmp_path, capsys, monkeypatch):
    out = tmp_path / "new" / "attention.json"
    cells = [TINY, Cell("second", batch=1, seq_len=16, heads=1, head_dim=16), Cell("third", 1, 17, 1, 16)]
    clock = iter([0, 0, 1, 9, 9])  # start, then before each cell, then the end
    monkeypatch.setattr(attention.time, "monotonic", lambda: next(clock))
    written = []
    monkeypatch.setattr(attention, "write", lambda path, results: written.append(len(results["rows"])))
    rows = attention.measure_all(cells, {"flash2": flash2}, Stopwatch(), rounds=1, budget=5, out=out)
    assert len(rows) == 6 and written == [3, 6]
    assert "skipped: third" in capsys.readouterr().out


def test_a_results_file_holds_the_environment_and_the_rows(tmp_path):
    out = tmp_path / "new" / "attention.json"
    attention.measure_all([TINY], {"flash2": flash2}, Stopwatch(), rounds=1, budget=60, out=out)
    results = json.loads(out.read_text())
    assert set(results["environment"]) >= {"gpu", "driver", "torch", "triton", "commit", "date"}
    assert [list(row) for row in results["rows"]] == [KEYS] * 3
    assert [path.name for path in out.parent.iterdir()] == ["attention.json"]


def test_a_failure_is_told_once(capsys):
    def unable(*args, **kwargs):
        raise RuntimeError("not on this GPU")

    attention.measure_all([TINY, TINY], {"fa3": unable}, Stopwatch(), rounds=1, budget=60, out=None)
    assert capsys.readouterr().out.count("fa3: not on this GPU") == 1


def test_without_a_gpu_one_sentence_and_status_2(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        call_main(monkeypatch)
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        "error: bench.attention measures GPUs and finds none; without one, --explain and --draw work\n"
    )


def test_charts_are_drawn_again_without_a_gpu(monkeypatch, capsys, tmp_path):
    results = tmp_path / "attention.json"
    rows = [row for row in made_up_rows() if row["pass"] == "both"]
    where = {"gpu": "NVIDIA H200", "torch": "2.11", "triton": "3.6", "commit": "first"}
    results.write_text(json.dumps({"environment": where, "rows": rows}))
    call_main(monkeypatch, "--draw", results)
    assert [path.name for path in tmp_path.glob("*.svg")] == ["attention-both.svg"]
    assert "d128_full" in capsys.readouterr().out


def test_charts_of_no_file_are_refused(monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit):
        call_main(monkeypatch, "--draw", tmp_path / "none.json")
    assert "none.json does not exist" in capsys.readouterr().err
    cut = tmp_path / "cut.json"
    cut.write_text('{"environment": {')
    with pytest.raises(SystemExit):
        call_main(monkeypatch, "--draw", cut)
    assert "cut.json is no results file of bench" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        call_main(monkeypatch, "--draw", ROOT / "bench" / "results" / "h200" / "sparsity.json")
    assert "sparsity.json is of another benchmark" in capsys.readouterr().err


def test_explain_asks_the_launcher_once_per_shape(monkeypatch, capsys):
    from kernels.flash2 import launch

    asked = []
    monkeypatch.setattr(launch, "explain", lambda *args: asked.append(args) or "tiles", raising=False)
    call_main(monkeypatch, "--explain", "--arch", "sm_80", "--cells", "d80_causal,gpt2")
    assert asked == [
        (64, torch.bfloat16, True, 1024, "sm_80"),
        (80, torch.bfloat16, True, 2048, "sm_80"),
        (80, torch.bfloat16, True, 8192, "sm_80"),
    ]
    assert capsys.readouterr().out.splitlines()[1] == "d80_causal_2048   tiles"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--cells d64_causal_512,64k", ["d64_causal_512", "64k"]),
        ("--cells d128_full", [f"d128_full_{n}" for n in LENGTHS]),
        ("--cells d80", ["d80_causal_2048", "d80_causal_8192"]),
    ],
)
def test_cells_are_chosen_by_name_or_by_its_beginning(arguments, expected):
    assert [cell.name for cell in attention.chosen_cells(attention.parse(arguments.split()))] == expected


def test_one_shape_of_the_command_line():
    arguments = "--batch 4 --heads 16 --kv-heads 2 --seq-len 4096 --head-dim 128 --causal --dtype float16"
    assert attention.chosen_cells(attention.parse(arguments.split())) == [
        Cell("shape", 4, 4096, 16, 128, causal=True, kv_heads=2, dtype="float16")
    ]
    assert attention.chosen_cells(attention.parse(["--seq-len", "1024"])) == [Cell("shape", 16, 1024, 32, 64, False)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--cells d65", ["--cells d65", "d64_causal_512"]),
        ("--head-dim 64", ["--seq-len", "--cells"]),
        ("--seq-len 64 --cells gpt2", ["--cells", "leave one of the two out"]),
        ("--seq-len 64 --heads 4 --kv-heads 3", ["--heads 4", "--kv-heads 3"]),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_sentence(arguments, words):
    with pytest.raises(UserError) as refusal:
        attention.chosen_cells(attention.parse(arguments.split()))
    assert all(word in str(refusal.value) for word in words)


def test_an_unknown_variant_is_refused_with_those_there_are():
    with pytest.raises(UserError, match="--variants flash3: this machine has naive, sdpa_flash"):
        attention.chosen_variants(attention.parse(["--variants", "flash3"]))


def test_the_whole_table_goes_to_the_gpus_folder_and_a_part_only_where_it_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="torch finds none; name a file by --out"):
        attention.destination(attention.parse([]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    for arguments, expected in {
        "": ROOT / "bench/results/a100-sxm4-80gb/attention.json",
        "--gpu mine": ROOT / "bench/results/mine/attention.json",
        "--cells gpt2": None,
        "--seq-len 64": None,
        "--variants flash2": None,
        "--cells gpt2 --out a.json": Path("a.json"),
    }.items():
        assert attention.destination(attention.parse(arguments.split())) == expected


def test_a_folder_to_write_to_is_refused_before_anything_is_measured(tmp_path, capsys):
    with pytest.raises(SystemExit):
        attention.parse(["--out", str(tmp_path)])
    assert "is a folder; name a file in it" in capsys.readouterr().err
