"""The picture of a Pathfinder example in the documentation."""

import pytest

from bench.common.results import ROOT
from bench.lra.picture import PictureSettings, draw, run
from errors import UserError
from tests.e2e import largest_file


def test_the_documentation_shows_what_the_generator_draws():
    picture = (ROOT / "docs" / "pictures" / "pathfinder.svg").read_text()
    assert picture == draw(), "run python -m bench.lra.picture"
    assert len(picture) < 30_000


def test_a_full_disk_leaves_the_old_picture(tmp_path):
    old = tmp_path / "picture.svg"
    old.write_text("old")
    with largest_file(1000), pytest.raises(UserError, match=r"picture.svg cannot be written \(File too large\)"):
        run(PictureSettings(out=old))
    assert old.read_text() == "old"


def test_a_file_of_another_kind_is_not_replaced():
    with pytest.raises(UserError, match=r"out=docs/lra\.md does not end in \.svg; name the picture, for example out="):
        PictureSettings(out="docs/lra.md")
