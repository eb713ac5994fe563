import time
from collections import Counter
from itertools import pairwise

import pytest
import torch

from bench.common.timing import (
    LEAST_SPIN_MS,
    Gpu,
    Sampler,
    balanced,
    in_turn,
    median_milliseconds,
    sampler_of,
    spin_for,
)
from tests.bench.stopwatch import CallsTell, Stopwatch


@pytest.mark.parametrize("variants", ["a", "ab", "abc", "abcd", "abcde", "abcdef"])
def test_variants_take_turns_in_balanced_orders(variants):
    """In 2 n rounds each has each place twice, and comes directly after each other one twice."""
    n = len(variants)
    taken = "".join(in_turn(variants, rounds=2 * n))
    rounds = [taken[i : i + n] for i in range(0, len(taken), n)]
    assert len(rounds) == 2 * n and all({*order} == {*variants} for order in rounds)
    assert all(count == 2 for of_place in zip(*rounds, strict=True) for count in Counter(of_place).values())
    followed = Counter(pair for order in rounds for pair in pairwise(order))
    assert len(followed) == n * (n - 1) and {*followed.values()} <= {2}
    assert n == 1 or len({*rounds[:3]}) > 1, "a few rounds already have several orders"


def test_calls_that_are_compared_are_sampled_in_turn():
    log = []

    def timed(name, *times):
        rest = iter(times)
        return lambda: log.append(name) or next(rest)

    # The first two settle how many calls make a sample.
    calls = timed("a", 9, 9, 5, 7, 6, 6), timed("b", 9, 9, 50, 70, 60, 60)
    assert median_milliseconds(calls, CallsTell(), rounds=3) == [6, 60]
    assert log == [*"aabb", *in_turn("ab", rounds=4)]


def test_rounds_are_rounded_up_to_balanced_orders():
    assert [balanced(rounds, 6) for rounds in (1, 2, 12, 13, 20)] == [1, 12, 12, 24, 24]
    assert [balanced(rounds, 1) for rounds in (1, 7)] == [1, 7] and balanced(5, 0) == 5


def test_the_gpu_spins_until_the_host_has_queued_a_sample():
    assert [spin_for(calls, host_ms) for calls, host_ms in [(20, 0.25), (2, 0.1), (20, 40)]] == pytest.approx(
        [6.3, 1.5, 50]  # 1.2 x 21 x 0.25, at least 1.5, at most 50
    )

    class SlowHost(Stopwatch):
        def __init__(self, host_ms):
            self.host_ms, self.spins = host_ms, ()

        def host_milliseconds(self, call):
            return self.host_ms

        def milliseconds(self, call, calls, spin_ms):
            self.spins += ((calls, spin_ms),)
            return 0.1

    gpu = SlowHost(0.5)
    sampler, sample_ms = sampler_of(lambda: None, gpu)
    assert (sample_ms, sampler.sample(gpu)) == (2, 0.1)
    assert gpu.spins == ((2, pytest.approx(1.8)), (20, pytest.approx(12.6)))
    sampler, _ = sampler_of(lambda: None, SlowHost(5))
    assert (sampler.calls, sampler.spin_ms) == (7, pytest.approx(48))  # with 8 calls the spin would be 54
    assert sampler_of(lambda: None, SlowHost(500))[0].calls == 1


@pytest.mark.gpu
def test_a_host_slower_than_the_gpu_does_not_change_a_sample():
    x = torch.ones(2**10, device="cuda")

    def call():
        time.sleep(5e-4)
        x.exp()

    sampler, _ = sampler_of(call, Gpu())
    assert sampler.calls > 1 and sampler.sample(Gpu()) < 0.05  # milliseconds; the host needs 0.5
    too_short = Sampler(call, calls=20, spin_ms=LEAST_SPIN_MS)  # the host needs 10.5 milliseconds
    assert too_short.sample(Gpu()) < 0.05, "taken again with a longer spin"
