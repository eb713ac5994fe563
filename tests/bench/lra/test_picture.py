"""The picture of a Pathfinder example in the documentation."""

from bench.common.results import ROOT
from bench.lra.picture import draw


def test_the_documentation_shows_what_the_generator_draws():
    picture = (ROOT / "docs" / "pictures" / "pathfinder.svg").read_text()
    assert picture == draw(), "run python -m bench.lra.picture"
    assert len(picture) < 30_000
