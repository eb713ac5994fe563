"""Fill page.html with training runs and benchmark tables. The page contains plotly.js and needs no network."""

import html
from collections.abc import Sequence
from itertools import cycle, product
from pathlib import Path
from typing import NamedTuple

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from bench.report.page_tables import Table, changes, common, differences, summary
from bench.report.runs import TrainingRun
from trainer.loggers import describe_changes

HERE = Path(__file__).parent
COLOURS = "#4269d0", "#e8863a", "#3ca951", "#d64a5f", "#a463f2", "#2aa5b8", "#d562a5", "#9c6b4e"
DASHES = {"solid": "solid", "dash": "dashed", "dot": "dotted"}  # plotly's name: the CSS name


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


CHARTS = (
    MetricChart("train/loss", "Training loss", "nats per token", ".4f", from_zero=False),
    MetricChart("val/loss", "Validation loss", "nats per token", ".4f", from_zero=False),
    MetricChart("train/perplexity", "Training perplexity", "", ",.2f", from_zero=False),
    MetricChart("val/perplexity", "Validation perplexity", "", ",.2f", from_zero=False),
    MetricChart("perf/tokens_per_second", "Throughput", "tokens/s", ",.0f"),
    MetricChart("perf/tflops", "Model FLOPs per device", "TFLOP/s", ",.4~r"),
    MetricChart("perf/mfu", "Model FLOPs utilisation", "of the device's peak", ".1%", ".0%"),
    MetricChart("memory/peak_allocated_gib", "Peak GPU memory", "GiB", ".2f"),
    MetricChart("memory/peak_rss_gib", "Peak process memory", "GiB", ".2f"),
)


def write_page(runs: list[TrainingRun], results: list[Table], out: Path, failed: Sequence[str] = ()) -> None:
    """Write the page of these runs and benchmark tables to `out`. `failed` names the jobs of a sweep that failed."""
    page = render(runs, results, failed)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")


def render(runs: list[TrainingRun], results: list[Table], failed: Sequence[str]) -> str:
    """Return the HTML. The template, its JSON filter and curves_of escape all text from files."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    charts = [chart for chart in CHARTS if any(run.finite(chart.key) for run in runs)]
    assets = {name: Markup((HERE / name).read_text()) for name in ("page.css", "page.js")}
    longest = max((run.seconds()[-1] for run in runs if run.seconds()), default=0)
    unit, seconds = ("hours", 3600) if longest > 4 * 3600 else ("minutes", 60)
    apart = differences(runs)
    looks = cycle(product(DASHES, COLOURS))
    curves = [curves_of(run, look, seconds) for run, look in zip(runs, looks, strict=False)]
    for curve, row in zip(curves, apart.rows, strict=True):
        curve["apart"] = " ".join(f"{key}={cell.text}" for key, cell in zip(apart.columns[1:], row[1:], strict=True))
    return environment.get_template("page.html").render(
        assets=assets | {"plotly.js": Markup(get_plotlyjs())},
        charts=charts,
        data={"charts": [chart._asdict() for chart in charts], "runs": curves, "unit": unit},
        summary=summary(runs),
        apart=apart,
        changes=changes(runs),
        common=common(runs),
        results=results,
        n_runs=len(runs),
        failed=failed,
    )


def curves_of(run: TrainingRun, look: tuple[str, str], unit_s: int) -> dict:
    """Return the data that page.js draws: x axes by row, and each metric's values with the numbers of their rows."""
    dash, colour = look
    series = {chart.key: run.series(chart.key) for chart in CHARTS}
    series = {key: of_key for key, of_key in series.items() if of_key}
    axes = {"tokens": [row["tokens"] for row in run.rows], "step": [row["step"] for row in run.rows]}
    return {
        "name": run.name,
        "label": html.escape(run.name),  # plotly interprets some HTML in names
        "colour": colour,
        "dash": dash,
        "line": DASHES[dash],
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
