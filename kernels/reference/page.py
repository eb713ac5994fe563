"""Write the interactive page: page.html with its style, its scripts and the example of the text walk."""

import json
from pathlib import Path

from kernels.reference import walk

HERE = Path(__file__).parent
PARTS = "page.css", "listings.js", "simulation.js", "page.js"


def write_page(path: Path) -> None:
    """Write one HTML file that needs no other file and no network."""
    page = (HERE / "page.html").read_text(encoding="utf-8")
    for name in PARTS:
        page = page.replace(f"/* {name} */", (HERE / name).read_text(encoding="utf-8"))
    example = {name: getattr(walk, name).tolist() for name in ("Q", "K", "V", "dO")}
    path.write_text(page.replace("/* example */", json.dumps(example)), encoding="utf-8")
