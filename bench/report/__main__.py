"""Compare training runs on one HTML page that needs no network.

Examples:
  python -m bench.report runs=outputs
  python -m bench.report 'runs=[outputs/a,outputs/b]'
  python -m bench.report runs=outputs results=bench/results/h200 out=comparison.html

python -m bench.report.readme updates the tables of the README.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common.command_line import check_output_file, launch
from bench.report.page import write_page
from bench.report.page_tables import read_tables
from bench.report.runs import read_runs
from errors import UserError


@dataclass
class ReportSettings:
    """The runs and results to show, and the page to write."""

    runs: Any = None
    """Output folder of python train.py, or a list of them; a parent folder or a glob means all runs below."""
    results: str | None = None
    """Folder of bench/results whose tables are added."""
    out: str = "report.html"
    """The page to write."""

    def __post_init__(self):
        if self.runs is not None and not isinstance(self.runs, list):
            self.runs = [self.runs]
        if not (self.runs or self.results):
            raise UserError("there are no runs and no results to show; give runs=FOLDER or results=FOLDER")
        check_output_file("out", self.out, "the page", "report.html")


def run(settings: ReportSettings) -> None:
    runs = read_runs([str(place) for place in settings.runs]) if settings.runs else []
    results = read_tables(settings.results) if settings.results else []
    write_page(runs, results, Path(settings.out))
    print(f"report in {settings.out}")


if __name__ == "__main__":
    launch(run, ReportSettings)
