"""docs/ladder.md has a section for each step, and quotes the lines of its file."""

import re

import pytest

from kernels import ladder
from tests.e2e import ROOT

FILES = ROOT / "kernels" / "ladder"
STEPS = *ladder.FORWARD, *ladder.BACKWARD
PAGE = (ROOT / "docs" / "ladder.md").read_text()
SECTIONS = {
    re.sub(r"\W+", "_", title.lower()): text
    for title, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
}


def section_of(step: str) -> str:
    """Return the title of a step's section, in lower case with underscores."""
    idea = step.removeprefix("step_")[3:]
    return f"backward_{idea}" if step in ladder.BACKWARD else idea


def test_the_page_has_a_section_for_each_step_in_order():
    assert list(SECTIONS) == ["the_numbers", *map(section_of, STEPS)]


@pytest.mark.parametrize("step", STEPS)
def test_a_section_quotes_its_step_and_the_step_before(step):
    section = SECTIONS[section_of(step)]
    before = STEPS[max(STEPS.index(step) - 1, 0)]
    here, there = ((FILES / f"{name}.py").read_text().splitlines() for name in (step, before))
    assert "Counter: " in section and re.search(r"^```(python|diff)$", section, re.M)
    for language, block in re.findall(r"^```(python|diff)\n(.*?)^```", section, re.M | re.S):
        for line in block.splitlines():
            removed = language == "diff" and line.startswith("-")
            text = line if language == "python" else line[1:]
            assert text in (there if removed else here), line
            assert language == "python" or text not in (here if removed else there), line
