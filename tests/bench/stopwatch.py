"""Helpers of the tests of bench.attention: a clock that needs no GPU, and invented rows."""

from bench.attention.measurement import measure_shape
from bench.attention.rows import empty_row
from bench.attention.shapes import PASSES, SHAPES, AttentionShape
from bench.common.timing import Gpu

TINY = AttentionShape("tiny", batch=2, seq_len=33, heads=2, head_dim=16)


class Stopwatch(Gpu):
    """Run a call once and report the next of `times`, or 2 ms."""

    device = "cpu"

    def __init__(self, times=()):
        self.times = iter(times)

    def wake(self):
        pass

    def milliseconds(self, call, calls, spin_ms):
        call()
        return next(self.times, 2.0)

    def host_milliseconds(self, call):
        return 0.1

    def allocated(self):
        return 2**20

    def peak(self, call):
        call()
        return 4 * 2**20

    def release(self):
        pass


class CallsTell(Stopwatch):
    """Let a call return its own duration in milliseconds."""

    def milliseconds(self, call, calls, spin_ms):
        return call()


class JobsTell(Stopwatch):
    """Report the next of a job's own times, in milliseconds."""

    def __init__(self, times: dict):
        self.times = {job: iter(of_job) for job, of_job in times.items()}

    def milliseconds(self, call, calls, spin_ms):
        call()
        return next(self.times[call.func.__self__])


def measure(variants, shape=TINY, gpu=None, rounds=3):
    rows = measure_shape(shape, variants, gpu or Stopwatch(), rounds)
    return {(row["variant"], row["pass"]): row for row in rows}


def row(variant, pass_="forward", tflops=100.0, shape=None, status="ok"):
    """Return an invented row."""
    made = empty_row(shape or SHAPES[1], variant, pass_)
    return made | {"tflops": tflops if status == "ok" else None, "status": status}


def made_up_rows():
    """Return rows of flash2 and of naive, which runs out of memory, for every shape and pass."""
    speeds = {"naive": 20, "flash2": 400}
    return [
        row(name, pass_, speed, shape, "oom" if speed < 100 and shape.seq_len > 8192 else "ok")
        for shape in SHAPES
        for pass_ in PASSES
        for name, speed in speeds.items()
    ]
