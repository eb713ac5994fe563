from bench.attention import charts
from bench.attention.shapes import PASSES, SHAPES
from tests.bench.stopwatch import made_up_rows, row


def test_charts_are_drawn_from_rows_and_the_same_rows_give_the_same_bytes(tmp_path):
    rows = [row for row in made_up_rows() if row["seq_len"] in (512, 16384)]  # naive has no timing at 16384
    paths = charts.draw(rows, tmp_path / "attention.json", {"gpu": "NVIDIA H200"})
    assert [path.name for path in paths] == [f"attention-{p}.{suffix}" for p in PASSES for suffix in ("png", "svg")]
    assert all(path.stat().st_size > 10_000 for path in paths)
    forward = [row for row in rows if row["pass"] == "forward"]
    again = charts.draw(forward, tmp_path / "again.json", {"gpu": "NVIDIA H200"})
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in paths[:2]]


def test_charts_show_only_the_papers_shapes(tmp_path):
    assert charts.panel_of(row("flash2")) == (64, True)
    others = [row("flash2", shape=shape) for shape in SHAPES if not shape.name.startswith(("d64", "d128"))]
    assert len(others) == 4 and not any(map(charts.panel_of, others))
    assert charts.draw(others, tmp_path / "attention.json", {"gpu": None}) == []


def test_a_function_of_the_user_is_drawn_under_its_own_name():
    figure = charts.figure_of([row("flash2"), row("my_module:mine")], "title")
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["flash2 (ours)", "my_module:mine"]
