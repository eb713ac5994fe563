"""Rows as Markdown, and figures that are never rounded in our favour."""

import math
from collections.abc import Callable, Sequence
from functools import partial

from matplotlib.axes import Axes


def table(header: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are text, the others figures."""
    marks = ["---"] * left + ["--:"] * (len(header) - left)
    head, *body = (f"| {' | '.join(cells)} |" for cells in (header, *lines))
    return "\n".join([head, f"|{'|'.join(marks)}|", *body])


def at_least(x: float, decimals: int = 2) -> str:
    """x rounded down."""
    return f"{math.floor(10**decimals * x) / 10**decimals:,.{decimals}f}"


def at_most(x: float, decimals: int = 2) -> str:
    """x rounded up."""
    return f"{math.ceil(10**decimals * x) / 10**decimals:,.{decimals}f}"


def speed_text(speed: float, ours: bool, decimals: int = 2) -> str:
    """A speed of ours rounded down, of another up."""
    return at_least(speed, decimals) if ours else at_most(speed, decimals)


def cost_text(cost: float, ours: bool, decimals: int = 2) -> str:
    """A time, or memory, of ours rounded up, of another down."""
    return at_most(cost, decimals) if ours else at_least(cost, decimals)


def figure_of(row: dict | None, key: str, text: Callable[[float], str] = "{:.2f}".format) -> str:
    """What a row holds under `key`; its status where it holds nothing, and a dash where there is no row."""
    if row is None:
        return "-"
    return row["status"].upper() if row["status"] != "ok" else text(row[key])


def whole_speed(row: dict | None, key: str, ours: bool) -> str:
    """The figure_of a speed, as speed_text has it, without decimals."""
    return figure_of(row, key, partial(speed_text, ours=ours, decimals=0))


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
