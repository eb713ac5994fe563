"""Every table from the command line to Markdown and pictures, in its smoke size."""

import json
import re

import pytest

from bench.paper import pages, runner
from bench.paper.tables import TABLES, load_table
from bench.report.readme import RESULTS
from errors import UserError
from tests.bench.paper import in_process
from tests.bench.paper.in_process import tiny_models  # noqa: F401, a fixture
from tests.e2e import largest_file, run

PICTURES = {"kernels": ["-forward", "-backward", "-both"], "ladder": ["-forward", "-backward"]}
PICTURES |= {name: [""] for name in ("io", "scaling", "fusion", "hierarchy", "softmax", "approximate")}
UNSUPPORTED = {"ladder": {"unsupported"}}  # Triton's interpreter has no Gluon


@pytest.mark.parametrize("name", TABLES)
def test_the_smoke_size_gives_rows_markdown_and_pictures(name, tmp_path, monkeypatch, tiny_models):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    in_process.start_by(monkeypatch, in_process.run)
    drawn = {}
    if name != "blocks":  # drawing takes a second a picture
        monkeypatch.setattr(pages, "save", lambda figure, path: drawn.update({path.name: figure}))
    out = run("bench/paper/__main__.py", f"table={name}", "size=smoke").ok().out
    assert f"paper-{name}.*" in out
    folder = tmp_path / runner.SMOKE_FOLDER
    results = json.loads((folder / f"paper-{name}.json").read_text())
    assert results["rows"] and {row["status"] for row in results["rows"]} == {"ok"} | UNSUPPORTED.get(name, set())
    assert results["size"] == "smoke" and set(results["environment"]) >= {"gpu", "torch", "triton", "commit", "date"}
    text = (folder / f"paper-{name}.md").read_text()
    assert text.startswith(f"# {load_table(name).TITLE}\n\n")
    assert "say nothing about speed" in text and "FAILED" not in text
    table = [line for part in text.split("\n\n") for line in part.splitlines() if line.startswith("|")]
    measured = [line for line in table if not line.startswith(("| device |", "|---"))]
    assert measured and all(line.startswith("| CPU, reference implementation |") for line in measured)
    amounts = [line for line in measured if "| slope" not in line]  # A slope can be 0.
    assert not any(re.fullmatch(r"0(\.0+)?", cell) for line in amounts for cell in line.split(" | ")[2:])
    widths = [line.count("|") for line in text.split("\n\n")[1].splitlines() if line.startswith("|")]
    assert len(set(widths)) <= 1
    if name == "blocks":
        assert (folder / "paper-blocks.png").stat().st_size > 5000
        assert "<svg" in (folder / "paper-blocks.svg").read_text()
        return
    names = [f"paper-{name}{ending}" for ending in PICTURES.get(name, [])]
    assert list(drawn) == [f"{stem}.{suffix}" for stem in names for suffix in ("png", "svg")]
    assert all(any(axes.has_data() for axes in figure.axes) for figure in drawn.values())


PAGES = sorted(RESULTS.parent.glob("*/paper-*.json"))


@pytest.mark.parametrize("file", PAGES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_the_committed_page_matches_its_results(file):
    made = pages.page(file.stem.removeprefix("paper-"), json.loads(file.read_text()))
    assert file.with_suffix(".md").read_text() == made


def test_a_full_disk_leaves_the_old_page(tmp_path):
    old, results = tmp_path / "paper-memory.md", json.loads((RESULTS / "paper-memory.json").read_text())
    old.write_text("old")
    with largest_file(100), pytest.raises(UserError, match=r"paper-memory.md cannot be written \(File too large\)"):
        pages.publish("memory", results, tmp_path)
    assert old.read_text() == "old"
