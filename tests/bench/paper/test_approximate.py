"""The table `approximate`: crossings of lines, the check of exact attentions, the Markdown and the picture."""

import pytest

from bench.common.formatting import length_text
from bench.lra.attentions import build_attention
from bench.paper.crossings import crossings, where_below
from bench.paper.settings import PaperSettings
from bench.paper.tables import approximate_attention as approximate
from tests.bench.stopwatch import Stopwatch

LENGTHS = [2**power for power in range(7, 17)]
SMOKE = PaperSettings(size="smoke")
LINEAR = {n: 3000.0 * n for n in LENGTHS}


def test_lines_on_logarithmic_axes_cross_where_their_formulas_do():
    """n^2 meets 3,000 n at n = 3,000, between the measured 2,048 and 4,096."""
    quadratic = {n: float(n**2) for n in LENGTHS}
    assert crossings(quadratic, LINEAR) == pytest.approx([3000])
    assert crossings(LINEAR, quadratic) == pytest.approx([3000])
    assert where_below(quadratic, LINEAR) == "up to 3,000" and where_below(LINEAR, quadratic) == "from 3,000"


def test_lines_that_never_or_twice_cross():
    hill = {128: 1.0, 256: 4.0, 512: 1.0}
    flat = dict.fromkeys(hill, 2.0)
    assert crossings(hill, flat) == pytest.approx([2**7.5, 2**8.5])
    assert where_below(hill, flat) == "up to 180, from 360" and where_below(flat, hill) == "from 180, up to 360"
    assert where_below(flat, {n: 3.0 for n in hill}) == "everywhere"
    assert where_below(flat, flat) == "nowhere" and where_below(flat, {}) == "-"


def test_a_line_that_ends_early_is_compared_up_to_its_end():
    """Without memory for the longer lengths, nothing is known about a crossing there."""
    short = {n: float(n**2) for n in LENGTHS if n <= 2048}
    assert crossings(short, LINEAR) == [] and where_below(short, LINEAR) == "everywhere"


def rows_of(length: int, **costs) -> list[dict]:
    """Return the rows of a length. A cost of None is out of memory, a text is a refusal."""
    rows = []
    for name, cost in costs.items():
        status = "unsupported" if isinstance(cost, str) else "oom" if cost is None else "ok"
        row = {"seq_len": length, "variant": name, **approximate.SIZES["full"], "status": status}
        value = cost if status == "ok" else None
        rows.append(row | {"ms": value, "peak_mib": value, "message": cost if status == "unsupported" else None})
    return rows


MADE_UP = [
    *rows_of(16384, flash2=16.004, naive=40.0, fused_softmax=41.0, linformer=32.0),
    *rows_of(65536, flash2=256.0, naive=None, fused_softmax="a row is too long", linformer=64.0),
]


def test_the_table_has_costs_refusals_and_crossings():
    """The ratio of linformer to flash2 falls from 2 to 1/4: it is 1 at 16k x 4^(1/3), 26,008."""
    made = approximate.markdown(MADE_UP)
    assert "| `flash2` | exact | 16.01 | 256.00 |" in made and "| `naive` | exact | 40.00 | OOM |" in made
    assert "| `fused_softmax` | exact | 41.00 | UNSUPPORTED |" in made
    assert "UNSUPPORTED: `fused_softmax`: a row is too long." in made
    assert "| `smyrf` | approximate | - | - |" in made
    assert "| `linformer` | from 26,000 | from 26,000 |" in made and "| `naive` | nowhere | nowhere |" in made


def test_the_picture_has_both_panels_and_one_legend_below_them():
    figure = approximate.pictures(MADE_UP, "a GPU")[""]
    time, memory = figure.axes
    assert [len(axes.lines) for axes in (time, memory)] == [4, 4]
    assert [text.get_text() for text in time.get_xticklabels()] == [length_text(n) for n in (16384, 65536)]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][-2:] == ["flash2 (ours), exact", "Linformer, approximate"]
    figure.draw_without_rendering()
    assert legend.get_window_extent().y1 <= min(axes.get_window_extent().y0 for axes in figure.axes)


def test_an_exact_attention_that_is_wrong_is_not_timed_and_the_others_go_on(monkeypatch):
    def broken(name, config):
        built = build_attention(name, config)
        return (lambda q, k, v: built(q, k, v) * 1.1) if name == "flash1" else built

    monkeypatch.setattr(approximate, "build_attention", broken)
    monkeypatch.setattr(approximate, "KINDS", {"naive": "exact", "flash1": "exact", "linformer": "approximate"})
    naive, flash1, linformer = approximate.measure({"seq_len": 64}, Stopwatch(), SMOKE)
    assert (flash1["status"], flash1["ms"]) == ("failed", None) and "out is off by 1.0e-01" in flash1["message"]
    assert [row["status"] for row in (naive, linformer)] == ["ok", "ok"] and linformer["ms"] == 2.0


@pytest.mark.parametrize(("name", "count"), [("linear", 3), ("linformer", 3 + 2), ("reformer", 2)])
def test_the_inputs_that_are_used_and_the_weights_get_gradients(name, count):
    """Linformer has two matrices. Reformer does not use k."""
    shape = approximate.AttentionShape("approximate", batch=1, seq_len=64, heads=2, head_dim=16, causal=False)
    row, inputs = {"variant": name}, approximate.draw_inputs(shape, "cpu")
    contender = approximate.contender_of(row, shape, inputs, "cpu")
    gradients = contender.call("both")()
    assert len(gradients) == count and all(x.any() for x in gradients)
