"""The size, style and file format of the pictures that matplotlib draws."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

WIDTH = 11.5
"""Inches. In a page's column of 830 pixels, a point of the picture then is a pixel, so 11 points are legible."""
SMALL = 11
STYLE = {
    "font.size": 12,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "figure.titlesize": 14,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e4e6ea",
}
styled = matplotlib.rc_context(STYLE)
"""Decorate a function that draws."""


def save(figure: Figure, path: Path) -> None:
    """Save a picture. The same numbers give the same bytes: ids in an SVG are not random, and there is no date."""
    with matplotlib.rc_context({"svg.hashsalt": "gpt2-flash"}):
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
