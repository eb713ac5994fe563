"""Every table from its command line to Markdown and pictures, in its smoke size; and figures that have to be right."""

import json

import pytest

from bench.paper import runner
from bench.report.readme import RESULTS
from tests.bench.paper import in_process
from tests.bench.paper.in_process import tiny_models  # noqa: F401, a fixture
from tests.e2e import run

PICTURES = {"kernels": ["-forward", "-backward", "-both"]}


@pytest.mark.parametrize("name", runner.TABLES)
def test_the_smoke_size_gives_rows_markdown_and_pictures(name, tmp_path, monkeypatch, tiny_models):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    in_process.start_by(monkeypatch, in_process.run)
    table = runner.TABLES[name]
    drawn = {}
    if name != "blocks":  # drawing takes a second a picture
        monkeypatch.setattr(runner, "save", lambda figure, path, rows: drawn.update({path.name: figure}))
    out = run("bench/paper/__main__.py", f"table={name}", "size=smoke").ok().out
    assert f"paper-{name}.*" in out
    folder = tmp_path / runner.SMOKE_FOLDER
    results = json.loads((folder / f"paper-{name}.json").read_text())
    assert results["rows"] and {row["status"] for row in results["rows"]} == {"ok"}
    assert results["size"] == "smoke" and set(results["environment"]) >= {"gpu", "torch", "triton", "commit", "date"}
    text = (folder / f"paper-{name}.md").read_text()
    assert text.startswith(f"# {table.TITLE}\n\n") and "say nothing of speed" in text and "FAILED" not in text
    widths = [line.count("|") for line in text.split("\n\n")[1].splitlines() if line.startswith("|")]
    assert len(set(widths)) <= 1
    if name == "blocks":
        assert (folder / "paper-blocks.png").stat().st_size > 5000
        assert "<svg" in (folder / "paper-blocks.svg").read_text()
        return
    names = [f"paper-{name}{ending}" for ending in PICTURES.get(name, [""])]
    assert list(drawn) == [f"{stem}.{suffix}" for stem in names for suffix in ("png", "svg")]
    assert all(any(axes.has_data() for axes in figure.axes) for figure in drawn.values())


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*/paper-*.json")), ids=lambda file: file.stem)
def test_the_markdown_that_is_kept_is_that_of_the_results_beside_it(file):
    """The README's tables are made from it."""
    made = runner.page(file.stem.removeprefix("paper-"), json.loads(file.read_text()))
    assert file.with_suffix(".md").read_text() == made
