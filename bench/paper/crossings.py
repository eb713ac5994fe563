"""Find the lengths at which the lines of two attentions cross on logarithmic axes."""

import itertools
import math

Line = dict[int, float]
"""A cost by sequence length."""


def crossings(line: Line, base: Line) -> list[float]:
    """Return the lengths where `line` crosses `base`, interpolated between the lengths that both have."""
    lengths = sorted(line.keys() & base.keys())
    gaps = [(math.log(length), math.log(line[length] / base[length])) for length in lengths]
    return [
        math.exp(x0 + (x1 - x0) * gap0 / (gap0 - gap1))
        for (x0, gap0), (x1, gap1) in itertools.pairwise(gaps)
        if (gap0 < 0) != (gap1 < 0)
    ]


def where_below(line: Line, base: Line) -> str:
    """Say for what lengths `line` is below `base`: everywhere, nowhere, up to some length, or from some length."""
    lengths = sorted(line.keys() & base.keys())
    if not lengths:
        return "-"
    is_below = line[lengths[0]] < base[lengths[0]]
    words = []
    for length in crossings(line, base):
        words.append(f"{'up to' if is_below else 'from'} {two_digits(length)}")
        is_below = not is_below
    return ", ".join(words) or ("everywhere" if is_below else "nowhere")


def two_digits(length: float) -> str:
    """Return a length rounded to two significant digits, because it is interpolated."""
    return f"{float(f'{length:.2g}'):,.0f}"
