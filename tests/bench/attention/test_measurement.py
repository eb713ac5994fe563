"""The measurement of bench.attention without a GPU: the clock is a stopwatch with given times, the rest is real."""

import itertools
import json

import pytest
import torch

from bench.attention import measurement
from bench.attention.measurement import Series, alternate
from bench.attention.rows import empty_row
from bench.attention.shapes import PASSES, AttentionShape
from bench.common.timing import Sampler, in_turn
from kernels.flash2 import flash2
from kernels.naive.definition import standard_attention
from tests.bench.stopwatch import TINY, Stopwatch, measure

SHAPE = ["batch", "heads", "kv_heads", "seq_len", "head_dim", "causal", "dtype"]
KEYS = ["variant", "pass", *SHAPE, "ms", "ms_p20", "ms_p80", "tflops", "peak_mib", "error", "status", "message"]


def test_a_row_is_the_median_between_its_20th_and_80th_percentile():
    times = [1.0, *(5.0, 1.0, 3.0, 4.0, 2.0, 6.0)]  # the first settles how many calls make a sample
    forward = measure({"flash2": flash2}, gpu=Stopwatch(times), rounds=6)["flash2", "forward"]
    assert (forward["ms"], forward["ms_p20"], forward["ms_p80"]) == pytest.approx((3.5, 2, 5))


def test_variants_take_their_samples_in_turn():
    order = []

    class Recorder(Stopwatch):
        def milliseconds(self, call, calls, spin_ms):
            order.append(calls)
            return super().milliseconds(call, calls, spin_ms)

    rows = [empty_row(TINY, name, "forward") for name in "ab"]
    samplers = [Sampler(lambda: None, calls, spin_ms=2) for calls in (7, 9)]
    series = [Series(row, sampler) for row, sampler in zip(rows, samplers, strict=True)]
    alternate(series, TINY, Recorder(), rounds=3)
    assert order == [*in_turn([7, 9], rounds=4)]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["torch", "Triton", "cuBLAS"],
)
def test_out_of_memory_is_a_row_and_the_others_go_on(error):
    def greedy(*args, **kwargs):
        raise error

    rows = measure({"naive": greedy, "flash2": flash2})
    for pass_ in PASSES:
        assert rows["naive", pass_]["status"] == "oom" and rows["naive", pass_]["ms"] is None
        assert rows["flash2", pass_]["status"] == "ok"


def test_if_the_backward_pass_runs_out_of_memory_the_forward_pass_is_timed():
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


def test_the_message_is_the_first_line_of_the_error():
    def unable(*args, **kwargs):
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    assert (
        measure({"sdpa_cudnn": unable})["sdpa_cudnn", "both"]["message"] == "No available kernel. Aborting execution."
    )


def test_a_variant_without_room_beside_the_others_is_measured_alone():
    """`crowded` runs out of memory at its first call only. `huge` does not fit on its own either."""
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


def test_rows_have_the_keys_of_the_design():
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


def test_results_are_written_after_every_shape(tmp_path, monkeypatch):
    shapes = [TINY, AttentionShape("second", batch=1, seq_len=16, heads=1, head_dim=16)]
    written = []
    monkeypatch.setattr(measurement, "write", lambda path, results: written.append(len(results["rows"])))
    measurement.measure_all(shapes, {"flash2": flash2}, Stopwatch(), rounds=1, out=tmp_path / "attention.json")
    assert written == [3, 6]


def test_a_results_file_holds_the_environment_and_the_rows(tmp_path):
    out = tmp_path / "new" / "attention.json"
    measurement.measure_all([TINY], {"flash2": flash2}, Stopwatch(), rounds=1, out=out)
    results = json.loads(out.read_text())
    assert set(results["environment"]) >= {"gpu", "driver", "torch", "triton", "commit", "date"}
    assert [list(row) for row in results["rows"]] == [KEYS] * 3
    assert [path.name for path in out.parent.iterdir()] == ["attention.json"]


def test_a_failure_is_printed_once(capsys):
    def unable(*args, **kwargs):
        raise RuntimeError("not on this GPU")

    measurement.measure_all([TINY, TINY], {"fa3": unable}, Stopwatch(), rounds=1, out=None)
    assert capsys.readouterr().out.count("fa3: not on this GPU") == 1
