"""Times of calls that take turns, each in a row of a table."""

import statistics
from collections.abc import Callable, Iterable

from bench.common.timing import LEAST_SPIN_MS, Gpu, balanced, in_turn, recorded, sampler_of

SLOW_MS = 1000
"""A slower call has a single sample."""


def take_turns(calls: Iterable[tuple[dict, Callable[[], object]]], gpu: Gpu, rounds: int) -> None:
    """Fill in `ms` and the status of each row: the median of samples that the calls take in turn.

    The calls are warm. A call that fails does not stop the others. There are at least `rounds` rounds: see balanced.
    """
    ready = []
    for row, call in calls:
        with recorded([row], gpu):
            ms = gpu.milliseconds(call, 1, LEAST_SPIN_MS)
            if ms > SLOW_MS:
                row.update(ms=ms, status="ok")
            else:
                ready.append((row, sampler_of(call, gpu)[0], []))
    for row, sampler, samples in in_turn(ready, balanced(rounds, len(ready))):
        if row["status"] is None:
            with recorded([row], gpu):
                samples.append(sampler.sample(gpu))
    for row, _, samples in ready:
        if row["status"] is None:
            row.update(ms=statistics.median(samples), status="ok")
