"""Draw a positive example of Pathfinder for the documentation, as a model sees the image and with its paths in colour.

Example:
    python -m bench.lra.picture
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.common.command_line import check_output_file, launch
from bench.common.results import ROOT, write_text
from bench.lra.pathfinder import generate

SIZE, SEED, GAP = 128, 1, 8
COLOURS = "#cf4343", "#f2c14e", "#7aa6d8"
"""Colours of the path with both discs, of the other long path, and of the distractors."""


@dataclass
class PictureSettings:
    """What `python -m bench.lra.picture` reads."""

    out: Path = ROOT / "docs" / "pictures" / "pathfinder.svg"
    """File to write."""

    def __post_init__(self):
        check_output_file("out", self.out, "the picture", "pathfinder.svg")


def draw() -> str:
    """Return the picture as SVG."""
    drawing = generate(20, SIZE, np.random.default_rng(SEED))
    example = drawing.labels.argmax()
    image, owners = drawing.images[example], drawing.owners[example]
    connected = owners[tuple(drawing.discs[example, 0])]
    masks = owners == connected, (owners == 3 - connected), owners > 2
    right = SIZE + GAP
    paths = [_path(image, 0, "#fff")]
    paths += [_path(mask, right, colour) for mask, colour in zip(masks, COLOURS, strict=True)]
    panels = [f'<rect x="{x}" width="{SIZE}" height="{SIZE}" fill="#111827"/>' for x in (0, right)]
    width = right + SIZE
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{3 * width}" height="{3 * SIZE}"'
    title = "<title>A positive image of 128 x 128 pixels, and the same image with its paths in colour</title>"
    lines = [f'{head} viewBox="0 0 {width} {SIZE}" shape-rendering="crispEdges" role="img">', title, *panels, *paths]
    return "\n".join([*lines, "</svg>", ""])


def _path(mask: np.ndarray, left: int, colour: str) -> str:
    """Return an element that fills the pixels of a mask, one rectangle for each run of a row."""
    edges = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    rows, starts = np.nonzero(edges == 1)
    lengths = np.nonzero(edges == -1)[1] - starts
    runs = (f"M{left + x} {y}h{n}v1h-{n}z" for y, x, n in zip(rows, starts, lengths, strict=True))
    return f'<path fill="{colour}" d="{"".join(runs)}"/>'


def run(settings: PictureSettings) -> None:
    """Write the picture."""
    write_text(settings.out, draw())
    print(f"wrote {settings.out}")


if __name__ == "__main__":
    launch(run, PictureSettings)
