import time

import pytest
import torch

from bench.common.timing import Gpu, median_milliseconds, sampler_of, spin_for
from tests.bench.stopwatch import Stopwatch


def test_calls_that_are_compared_are_sampled_in_turn():
    order = []
    calls = [lambda: order.append("a"), lambda: order.append("b")]
    gpu = Stopwatch([1, 1, *(5, 50, 7, 70, 6, 60)])  # the first two settle how many calls make a sample
    assert median_milliseconds(calls, gpu, rounds=3) == [6, 60]
    assert order == ["a", "a", "b", "b", "a", "b", "a", "b", "a", "b"]


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
def test_a_host_slower_than_the_gpu_does_not_change_a_sample():
    x = torch.ones(2**10, device="cuda")

    def call():
        time.sleep(5e-4)
        x.exp()

    sampler, _ = sampler_of(call, Gpu())
    assert sampler.calls > 1 and sampler.sample(Gpu()) < 0.05  # milliseconds; the host needs 0.5
