import pytest
import torch

from trainer.meters import RESET_PEAK, ThroughputMeter


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def meter_for(clock: Clock, **changes) -> ThroughputMeter:
    settings = dict(
        tokens_per_step=1000, flops_per_token=2_000_000_000, flops_per_token_causal=1_500_000_000, peak_flops=1e14
    )
    return ThroughputMeter(**(settings | dict(device="cpu", clock=clock) | changes))


def run_steps(meter: ThroughputMeter, clock: Clock, steps: int, seconds: float, wait: float = 0.0) -> None:
    for _ in range(steps):
        clock.now += seconds
        meter.step(wait)


def test_figures_by_hand(clock):
    """4 steps of 1000 tokens in 2 s: 2000 tokens/s, 500 ms a step, 4 TFLOP/s of a peak of 100."""
    meter = meter_for(clock)
    meter.start()
    run_steps(meter, clock, steps=4, seconds=0.5, wait=0.125)
    metrics = meter.read()
    assert metrics.pop("memory/peak_rss_gib") > 0.01
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


@pytest.mark.skipif(not RESET_PEAK.exists(), reason="needs Linux")
def test_peak_memory_of_a_process_is_counted_from_the_start_on(clock):
    """What an earlier job of a sweep held is not this one's."""
    meter = meter_for(clock)
    held = torch.ones(2**26)  # a quarter of a GiB
    meter.start()
    run_steps(meter, clock, steps=1, seconds=0.5)
    before = meter.read()["memory/peak_rss_gib"]
    del held
    meter.start()
    run_steps(meter, clock, steps=1, seconds=0.5)
    assert meter.read()["memory/peak_rss_gib"] < before - 0.2


def test_compilation_evaluation_and_saving_are_no_part_of_a_window(clock):
    meter = meter_for(clock)
    with meter.excluded():  # no window is open yet
        clock.now += 60
    meter.start()
    run_steps(meter, clock, steps=1, seconds=0.5)
    with meter.excluded():
        clock.now += 30
        with meter.excluded():
            clock.now += 7
        clock.now += 1
    with pytest.raises(OSError), meter.excluded():
        clock.now += 3
        raise OSError
    run_steps(meter, clock, steps=1, seconds=0.5)
    assert meter.read()["perf/step_ms"] == pytest.approx(500)


def test_each_window_stands_for_itself(clock):
    meter = meter_for(clock)
    meter.start()
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
    clock.now += 9
    assert meter.read() == {}
    run_steps(meter, clock, steps=1, seconds=0.5)
    assert meter.read()["perf/step_ms"] == pytest.approx(500)


def test_an_unknown_peak_gives_no_mfu(clock):
    meter = meter_for(clock, peak_flops=None)
    meter.start()
    run_steps(meter, clock, steps=1, seconds=1.0)
    assert "perf/mfu" not in meter.read()


def test_tokens_are_of_the_run_and_tflops_of_one_device(clock):
    meter = meter_for(clock, n_devices=8)
    meter.start()
    run_steps(meter, clock, steps=1, seconds=1.0)
    metrics = meter.read()
    assert metrics["perf/tokens_per_second"] == pytest.approx(1000)
    assert metrics["perf/tflops"] == pytest.approx(0.25)
    assert metrics["perf/tflops_causal"] == pytest.approx(0.1875)
    assert metrics["perf/mfu"] == pytest.approx(0.0025)


def test_misuse_is_caught(clock):
    meter = meter_for(clock)
    with pytest.raises(AssertionError, match="start"):
        meter.step(0.0)
    meter.start()
    with pytest.raises(AssertionError, match="inside excluded"), meter.excluded():
        meter.read()


def test_only_a_step_does_not_synchronise(clock, monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 4 * 2**30)
    meter = meter_for(clock, device="cuda:0")
    meter.start()
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
    """A host that only queues work must not be told that the work takes no time."""
    meter = ThroughputMeter(
        tokens_per_step=1, flops_per_token=2 * 4096**3, flops_per_token_causal=1, peak_flops=None, device="cuda"
    )
    a = torch.randn(4096, 4096, device="cuda")
    a @ a
    meter.start()
    for _ in range(50):
        a @ a
        meter.step(0.0)
    metrics = meter.read()
    assert metrics["perf/tflops"] < 1000
    assert metrics["memory/peak_allocated_gib"] >= 2 * 4096**2 * 4 / 2**30
