import os

import pytest
import torch

from trainer.meters import ThroughputMeter


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self):
        self.now = 100.0
        self.waited = 7.0  # seconds of waiting for data so far

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def meter_for(clock: Clock, **changes) -> ThroughputMeter:
    settings = dict(tokens_per_step=1000, flops_per_token=2_000_000_000, flops_per_token_causal=1_500_000_000)
    settings |= dict(peak_flops=1e14, device=torch.device("cpu"), clock=clock, waited_s=lambda: clock.waited)
    return ThroughputMeter(**(settings | changes))


def run_steps(meter: ThroughputMeter, clock: Clock, steps: int, seconds: float, wait: float = 0.0) -> None:
    for _ in range(steps):
        clock.now += seconds
        clock.waited += wait
        meter.step()


def test_figures_by_hand(clock):
    """4 steps of 1000 tokens in 2 s: 2000 tokens/s, 500 ms a step, 4 TFLOP/s of a peak of 100."""
    meter = meter_for(clock)
    assert meter.step()
    run_steps(meter, clock, steps=4, seconds=0.5, wait=0.125)
    metrics = meter.read()
    machine_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    assert 0.01 < metrics.pop("memory/peak_rss_gib") < machine_gib
    assert metrics == pytest.approx(
        {
            "perf/tokens_per_second": 2000,
            "perf/step_ms": 500,
            "perf/tflops": 4,
            "perf/tflops_causal": 3,
            "perf/mfu": 0.04,
            "perf/data_wait_fraction": 0.25,
        }
    )


def test_compilation_evaluation_and_saving_are_no_part_of_a_window(clock):
    meter = meter_for(clock)
    clock.now += 60
    assert meter.step()
    run_steps(meter, clock, steps=1, seconds=0.5)
    with meter.excluded():
        clock.now += 30
    with pytest.raises(OSError), meter.excluded():
        clock.now += 3
        raise OSError
    run_steps(meter, clock, steps=1, seconds=0.5)
    assert meter.read()["perf/step_ms"] == pytest.approx(500)


def test_each_window_stands_for_itself(clock):
    meter = meter_for(clock)
    assert meter.step()
    run_steps(meter, clock, steps=2, seconds=1.0, wait=1.0)
    with meter.excluded():
        clock.now += 5
    meter.read()
    run_steps(meter, clock, steps=4, seconds=0.25)
    metrics = meter.read()
    assert metrics["perf/step_ms"] == pytest.approx(250)
    assert metrics["perf/data_wait_fraction"] == 0


def test_a_window_without_steps_has_no_metrics(clock):
    meter = meter_for(clock)
    assert meter.read() == {}
    assert meter.step()
    assert meter.read() == {}
    clock.now += 9
    assert meter.read() == {}
    run_steps(meter, clock, steps=1, seconds=0.5)
    assert meter.read()["perf/step_ms"] == pytest.approx(500)


def test_an_unknown_peak_gives_no_mfu(clock):
    meter = meter_for(clock, peak_flops=None)
    assert meter.step()
    run_steps(meter, clock, steps=1, seconds=1.0)
    assert "perf/mfu" not in meter.read()


def test_tokens_are_of_the_run_and_tflops_of_one_device(clock):
    meter = meter_for(clock, n_devices=8)
    assert meter.step()
    run_steps(meter, clock, steps=1, seconds=1.0)
    metrics = meter.read()
    assert metrics["perf/tokens_per_second"] == pytest.approx(1000)
    assert metrics["perf/tflops"] == pytest.approx(0.25)
    assert metrics["perf/tflops_causal"] == pytest.approx(0.1875)
    assert metrics["perf/mfu"] == pytest.approx(0.0025)


def test_only_a_step_does_not_synchronise(clock, monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 4 * 2**30)
    meter = meter_for(clock, device=torch.device("cuda:0"))
    assert meter.step()
    assert len(waits) == 1
    run_steps(meter, clock, steps=3, seconds=1.0)
    assert len(waits) == 1
    with meter.excluded():
        assert len(waits) == 2
    assert len(waits) == 3
    metrics = meter.read()
    assert len(waits) == 4
    assert metrics["memory/peak_allocated_gib"] == 3
    assert metrics["memory/peak_reserved_gib"] == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_window_waits_for_the_device():
    """The host only queues work; the meter must not count the work as done."""
    meter = ThroughputMeter(
        tokens_per_step=1,
        flops_per_token=2 * 4096**3,
        flops_per_token_causal=1,
        peak_flops=None,
        device=torch.device("cuda"),
        waited_s=float,
    )
    a = torch.randn(4096, 4096, device="cuda")
    a @ a
    meter.step()
    for _ in range(50):
        a @ a
        meter.step()
    metrics = meter.read()
    assert metrics["perf/tflops"] < 1000
    assert metrics["memory/peak_allocated_gib"] >= 2 * 4096**2 * 4 / 2**30
