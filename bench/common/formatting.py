"""Text of the tables and charts: Markdown tables, lengths, and numbers that are never rounded in flash2's favour."""

import math
from collections.abc import Callable, Sequence
from functools import partial


def table(header: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table. The first `left` columns are text, the others numbers."""
    marks = ["---"] * left + ["--:"] * (len(header) - left)
    head, *body = (f"| {' | '.join(cells)} |" for cells in (header, *lines))
    return "\n".join([head, f"|{'|'.join(marks)}|", *body])


def rounded(x: float, decimals: int = 2, to_whole: Callable[[float], int] = round) -> str:
    """Return x with this number of decimals, or with more if two significant digits need them."""
    if x > 0:
        decimals = max(decimals, 1 - math.floor(math.log10(x)))
    return f"{to_whole(10**decimals * x) / 10**decimals:,.{decimals}f}"


def at_least(x: float, decimals: int = 2) -> str:
    """Return x rounded down."""
    return rounded(x, decimals, math.floor)


def at_most(x: float, decimals: int = 2) -> str:
    """Return x rounded up."""
    return rounded(x, decimals, math.ceil)


def speed_text(speed: float, ours: bool, decimals: int = 2) -> str:
    """Return a speed, rounded down if it is ours and up if it is a rival's."""
    return at_least(speed, decimals) if ours else at_most(speed, decimals)


def cost_text(cost: float, ours: bool, decimals: int = 2) -> str:
    """Return a time or an amount of memory, rounded up if it is ours and down if it is a rival's."""
    return at_most(cost, decimals) if ours else at_least(cost, decimals)


def value_text(row: dict | None, key: str, text: Callable[[float], str] = rounded) -> str:
    """Return the value of a row, its status if the row has no value, or a dash if there is no row."""
    if row is None:
        return "-"
    return row["status"].upper() if row["status"] != "ok" else text(row[key])


def whole_speed(row: dict | None, key: str, ours: bool) -> str:
    """Return the value_text of a speed, without decimals from 10."""
    return value_text(row, key, partial(speed_text, ours=ours, decimals=0))


def length_text(tokens: int) -> str:
    """Return a length such as 512, 1k or 16k."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
