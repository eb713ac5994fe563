"""The command line of the benchmarks: settings from a dataclass alone, and help made of its docstrings."""

import ast
import sys
from dataclasses import dataclass, field

import pytest

from bench.common.command_line import check_choice, check_output_file, check_positive, field_docs, launch
from errors import UserError
from tests.e2e import ROOT


@dataclass
class Example:
    """The settings of this test's program."""

    rounds: int = 3
    """Samples of each, for $5 or
    less."""
    cells: list[str] | None = None
    """Which cells."""
    sizes: list[int] = field(default_factory=lambda: [64, 128])
    """Head sizes."""
    explain: bool = False
    out: str | None = None
    """File to write."""

    def __post_init__(self):
        check_positive(self, "rounds", "sizes")
        check_output_file("out", self.out)


found = []


def run(settings: Example) -> None:
    found.append(settings)


def start(monkeypatch, *arguments):
    found.clear()
    monkeypatch.setattr(sys, "argv", ["bench.example", *arguments])
    launch(run, Example)
    return found


def test_settings_have_their_defaults(monkeypatch):
    assert start(monkeypatch) == [Example()]


def test_settings_are_read_from_the_command_line(monkeypatch, tmp_path):
    out = str(tmp_path / "new" / "out.json")
    [settings] = start(monkeypatch, "rounds=5", "cells=[gpt2,64k]", "sizes=[32]", "explain=true", f"out={out}")
    assert settings == Example(rounds=5, cells=["gpt2", "64k"], sizes=[32], explain=True, out=out)
    assert not any(tmp_path.iterdir())


def test_help_comes_from_the_docstrings(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="0"):
        start(monkeypatch, "--help")
    text = capsys.readouterr().out
    assert text.startswith(__doc__) and found == []
    assert f"Usage: python -m {__name__} [key=value ...]" in text
    assert "  rounds          Samples of each, for $5 or less. (3)" in text.splitlines()
    assert "  sizes           Head sizes. ([64,128])" in text.splitlines()
    assert field_docs(Example)["cells"] == "Which cells." and "explain" not in field_docs(Example)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("rounds=0", "rounds=0 is not positive; give a number above 0"),
        ("sizes=[64,-1]", "sizes=[64,-1] is not positive; give a number above 0"),
        ("round=1", "did you mean rounds?"),
        ("cells=a,b", "cells=a,b is not a list; write 'cells=[a,b]'"),
        ("cells=a", "cells=a is not a list; write 'cells=[a]'"),
        ("rounds=3000000000", "rounds=3000000000 is too large; give at most 2147483648"),
        ("sizes=[99999999999999999999]", "sizes=[99999999999999999999] is too large"),
        ("out=.", "out=. is a folder; name a file in the folder"),
        ("out=train.py", "out=train.py does not end in .json; name a results file, for example out=rows.json"),
        ("out=rows", "out=rows does not end in .json; name"),
        (
            "out=/dev/null/x",
            "out=/dev/null/x cannot be written (/dev/null is not a writable folder); name",
        ),
    ],
)
def test_a_wrong_setting_is_one_sentence_and_status_2(argument, words, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        start(monkeypatch, argument)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and words in error


def test_no_setting_has_the_name_of_a_group():
    """Hydra takes model=gpt2-nano for a choice of the group conf/model, and not for a setting."""
    trees = (ast.walk(ast.parse(file.read_text())) for file in (ROOT / "bench").rglob("*.py"))
    classes = [node for tree in trees for node in tree if isinstance(node, ast.ClassDef)]
    settings = [node for node in classes if node.name.endswith("Settings")]
    names = {field.target.id for node in settings for field in node.body if isinstance(field, ast.AnnAssign)}
    assert len(settings) == 15 and "model_name" in names
    assert not names & {path.name for path in (ROOT / "conf").iterdir()}


def test_a_choice_is_checked():
    check_choice("only", None, ["a", "b"])
    with pytest.raises(UserError, match="only=c is unknown; choose one of a, b"):
        check_choice("only", ["a", "c"], ["a", "b"])
    with pytest.raises(UserError, match=r"only=\[\] is empty"):
        check_choice("only", [], ["a", "b"])
