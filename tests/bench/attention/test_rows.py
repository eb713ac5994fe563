import math

import pytest

from bench.attention.rows import cell_line, geometric_mean, ratio_text, speedups, summary
from bench.attention.shapes import CELLS, PASSES
from tests.bench.stopwatch import row


def test_speedups_and_their_geometric_mean_by_hand():
    short, long = (cell for cell in CELLS if cell.name in ("d64_causal_512", "d64_causal_1024"))
    rows = [
        row("flash2", tflops=200, cell=short),
        row("sdpa_flash", tflops=100, cell=short),
        row("flash2", tflops=400, cell=long),
        row("sdpa_flash", tflops=50, cell=long),
        row("sdpa_cudnn", tflops=100, cell=short),
        row("sdpa_cudnn", status="oom", cell=long),
        row("flash2", "backward", tflops=1, cell=short),
    ]
    assert speedups(rows, "sdpa_flash", "forward") == [2, 8]
    assert geometric_mean([2, 8]) == pytest.approx(4)  # sqrt(2 x 8)
    assert speedups(rows, "sdpa_cudnn", "forward") == [2]
    assert math.isnan(geometric_mean(speedups(rows, "fa3", "forward")))
    assert ratio_text(rows) == "sdpa_flash 4.00/-/-, sdpa_cudnn 2.00/-/-"
    assert "d64_causal   x sdpa_flash 4.00/-/-, sdpa_cudnn 2.00/-/- (2 of 6 lengths)" in summary(rows)


def test_a_cell_is_one_line():
    cell = CELLS[1]
    rows = [row("naive", pass_, status="oom", cell=cell) for pass_ in PASSES]
    rows += [row("flash2", pass_, tflops, cell) for pass_, tflops in zip(PASSES, (200, 100, 120), strict=True)]
    rows += [row("sdpa_flash", "forward", 160, cell)]
    rows += [row("sdpa_flash", pass_, status="oom", cell=cell) for pass_ in PASSES[1:]]
    line = "d64_causal_512    naive oom flash2 200/100/120 sdpa_flash 160/oom/oom | x sdpa_flash 1.25/-/-"
    assert cell_line(cell, rows) == line
