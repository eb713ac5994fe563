"""The pictures of README.md and docs/, drawn from bench/results."""

from collections.abc import Iterator
from functools import cache
from itertools import combinations

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from bench.attention import charts
from bench.common.looks import LOOKS
from bench.common.results import read_results
from bench.paper.tables import load_table
from bench.report.readme import RESULTS, parity_picture, speed_picture

COLUMN = 830  # pixels of a page's column
LEGIBLE = 11


def rows_of(name: str) -> list[dict]:
    return read_results(RESULTS / f"{name}.json")["rows"]


def bars_of(name: str) -> Figure:
    rows = [row for row in rows_of(name) if row["pass"] == "backward" and charts.panel_of(row)]
    return charts.figure_of(rows, name)


PICTURES = {
    "attention": lambda: bars_of("attention"),
    "attention-speed": lambda: speed_picture(read_results(RESULTS / "attention.json")),
    "paper-kernels": lambda: bars_of("paper-kernels"),
    "paper-scaling": lambda: load_table("scaling").pictures(rows_of("paper-scaling"), "GPU")[""],
    "paper-blocks": lambda: load_table("blocks").pictures(rows_of("paper-blocks"), "GPU")[""],
    "parity": lambda: parity_picture(RESULTS),
}


@cache
def drawn(name: str) -> Figure:
    figure = PICTURES[name]()
    figure.draw_without_rendering()
    return figure


def shown_texts(figure: Figure) -> Iterator[Text]:
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text():
            yield text


@pytest.mark.parametrize("name", PICTURES)
def test_texts_are_legible_in_a_column(name):
    figure = drawn(name)
    pixels_per_point = COLUMN / (72 * figure.get_figwidth())
    assert min(text.get_fontsize() for text in shown_texts(figure)) * pixels_per_point >= LEGIBLE
    assert all(figure.bbox.x0 <= text.get_window_extent().x1 <= figure.bbox.x1 for text in figure.texts)


@pytest.mark.parametrize("name", ["attention", "paper-kernels"])
def test_numbers_of_bars_do_not_overlap_and_no_bar_hides_one(name):
    figure = drawn(name)
    assert len(figure.axes) == len(charts.PANELS)
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts]
        assert len(boxes) == len(axes.patches) >= 6 * len(axes.containers) - 1
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
        bars = [bar.get_window_extent() for bar in axes.patches]
        assert not any(
            bar.overlaps(box) for number, box in enumerate(boxes) for bar in bars[:number] + bars[number + 1 :]
        )
        assert all(box.y1 <= axes.bbox.y1 for box in boxes)


def colours_of(axes: Axes) -> dict[str, str]:
    bars = {bars.get_label(): to_hex(bars.patches[0].get_facecolor()) for bars in axes.containers}
    return bars | {line.get_label().partition(" ")[0].rstrip(":"): to_hex(line.get_color()) for line in axes.lines}


@pytest.mark.parametrize("name", [name for name in PICTURES if name != "paper-blocks"])
def test_a_variant_has_its_colour_in_every_picture(name):
    colour_by_name = {name: look.colour for name, look in LOOKS.items()} | dict(LOOKS.values())
    for axes in drawn(name).axes:
        found = colours_of(axes)
        assert found == {variant: colour_by_name[variant] for variant in found} and len(found) > 1


def test_a_table_without_measured_rows_has_no_pictures():
    assert load_table("kernels").pictures([{"head_dim": 64, "causal": True, "status": "failed"}], "GPU") == {}
