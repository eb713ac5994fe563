"""Rows as Markdown, and figures that are never rounded in our favour."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes


def table(header: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are text, the others figures."""
    marks = ["---"] * left + ["--:"] * (len(header) - left)
    head, *body = (f"| {' | '.join(cells)} |" for cells in (header, *lines))
    return "\n".join([head, f"|{'|'.join(marks)}|", *body])


def at_least(x: float) -> str:
    """Two decimals, rounded down."""
    return f"{math.floor(100 * x) / 100:.2f}"


def at_most(x: float) -> str:
    """Two decimals, rounded up."""
    return f"{math.ceil(100 * x) / 100:.2f}"


def speed_text(speed: float, ours: bool) -> str:
    """A speed of ours rounded down, of another up."""
    return at_least(speed) if ours else at_most(speed)


def time_text(time: float, ours: bool) -> str:
    """A time of ours rounded up, of another down."""
    return at_most(time) if ours else at_least(time)


def figure_of(row: dict | None, key: str, form: str = ".2f") -> str:
    """What a row holds under `key`; its status where it holds nothing, and a dash where there is no row."""
    if row is None:
        return "-"
    return row["status"].upper() if row["status"] != "ok" else format(row[key], form)


def length_text(tokens: int) -> str:
    """512, 1k, 16k."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def label_lengths(axes: Axes, rows: list[dict], key: str = "seq_len") -> None:
    """Makes the lengths of rows the ticks of a logarithmic axis, in words."""
    lengths = sorted({row[key] for row in rows if key in row})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, map(length_text, lengths))


def told_alone(rows: list[dict]) -> str:
    """Of rows that were not measured in turn with the others."""
    count = sum(row.get("alone", False) and row["status"] == "ok" for row in rows)
    return (
        f" {count} figures are of attentions that had no room beside the others, and were timed alone." if count else ""
    )
