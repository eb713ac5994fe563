import time

import pytest
import torch

from bench.attention.contenders import bind, draw
from bench.attention.rows import empty_row
from bench.attention.shapes import PASSES
from bench.common.timing import Gpu, Sampler, Series, alternate, sampler_of, spin_for, start_series
from kernels.flash2 import flash2
from kernels.naive.definition import standard_attention
from tests.bench.stopwatch import TINY, Stopwatch, measure


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
    series = [Series(row, sampler, every=1) for row, sampler in zip(rows, samplers, strict=True)]
    alternate(series, TINY, Recorder(), rounds=3)
    assert order == [7, 9, 7, 9, 7, 9]


def test_a_slow_variant_sits_out_rounds_but_keeps_six_samples():
    contender = bind("flash2", flash2, TINY, draw(TINY, "cpu"))
    row = empty_row(TINY, "flash2", "forward")
    assert [
        (series.sampler.calls, series.every)
        for ms in (0.01, 1, 4, 50, 1000)
        for series in [start_series(row, contender, Stopwatch([ms]), rounds=20)]
    ] == [(20, 1), (5, 1), (1, 1), (1, 3), (1, 3)]


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


def test_what_a_variant_raises_is_told_in_its_first_line():
    def unable(*args, **kwargs):
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    assert (
        measure({"sdpa_cudnn": unable})["sdpa_cudnn", "both"]["message"] == "No available kernel. Aborting execution."
    )


def test_the_gpu_spins_until_the_host_has_queued_a_sample():
    assert [spin_for(calls, host_ms) for calls, host_ms in [(20, 0.25), (2, 0.1), (20, 40)]] == pytest.approx(
        [6.3, 1.5, 50]  # 1.2 x 21 x 0.25, at least 1.5, at most 50
    )

    class SlowHost(Stopwatch):
        spins = ()

        def host_milliseconds(self, call):
            return 0.5

        def milliseconds(self, call, calls, spin_ms):
            self.spins += ((calls, spin_ms),)
            return 0.1

    gpu = SlowHost()
    sampler, sample_ms = sampler_of(lambda: None, gpu)
    assert (sample_ms, sampler.sample(gpu)) == (2, 0.1)
    assert gpu.spins == ((2, pytest.approx(1.8)), (20, pytest.approx(12.6)))


@pytest.mark.gpu
def test_a_host_slower_than_the_gpu_does_not_show_in_a_sample():
    x = torch.ones(2**10, device="cuda")

    def call():
        time.sleep(5e-4)
        x.exp()

    sampler, _ = sampler_of(call, Gpu())
    assert sampler.calls > 1 and sampler.sample(Gpu()) < 0.05  # milliseconds, where the host needs 0.5
