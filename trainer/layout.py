"""Text for the console: short numbers, and lines of at most 100 columns."""

import math
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

WIDTH = 100  # columns of a line
INDENT = 12  # columns for the label at the start of a line


def three_digits(x: float) -> str:
    """Return a number with three significant digits, such as 0.0123, 1.23, 12.3, 123 and 1,230."""
    if not math.isfinite(x):
        return str(x)
    rounded = f"{x:.2e}"
    exponent = int(rounded.partition("e")[2])
    return f"{float(rounded):,.{max(0, 2 - exponent)}f}" if -5 < exponent < 7 else rounded


def count(x: int) -> str:
    """Return a whole number with at most three digits and its magnitude, such as 929k, 124M and 9.04B."""
    size, suffix = next((unit for unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if x >= 0.9995 * unit[0]), (1, ""))
    return three_digits(x / size) + suffix if suffix else str(x)


def duration(seconds: float) -> str:
    """Return hours, minutes and seconds, such as 0:04:31, or days from 1,000 hours on."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes < 60_000 else f"{minutes // 1440:,} days"


def shown(path: Path) -> str:
    """Return the path relative to the current folder if it is inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def shortened(text: str, width: int) -> str:
    """Return the end of a text that is too long, and any other text unchanged."""
    return text if len(text) <= width else f"...{text[3 - width :]}"


def block(label: str, items: Iterable[str]) -> str:
    """Return the items after the label, wrapped to the width of a line. An item that is too long loses its start."""
    room = WIDTH - INDENT - 1  # for a comma
    return "\n".join(_filled(label, [shortened(item, room) for item in items], ", ", ",", INDENT))


def command(label: str, words: Iterable[str]) -> str:
    r"""Return a command after the label, to be pasted into a shell. Long commands have lines that end in a backslash.

    A word that is too long stays whole.
    """
    return "\n".join(_filled(label, list(words), " ", " \\", INDENT + 4))


def _filled(label: str, items: list[str], separator: str, end: str, indent: int) -> Iterator[str]:
    """Yield lines filled with items, which `separator` separates. Each line except the last has `end` at its end."""
    line = f"{label:{INDENT}}{items[0]}"
    for item in items[1:]:
        if len(line + separator + item + end) > WIDTH:
            yield line + end
            line = " " * indent + item
        else:
            line += separator + item
    yield line


def paragraph(label: str, text: str) -> str:
    """Return a text after the label, wrapped between words."""
    options = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(f"{label:{INDENT}}{text}", WIDTH, subsequent_indent=" " * INDENT, **options)


def fitted(text: str) -> str:
    """Return a text with lines that fit, and without control characters, which would change a terminal."""
    lines = "".join(x if x.isprintable() or x in "\n\t" else "\ufffd" for x in text).expandtabs().split("\n")
    return "\n".join(textwrap.fill(line, WIDTH) if len(line) > WIDTH else line for line in lines)
