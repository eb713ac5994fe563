"""bench.attention without a GPU: the clock is a stopwatch made of plain numbers, the rest is as it runs there."""

import json
import math
from pathlib import Path

import pytest
import torch

from bench import attention, charts
from bench.attention import CELLS, PASSES, Cell
from kernels.flash2 import flash2
from kernels.standard import standard_attention

SHAPE = ["batch", "heads", "kv_heads", "seq_len", "head_dim", "causal", "dtype"]
KEYS = ["variant", "pass", *SHAPE, "ms", "ms_p20", "ms_p80", "tflops", "peak_mib", "error", "status", "message"]
TINY = Cell("tiny", batch=2, seq_len=33, heads=2, head_dim=16)


class Stopwatch(attention.Gpu):
    """Runs a call once and reads the next of `times`, or 2 ms."""

    device = "cpu"

    def __init__(self, times=()):
        self.times = iter(times)

    def milliseconds(self, call, calls):
        call()
        return next(self.times, 2.0)

    def allocated(self):
        return 2**20

    def peak(self, call):
        call()
        return 4 * 2**20

    def release(self):
        pass


def measure(variants, cell=TINY, gpu=None, rounds=3):
    rows = attention.measure(cell, variants, gpu or Stopwatch(), rounds)
    return {(row["variant"], row["pass"]): row for row in rows}


def row(variant, pass_="forward", tflops=100.0, cell=None, status="ok"):
    """A made-up row."""
    made = attention.empty_row(cell or CELLS[1], variant, pass_)
    return made | {"tflops": tflops if status == "ok" else None, "status": status}


def call_main(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["attention", *map(str, arguments)])
    attention.main()


def test_the_cells_are_the_papers_and_our_own():
    cells = {cell.name: cell for cell in CELLS}
    assert len(cells) == len(CELLS) == 4 * 6 + 2 + 1 + 1
    for head_dim in (64, 128):
        for mask in ("causal", "full"):
            for length in (512, 1024, 2048, 4096, 8192, 16384):
                cell = cells.pop(f"d{head_dim}_{mask}_{length}")
                assert cell.batch * cell.seq_len == 16384 and cell.heads * cell.head_dim == 2048
                assert (cell.seq_len, cell.head_dim, cell.causal) == (length, head_dim, mask == "causal")
    assert cells == {
        "d80_causal_2048": Cell("d80_causal_2048", 8, 2048, 32, 80, causal=True),
        "d80_causal_8192": Cell("d80_causal_8192", 2, 8192, 32, 80, causal=True),
        "gpt2": Cell("gpt2", 32, 1024, 12, 64, causal=True, packed=True),
        "64k": Cell("64k", 1, 65536, 12, 64, causal=True),
    }


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


def test_a_row_is_the_median_between_its_20th_and_80th_percentile():
    times = [1.0, *(5.0, 1.0, 3.0, 4.0, 2.0, 6.0)]  # the first settles how many calls make a sample
    forward = measure({"flash2": flash2}, gpu=Stopwatch(times), rounds=6)["flash2", "forward"]
    assert (forward["ms"], forward["ms_p20"], forward["ms_p80"]) == pytest.approx((3.5, 2, 5))


def test_variants_take_their_samples_in_turn():
    order = []

    class Recorder(Stopwatch):
        def milliseconds(self, call, calls):
            order.append(calls)
            return super().milliseconds(call, calls)

    rows = [attention.empty_row(TINY, name, "forward") for name in "ab"]
    series = [attention.Series(row, lambda: None, calls, every=1) for row, calls in zip(rows, (7, 9), strict=True)]
    attention.alternate(series, TINY, Recorder(), rounds=3)
    assert order == [7, 9, 7, 9, 7, 9]


def test_a_slow_variant_sits_out_rounds_but_keeps_six_samples():
    contender = attention.bind("flash2", flash2, TINY, attention.draw(TINY, "cpu"))
    row = attention.empty_row(TINY, "flash2", "forward")
    assert [
        (series.calls, series.every)
        for ms in (0.01, 1, 4, 50, 1000)
        for series in [attention.start_series(row, contender, Stopwatch([ms]), rounds=20)]
    ] == [(20, 1), (5, 1), (1, 1), (1, 3), (1, 3)]


def test_out_of_memory_is_a_row_and_the_others_go_on():
    def greedy(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    rows = measure({"naive": greedy, "flash2": flash2})
    for pass_ in PASSES:
        assert rows["naive", pass_]["status"] == "oom" and rows["naive", pass_]["ms"] is None
        assert rows["flash2", pass_]["status"] == "ok"


def test_out_of_memory_in_the_backward_pass_leaves_the_forward_its_timing():
    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, options):
            return standard_attention(q, k, v, **options)

        @staticmethod
        def backward(ctx, dout):
            raise torch.OutOfMemoryError("CUDA out of memory")

    rows = measure({"naive": lambda q, k, v, **options: Greedy.apply(q, k, v, options)})
    assert [rows["naive", pass_]["status"] for pass_ in PASSES] == ["ok", "oom", "oom"]
    assert rows["naive", "forward"]["error"] > 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda q, k, v, **options: standard_attention(q, k, v, **options) * 1.1, "out is off by"),
        (lambda q, k, v, causal, scale: standard_attention(q, k, v, causal=False, scale=scale), "out is off by"),
        (lambda q, k, v, **options: standard_attention(q, k.detach() + 0 * k, v, **options), "dk is off by"),
        (lambda q, k, v, **options: standard_attention(q, k, v, **options) / 0, "out is not finite"),
        (lambda q, k, v, **options: standard_attention(q, k, v, **options)[:, 1:], "out has shape"),
    ],
    ids=["10 % off", "no mask", "a gradient is missing", "not finite", "another shape"],
)
def test_a_wrong_variant_is_a_failed_row_without_a_timing(wrong, message):
    rows = measure({"flex": wrong, "flash2": flash2})
    for pass_ in PASSES:
        failed = rows["flex", pass_]
        assert failed["status"] == "failed" and message in failed["message"]
        assert failed["ms"] is failed["tflops"] is failed["peak_mib"] is None
        assert rows["flash2", pass_]["status"] == "ok"


def test_what_a_variant_raises_is_told_in_its_first_line():
    def unable(*args, **kwargs):
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    assert (
        measure({"sdpa_cudnn": unable})["sdpa_cudnn", "both"]["message"] == "No available kernel. Aborting execution."
    )


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_the_reference_in_chunks_is_the_reference(causal, monkeypatch):
    inputs = torch.randn(4, 3, 40, 2, 8, dtype=torch.float64)
    whole = attention.in_chunks(standard_attention, *inputs, causal=causal)
    monkeypatch.setattr(attention, "CHUNK", 16)
    chunked = attention.in_chunks(standard_attention, *inputs, causal=causal)
    for one, other in zip(chunked, whole, strict=True):
        torch.testing.assert_close(one, other)


def test_picked_pairs_are_sequences_and_groups_of_heads():
    x = torch.arange(3 * 5 * 4).view(3, 5, 4, 1)  # B 3, T 5, H 4
    picked = attention.pick(x, 2, (torch.tensor([0, 2]), torch.tensor([1, 0])))
    assert picked.shape == (2, 5, 2, 1)
    assert torch.equal(picked[0], x[0, :, 2:]) and torch.equal(picked[1], x[2, :, :2])


def test_grouped_heads_are_measured_too():
    cell = Cell("grouped", batch=1, seq_len=20, heads=4, head_dim=16, kv_heads=2, causal=False)
    variants = {"naive": standard_attention, "flash2": flash2, "sdpa_flash": attention.available()["sdpa_flash"]}
    assert {row["status"] for row in measure(variants, cell).values()} == {"ok"}


def test_gpt2s_cell_gives_views_of_one_projection_and_flash2_its_packed_operator():
    cell = Cell("packed", batch=2, seq_len=20, heads=2, head_dim=16, packed=True)
    data = attention.draw(cell, "cpu")
    ours, theirs = (
        attention.bind(name, f, cell, data) for name, f in [("flash2", flash2), ("naive", standard_attention)]
    )
    assert [x.shape for x in ours.leaves] == [(2, 20, 3, 2, 16)]
    assert [x.stride() for x in theirs.leaves] == [(20 * 96, 96, 16, 1)] * 3
    assert {x.untyped_storage().data_ptr() for x in ours.leaves + theirs.leaves} == {data.qkv.data_ptr()}
    assert {row["status"] for row in measure({"naive": standard_attention, "flash2": flash2}, cell).values()} == {"ok"}


def test_torchs_variants_get_their_heads_first_and_the_others_their_tokens():
    data = attention.draw(TINY, "cpu")
    (q, *_), (mine, *_) = (attention.bind(name, flash2, TINY, data).leaves for name in ("sdpa_cudnn", "fa3"))
    assert q.transpose(1, 2).is_contiguous() and mine.is_contiguous() and torch.equal(q, mine)


def test_speedups_and_their_geometric_mean_by_hand():
    short, long = (cell for cell in CELLS if cell.name in ("d64_causal_512", "d64_causal_1024"))
    rows = [
        row("flash2", tflops=200, cell=short),
        row("sdpa_flash", tflops=100, cell=short),
        row("flash2", tflops=400, cell=long),
        row("sdpa_flash", tflops=50, cell=long),
        row("sdpa_cudnn", tflops=100, cell=short),
        row("sdpa_cudnn", status="oom", cell=long),
        row("flash2", "backward", tflops=1, cell=short),
    ]
    assert attention.speedups(rows, "sdpa_flash", "forward") == [2, 8]
    assert attention.geometric_mean([2, 8]) == pytest.approx(4)  # sqrt(2 x 8)
    assert attention.speedups(rows, "sdpa_cudnn", "forward") == [2]
    assert math.isnan(attention.geometric_mean(attention.speedups(rows, "fa3", "forward")))
    assert attention.ratio_text(rows) == "sdpa_flash 4.00/-/-, sdpa_cudnn 2.00/-/-"
    assert "d64_causal   x sdpa_flash 4.00/-/-, sdpa_cudnn 2.00/-/- (2 of 6 lengths)" in attention.summary(rows)


def test_a_cell_is_one_line():
    cell = CELLS[1]
    rows = [row("naive", pass_, status="oom", cell=cell) for pass_ in PASSES]
    rows += [row("flash2", pass_, tflops, cell) for pass_, tflops in zip(PASSES, (200, 100, 120), strict=True)]
    rows += [row("sdpa_flash", "forward", 160, cell)]
    rows += [row("sdpa_flash", pass_, status="oom", cell=cell) for pass_ in PASSES[1:]]
    line = "d64_causal_512    naive oom flash2 200/100/120 sdpa_flash 160/oom/oom | x sdpa_flash 1.25/-/-"
    assert attention.cell_line(cell, rows) == line


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


def made_up_rows():
    speeds = {"naive": 20, "flash2": 400}
    return [
        row(name, pass_, speed, cell, "oom" if speed < 100 and cell.seq_len > 8192 else "ok")
        for cell in CELLS
        for pass_ in PASSES
        for name, speed in speeds.items()
    ]


def test_charts_are_drawn_from_rows(tmp_path):
    results = tmp_path / "attention.json"
    paths = charts.draw(made_up_rows(), results, {"gpu": "NVIDIA H200"})
    assert [path.name for path in paths] == [f"attention-{p}.{suffix}" for p in PASSES for suffix in ("png", "svg")]
    assert all(path.stat().st_size > 10_000 for path in paths)


def test_charts_of_the_same_rows_are_the_same_bytes(tmp_path):
    forward = [row for row in made_up_rows() if row["pass"] == "forward"]
    drawn = [charts.draw(forward, tmp_path / name, {"gpu": "NVIDIA H200"})[1].read_bytes() for name in ("a", "b")]
    assert drawn[0] == drawn[1]


def test_charts_show_the_papers_shapes_alone(tmp_path):
    assert charts.panel_of(row("flash2")) == charts.Panel(64, True)
    others = [row("flash2", cell=cell) for cell in CELLS if not cell.name.startswith(("d64", "d128"))]
    assert len(others) == 4 and not any(map(charts.panel_of, others))
    assert charts.draw(others, tmp_path / "attention.json", {"gpu": None}) == []


def test_every_variant_has_a_look():
    assert set(charts.LOOKS) == {*attention.available(), "fa2", "fa3"}


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
    results.write_text(json.dumps({"environment": {"gpu": "NVIDIA H200"}, "rows": rows}))
    call_main(monkeypatch, "--draw", results)
    assert [path.name for path in tmp_path.glob("*.svg")] == ["attention-both.svg"]
    assert "d128_full" in capsys.readouterr().out


def test_charts_of_no_file_are_refused(monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit):
        call_main(monkeypatch, "--draw", tmp_path / "none.json")
    assert "none.json does not exist" in capsys.readouterr().err


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
        ("--cells d128_full", [f"d128_full_{n}" for n in attention.LENGTHS]),
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
    with pytest.raises(attention.UserError) as refusal:
        attention.chosen_cells(attention.parse(arguments.split()))
    assert all(word in str(refusal.value) for word in words)


def test_an_unknown_variant_is_refused_with_those_there_are():
    with pytest.raises(attention.UserError, match="--variants flash3: this machine has naive, sdpa_flash"):
        attention.chosen_variants(attention.parse(["--variants", "flash3"]))


def test_a_library_that_is_none_is_refused(tmp_path):
    with pytest.raises(attention.UserError, match="--fa3-library"):
        attention.load_fa3(tmp_path / "_C.so")


def test_the_whole_table_goes_to_the_gpus_folder_and_a_part_only_where_it_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    for arguments, expected in {
        "": attention.ROOT / "bench/results/a100-sxm4-80gb/attention.json",
        "--gpu mine": attention.ROOT / "bench/results/mine/attention.json",
        "--cells gpt2": None,
        "--seq-len 64": None,
        "--variants flash2": None,
        "--cells gpt2 --out a.json": Path("a.json"),
    }.items():
        assert attention.destination(attention.parse(arguments.split())) == expected
