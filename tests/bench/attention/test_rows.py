from bench.attention.rows import ratio_text, shape_line, speedups, summary
from bench.attention.shapes import PASSES, SHAPES
from tests.bench.stopwatch import row


def test_speedups_and_their_geometric_mean_by_hand():
    short, long = (shape for shape in SHAPES if shape.name in ("d64_causal_512", "d64_causal_1024"))
    rows = [
        row("flash2", tflops=200, shape=short),
        row("sdpa_flash", tflops=100, shape=short),
        row("flash2", tflops=400, shape=long),
        row("sdpa_flash", tflops=50, shape=long),
        row("sdpa_cudnn", tflops=100, shape=short),
        row("sdpa_cudnn", status="oom", shape=long),
        row("flash2", "backward", tflops=1, shape=short),
    ]
    assert speedups(rows, "sdpa_flash", "forward") == [2, 8]
    assert speedups(rows, "sdpa_cudnn", "forward") == [2]
    assert speedups(rows, "fa3", "forward") == []
    assert ratio_text(rows) == "sdpa_flash 4.00/-/-, sdpa_cudnn 2.00/-/-"  # sqrt(2 x 8)
    assert ratio_text([*rows, row("my_module:mine", tflops=50, shape=short)]).endswith(", my_module:mine 4.00/-/-")
    assert "d64_causal   x sdpa_flash 4.00/-/-, sdpa_cudnn 2.00/-/- (2 of 6 lengths)" in summary(rows)


def test_a_shape_is_one_line():
    shape = SHAPES[1]
    rows = [row("naive", pass_, status="oom", shape=shape) for pass_ in PASSES]
    rows += [row("flash2", pass_, tflops, shape) for pass_, tflops in zip(PASSES, (200, 100, 120), strict=True)]
    rows += [row("sdpa_flash", "forward", 160, shape)]
    rows += [row("sdpa_flash", pass_, status="oom", shape=shape) for pass_ in PASSES[1:]]
    line = "d64_causal_512    naive oom/oom/oom flash2 200/100/120 sdpa_flash 160/oom/oom | x sdpa_flash 1.25/-/-"
    assert shape_line(shape, rows) == line
