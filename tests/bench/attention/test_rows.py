from bench.attention.rows import shape_line
from bench.attention.shapes import PASSES, SHAPES
from tests.bench.stopwatch import row


def test_a_shape_is_one_line():
    shape = SHAPES[1]
    rows = [row("naive", pass_, status="oom", shape=shape) for pass_ in PASSES]
    rows += [row("flash2", pass_, tflops, shape) for pass_, tflops in zip(PASSES, (200, 100, 120), strict=True)]
    rows += [row("sdpa_flash", "forward", 160, shape)]
    rows += [row("sdpa_flash", pass_, status="oom", shape=shape) for pass_ in PASSES[1:]]
    line = "d64_causal_512    naive oom/oom/oom  flash2 200/100/120  sdpa_flash 160/oom/oom"
    assert shape_line(shape, rows) == line
