"""The first table of a report: one row per run, with speed and memory relative to the first run."""

from datetime import timedelta

from bench.report.page_tables import EMPTY, Table, TableCell
from bench.report.runs import TrainingRun

MEMORY = {"GPU": "memory/peak_allocated_gib", "process": "memory/peak_rss_gib"}
NOTE = (
    "Losses are the last ones, in nats per token, and perplexity is from the last validation. Speeds are medians over "
    "the second half of a run. Training time excludes compilation, evaluation and saving."
)


def summary(runs: list[TrainingRun]) -> Table:
    """Return one row per run, the lowest final validation loss first, without columns that are empty for all runs."""
    ranked = sorted(runs, key=lambda run: (last(run, "val/loss") is None, last(run, "val/loss")))
    rows = [row_of(run, runs) for run in ranked]
    filled = [column for column in (rows[0] if rows else ()) if any(row[column].text != "-" for row in rows)]
    return Table("Summary", NOTE, filled, [[row[column] for column in filled] for row in rows])


def row_of(run: TrainingRun, runs: list[TrainingRun]) -> dict[str, TableCell]:
    seconds, reached = run.seconds(), str(last(run, "step") or 0)
    wanted = run.settings.get("train.max_steps", reached)
    contexts = {other.settings.get("model.context_length") for other in runs}
    return {
        "run": TableCell(run.name),
        "context": TableCell(run.settings.get("model.context_length", "-") if len(contexts) > 1 else "-"),
        "steps": TableCell(reached if wanted == reached else f"{reached} of {wanted}", last(run, "step")),
        "training loss": ending(run, "train/loss", "{:.4f}"),
        "validation loss": ending(run, "val/loss", "{:.4f}"),
        "lowest validation loss": show(min(run.finite("val/loss"), default=None), "{:.4f}"),
        "perplexity": ending(run, "val/perplexity", "{:,.2f}"),
        "tokens/s": show(speed(run), "{:,.0f}"),
        **relative("speed", "x {:.2f}", ratio(speed(run), speed(runs[0])), runs),
        "TFLOP/s": show(run.typical("perf/tflops"), "{:,.4g}"),
        "MFU": show(run.typical("perf/mfu"), "{:.1%}"),
        **memory(run, runs),
        "training time": TableCell(str(timedelta(seconds=round(seconds[-1]))), seconds[-1]) if seconds else EMPTY,
    }


def memory(run: TrainingRun, runs: list[TrainingRun]) -> dict[str, TableCell]:
    """Return the peaks of memory. The first peak also gets a column relative to the first run."""
    compared = next((kind for kind, key in MEMORY.items() if runs[0].finite(key)), None)
    columns = {}
    for kind, key in MEMORY.items():
        own, base = (max(of.finite(key), default=None) for of in (run, runs[0]))
        columns[f"peak {kind} memory"] = show(own, "{:.1f} GiB")
        if kind == compared:
            times = ratio(own, base)
            columns |= relative("memory", "{:+.1%}", None if times is None else times - 1, runs)
    return columns


def relative(what: str, form: str, value: float | None, runs: list[TrainingRun]) -> dict[str, TableCell]:
    """Return the column of a value relative to the first run's, or no column for a single run."""
    return {f"{what} relative to {runs[0].name}": show(value, form)} if len(runs) > 1 else {}


def ratio(own: float | None, base: float | None) -> float | None:
    return own / base if own is not None and base else None


def speed(run: TrainingRun) -> float | None:
    return run.typical("perf/tokens_per_second")


def last(run: TrainingRun, key: str) -> float | None:
    values = list(run.series(key).values())
    return values[-1] if values else None


def ending(run: TrainingRun, key: str, form: str) -> TableCell:
    """Return the last value of a metric, and say so if it is not finite."""
    return show(last(run, key), form, "not finite" if run.series(key) else "-")


def show(value: float | None, form: str, missing: str = "-") -> TableCell:
    return TableCell(missing) if value is None else TableCell(form.format(value), value)
