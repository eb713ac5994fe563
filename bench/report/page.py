"""One self-contained HTML page of training runs and benchmark tables: page.html filled in, with plotly.js inside."""

import html
from itertools import product
from pathlib import Path
from typing import NamedTuple

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from bench.report.runs import Run
from bench.report.tables import Table, common, differences, summary
from errors import UserError

HERE = Path(__file__).parent
COLOURS = "#4269d0", "#e8863a", "#3ca951", "#d64a5f", "#a463f2", "#2aa5b8", "#d562a5", "#9c6b4e"
DASHES = {"solid": "solid", "dash": "dashed", "dot": "dotted"}  # plotly's name of each: CSS's


class Chart(NamedTuple):
    """A metric drawn against tokens, steps or time."""

    key: str
    title: str
    unit: str
    hover: str
    """How d3 writes a value under the pointer."""
    ticks: str = ""
    """How d3 writes a value at the axis, if not as plotly does."""
    from_zero: bool = True
    """Whether the axis begins at 0, as long as it is linear."""


CHARTS = (
    Chart("train/loss", "Training loss", "nats per token", ".4f", from_zero=False),
    Chart("val/loss", "Validation loss", "nats per token", ".4f", from_zero=False),
    Chart("train/perplexity", "Training perplexity", "", ",.2f", from_zero=False),
    Chart("val/perplexity", "Validation perplexity", "", ",.2f", from_zero=False),
    Chart("perf/tokens_per_second", "Throughput", "tokens/s", ",.0f"),
    Chart("perf/tflops", "Model FLOPs per device", "TFLOP/s", ",.4~r"),
    Chart("perf/mfu", "Model FLOPs utilisation", "of the device's peak", ".1%", ".0%"),
    Chart("memory/peak_allocated_gib", "Peak GPU memory", "GiB", ".2f"),
    Chart("memory/peak_rss_gib", "Peak process memory", "GiB", ".2f"),
)


def write_page(runs: list[Run], results: list[Table], out: Path) -> None:
    """Writes the page of these runs, and of these benchmark tables below them, to `out`.

    Raises:
        UserError: `out` is a folder or cannot be written.
    """
    if out.is_dir():
        raise UserError(f"out={out} is a folder; name a file, such as out={out / 'report.html'}")
    page = render(runs, results)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"out={out} cannot be written ({error.strerror}); name another file") from error


def render(runs: list[Run], results: list[Table]) -> str:
    """The page. Whatever comes from files is escaped: by the template, in the curves' JSON, and for plotly, which reads
    a little HTML in the names of curves."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    charts = [chart for chart in CHARTS if any(run.finite(chart.key) for run in runs)]
    assets = {name: Markup((HERE / name).read_text()) for name in ("page.css", "page.js")}
    unit, seconds = time_unit(runs)
    looks = list(product(DASHES, COLOURS))
    curves = [curves_of(run, looks[number % len(looks)], seconds) for number, run in enumerate(runs)]
    apart = differences(runs)
    return environment.get_template("page.html").render(
        assets=assets | {"plotly.js": Markup(get_plotlyjs())},
        charts=charts,
        legend=[legend_entry(curve, row, apart.columns) for curve, row in zip(curves, apart.rows, strict=True)],
        data={"charts": [chart._asdict() for chart in charts], "runs": curves, "unit": unit},
        summary=summary(runs),
        apart=apart,
        common=common(runs),
        results=results,
        n_runs=len(runs),
    )


def time_unit(runs: list[Run]) -> tuple[str, int]:
    """The unit of the axis of time and its seconds: what reads well for the longest run."""
    longest = max((run.seconds()[-1] for run in runs if run.seconds()), default=0)
    for unit, seconds in (("hours", 3600), ("minutes", 60)):
        if longest >= 5 * seconds:
            return unit, seconds
    return "seconds", 1


def curves_of(run: Run, look: tuple[str, str], unit_s: int) -> dict:
    """What page.js draws of a run: its x axes by row, and for each metric the rows that have it beside its values."""
    dash, colour = look
    series = {chart.key: run.series(chart.key) for chart in CHARTS}
    axes = {"tokens": [row["tokens"] for row in run.rows], "step": [row["step"] for row in run.rows]}
    return {
        "name": run.name,
        "label": html.escape(run.name),
        "colour": colour,
        "dash": dash,
        "x": axes | {"time": [round(seconds / unit_s, 4) for seconds in run.seconds()]},
        "y": {key: {"rows": list(of_key), "values": list(of_key.values())} for key, of_key in series.items() if of_key},
    }


def legend_entry(curve: dict, row: list, columns: list[str]) -> dict:
    """A run's line in the legend: its look, its name, and what sets it apart."""
    settings = (f"{key}={cell.text}" for key, cell in zip(columns[1:], row[1:], strict=True))
    return {
        "name": curve["name"],
        "colour": curve["colour"],
        "line": DASHES[curve["dash"]],
        "apart": " ".join(settings),
    }
