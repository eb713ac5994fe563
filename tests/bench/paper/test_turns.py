"""Calls that take turns: the order of their samples, the medians, and calls that fail or are slow."""

from bench.common.timing import in_turn
from bench.paper.turns import take_turns
from tests.bench.stopwatch import CallsTell


def rows_of(*names: str) -> list[dict]:
    return [{"name": name, "ms": None, "status": None, "message": None} for name in names]


def test_samples_alternate_and_the_median_counts():
    log = []

    def timed(name, *times):
        rest = iter(times)

        def call():
            log.append(name)
            return next(rest)

        return call

    a, b = rows_of("a", "b")
    take_turns([(a, timed("a", 9, 9, 1, 3, 2, 2)), (b, timed("b", 9, 9, 30, 10, 20, 20))], CallsTell(), rounds=3)
    assert (a["ms"], b["ms"], a["status"]) == (2, 20, "ok")
    assert log == [*"aabb", *in_turn("ab", rounds=4)], "4 rounds of 2 calls are balanced"


def test_a_slow_call_has_one_sample_and_a_call_that_fails_does_not_stop_the_others():
    counts = dict.fromkeys(("slow", "broken", "fast"), 0)

    def call(name, ms):
        def run():
            counts[name] += 1
            if name == "broken" and counts[name] > 3:
                raise RuntimeError("CUDA out of memory")
            return ms

        return run

    rows = rows_of(*counts)
    take_turns(
        [(row, call(row["name"], ms)) for row, ms in zip(rows, (5000, 1, 2), strict=True)], CallsTell(), rounds=5
    )
    assert counts["slow"] == 1 and counts["broken"] == 4
    assert [(row["ms"], row["status"]) for row in rows] == [(5000, "ok"), (None, "oom"), (2, "ok")]
