"""Numbers and lines for the console."""

import shlex
from pathlib import Path

import pytest

from trainer.layout import WIDTH, block, command, count, duration, fitted, paragraph, shown, three_digits


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *((0.0000123, "1.23e-05"), (0.000123, "0.000123"), (0.01234, "0.0123"), (1.234, "1.23"), (12.34, "12.3")),
        *((123.4, "123"), (999.9, "1,000"), (1234.0, "1,230"), (9_994_000, "9,990,000"), (1.234e7, "1.23e+07")),
        *((0.0, "0.00"), (float("nan"), "nan"), (float("inf"), "inf")),
    ],
)
def test_numbers_have_three_digits(number, text):
    assert three_digits(number) == text


def test_counts_and_durations():
    numbers = 257, 999_400, 999_600, 851_000, 10_530_329, 9_035_582_198, 175_000_000_000
    assert [count(number) for number in numbers] == ["257", "999k", "1.00M", "851k", "10.5M", "9.04B", "175B"]
    assert [duration(seconds) for seconds in (0, 271, 480_000, 1e7)] == ["0:00:00", "0:04:31", "133:20:00", "115 days"]


def test_a_block_wraps_between_items_and_shortens_long_paths():
    path = "/data/" + "x" * 100 + "/run"
    lines = block("data", ["a" * 40, "b" * 40, "c" * 40, path]).splitlines()
    assert lines[0] == f"data        {'a' * 40}, {'b' * 40},"
    assert lines[1] == f"            {'c' * 40},"
    assert lines[2].startswith("            ...xxx") and lines[2].endswith("/run") and len(lines) == 3
    assert max(map(len, lines)) <= WIDTH
    note = paragraph("note", "words " * 50).splitlines()
    assert len(note) > 3 and max(map(len, note)) <= WIDTH and note[1].startswith(" " * 12 + "words")


def test_a_long_command_is_one_command_in_a_shell():
    words = ["python", "train.py", shlex.quote('x="a b"' + "c" * 60), "hydra.run.dir=" + "d" * 60]
    lines = command("next", words).splitlines()
    assert len(lines) == 2 and all(line.endswith(" \\") for line in lines[:-1])
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == ["next", *shlex.split(" ".join(words))]
    assert command("next", ["python", "x.py"]) == "next        python x.py"


def test_a_generated_text_fits_and_has_no_control_characters():
    assert fitted("a\tb\n\x1b[31m\x07\n") == "a       b\n\ufffd[31m\ufffd\n"
    assert max(map(len, fitted("x" * 250 + "\n" + "two words " * 30).splitlines())) <= WIDTH


def test_paths_are_relative_inside_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown(tmp_path / "a" / "b") == "a/b" and shown(Path("a")) == "a"
    assert shown(tmp_path.parent / "other") == str(tmp_path.parent / "other")
