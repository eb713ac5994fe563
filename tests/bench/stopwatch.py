"""What the tests of bench.attention share: a clock that needs no GPU, and made-up rows."""

from bench.attention import program as attention
from bench.attention.rows import empty_row
from bench.attention.shapes import CELLS, PASSES, Cell
from bench.common.timing import Gpu

TINY = Cell("tiny", batch=2, seq_len=33, heads=2, head_dim=16)


class Stopwatch(Gpu):
    """Runs a call once and reads the next of `times`, or 2 ms."""

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


def measure(variants, cell=TINY, gpu=None, rounds=3):
    rows = attention.measure(cell, variants, gpu or Stopwatch(), rounds)
    return {(row["variant"], row["pass"]): row for row in rows}


def row(variant, pass_="forward", tflops=100.0, cell=None, status="ok"):
    """A made-up row."""
    made = empty_row(cell or CELLS[1], variant, pass_)
    return made | {"tflops": tflops if status == "ok" else None, "status": status}


def made_up_rows():
    """naive, which runs out of memory, and flash2 in every cell and pass."""
    speeds = {"naive": 20, "flash2": 400}
    return [
        row(name, pass_, speed, cell, "oom" if speed < 100 and cell.seq_len > 8192 else "ok")
        for cell in CELLS
        for pass_ in PASSES
        for name, speed in speeds.items()
    ]
