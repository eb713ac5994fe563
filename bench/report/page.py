"""Fill page.html with training runs and benchmark tables. The page contains plotly.js and needs no network."""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from bench.common.looks import looks_of
from bench.common.results import write_text
from bench.report.headline import apart_text, headline, shared, variant_of
from bench.report.page_tables import Table, changes, common, differences
from bench.report.runs import TrainingRun
from bench.report.summary import summary
from trainer.loggers import describe_changes

HERE = Path(__file__).parent
COLOURS = "#4269d0", "#e8863a", "#3ca951", "#d64a5f", "#a463f2", "#2aa5b8", "#d562a5", "#9c6b4e"
DASHES = "none", "9px,4px", "3px,3px", "11px,3px,2px,3px", "18px,4px", "11px,3px,2px,3px,2px,3px"  # of strokes in SVG
SYMBOLS = {  # plotly's name: the path in SVG; changes of settings have diamonds
    "circle": "M3.5 0A3.5 3.5 0 1 1-3.5 0A3.5 3.5 0 1 1 3.5 0Z",
    "square": "M-3.2-3.2H3.2V3.2H-3.2Z",
    "triangle-up": "M0-4L4 3H-4Z",
    "cross": "M-1.4-4H1.4V-1.4H4V1.4H1.4V4H-1.4V1.4H-4V-1.4H-1.4Z",
    "triangle-down": "M0 4L4-3H-4Z",
    "hourglass": "M-3.5-3.5H3.5L-3.5 3.5H3.5Z",
    "bowtie": "M-3.5-3.5V3.5L3.5-3.5V3.5Z",
}
THICKEST, THINNEST = 4.6, 2  # lines, in pixels


class MetricChart(NamedTuple):
    """A metric drawn against tokens, steps or time."""

    key: str
    title: str
    unit: str
    hover: str
    """d3 format of a value under the pointer."""
    ticks: str = ""
    """d3 format of a value at the axis; empty for plotly's default."""
    from_zero: bool = True
    """Whether a linear axis begins at 0."""
    log: bool = False
    """Whether the axis is always logarithmic."""


CHARTS = (
    MetricChart("train/loss", "Training loss", "nats per token", ".4f", from_zero=False),
    MetricChart("val/loss", "Validation loss", "nats per token", ".4f", from_zero=False),
    MetricChart("train/perplexity", "Training perplexity", "log scale", ",.2f", from_zero=False, log=True),
    MetricChart("val/perplexity", "Validation perplexity", "log scale", ",.2f", from_zero=False, log=True),
    MetricChart("perf/tokens_per_second", "Throughput", "tokens/s", ",.0f"),
    MetricChart("perf/tflops", "Model FLOPs per device", "TFLOP/s", ",.4~r"),
    MetricChart("perf/mfu", "Model FLOPs utilisation", "of the device's peak", ".1%", ".0%"),
    MetricChart("memory/peak_allocated_gib", "Peak GPU memory", "GiB", ".2f"),
    MetricChart("memory/peak_rss_gib", "Peak process memory", "GiB", ".2f"),
)


def write_page(runs: list[TrainingRun], results: list[Table], out: Path, failed: Sequence[str] = ()) -> None:
    """Write the page of these runs and benchmark tables to `out`. `failed` names the jobs of a sweep that failed."""
    write_text(out, render(runs, results, failed))


def render(runs: list[TrainingRun], results: list[Table], failed: Sequence[str]) -> str:
    """Return the HTML. The template, its JSON filter and curves_of escape all text from files."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    charts = [chart for chart in CHARTS if any(run.finite(chart.key) for run in runs)]
    assets = {name: Markup((HERE / name).read_text()) for name in ("page.css", "page.js")}
    longest = max((run.seconds()[-1] for run in runs if run.seconds()), default=0)
    unit, seconds = ("hours", 3600) if longest > 4 * 3600 else ("minutes", 60)
    curves = [curves_of(run, seconds) | look for run, look in zip(runs, curve_looks(runs), strict=True)]
    for curve, run in zip(curves, runs, strict=True):
        curve["apart"] = apart_text(run, runs)
    return environment.get_template("page.html").render(
        assets=assets | {"plotly.js": Markup(get_plotlyjs())},
        charts=charts,
        data={"charts": [chart._asdict() for chart in charts], "runs": curves, "unit": unit},
        summary=summary(runs),
        apart=differences(runs),
        changes=changes(runs),
        common=common(runs),
        results=results,
        n_runs=len(runs),
        headline=headline(runs) or title_of(len(runs), failed),
        shared=shared(runs),
        failed=failed,
    )


def title_of(n_runs: int, failed: Sequence[str]) -> str:
    """Return the title of a page whose runs do not differ in their settings."""
    return "Training runs compared" if n_runs > 1 or failed else "A training run" if n_runs else "Benchmarks"


def curve_looks(runs: list[TrainingRun]) -> list[dict]:
    """Return the look of each run's curves: its variant's colour, or one of COLOURS if all runs have one variant.

    Curves that coincide stay visible. The first is the thickest, and the next ones lie on top of it with gaps.
    """
    variants = [variant_of(run) or run.name for run in runs]
    looks, symbols, steps = looks_of(variants), list(SYMBOLS.items()), max(len(runs) - 1, 1)
    several = len(looks) > 1
    return [
        {
            "colour": looks[variant].colour if several else COLOURS[number % len(COLOURS)],
            "dash": DASHES[number % len(DASHES)],
            "symbol": symbols[number % len(SYMBOLS)][0],
            "path": symbols[number % len(SYMBOLS)][1],
            "width": round(THICKEST - (THICKEST - THINNEST) * number / steps, 2) if len(runs) > 1 else 2,
        }
        for number, variant in enumerate(variants)
    ]


def curves_of(run: TrainingRun, unit_s: int) -> dict:
    """Return the data that page.js draws: x axes by row, and each metric's values with the numbers of their rows."""
    series = {chart.key: run.series(chart.key) for chart in CHARTS}
    series = {key: of_key for key, of_key in series.items() if of_key}
    axes = {"tokens": [row["tokens"] for row in run.rows], "step": [row["step"] for row in run.rows]}
    return {
        "name": run.name,
        "label": html.escape(run.name),  # plotly interprets some HTML in names
        "x": axes | {"time": [round(seconds / unit_s, 4) for seconds in run.seconds()]},
        "y": {
            key: {"rows": list(of_key), "values": list(of_key.values()), "changes": marks(run, list(of_key))}
            for key, of_key in series.items()
        },
    }


def marks(run: TrainingRun, rows: list[int]) -> dict[int, str]:
    """Return the text of each change of settings, by the index of the first point after the change, or of the last."""
    texts = {}
    for number, changed in run.changes.items():
        index = next((index for index, row in enumerate(rows) if row >= number), len(rows) - 1)
        texts[index] = html.escape(describe_changes(changed))
    return texts
