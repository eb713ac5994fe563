"""The tables of a report: runs side by side, their settings, and whatever benchmarks wrote."""

import json
import math
import re
from pathlib import Path
from typing import NamedTuple

from bench.report.runs import Run, differing, in_common
from errors import UserError


class Cell(NamedTuple):
    """What a cell shows, and the number it is sorted by if it has one."""

    text: str
    order: float | None = None


class Table(NamedTuple):
    """A titled table with a note on what holds for all of it."""

    title: str
    note: str
    columns: list[str]
    rows: list[list[Cell]]

    def is_numeric(self, column: int) -> bool:
        """Whether a column is set to the right, as numbers are."""
        return any(row[column].order is not None for row in self.rows)


def cell(value: object) -> Cell:
    """A value of a JSON file: numbers to four digits at least, commits to twelve."""
    if value is None:
        return Cell("-")
    if isinstance(value, bool):
        return Cell("yes" if value else "no")
    if isinstance(value, int):
        return Cell(f"{value:,}", value)
    if isinstance(value, float) and math.isfinite(value):
        return Cell(f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}", value)
    return Cell(str(value)[: 12 if re.fullmatch(r"[0-9a-f]{40}", str(value)) else None])


def summary(runs: list[Run]) -> Table:
    """One row a run, the lowest final validation loss first; columns that no run fills are left out."""

    def last(run: Run, key: str) -> float | None:
        values = list(run.series(key).values())
        return values[-1] if values else None

    def ending(run: Run, key: str, form: str) -> Cell:
        value = last(run, key)
        missing = "not finite" if run.series(key) else "-"
        return Cell(missing) if value is None else Cell(form.format(value), value)

    def show(value: float | None, form: str) -> Cell:
        return Cell("-") if value is None else Cell(form.format(value), value)

    contexts = {run.settings.get("model.context_length") for run in runs}
    columns = {
        "run": lambda run: Cell(run.name),
        "context": lambda run: Cell(run.settings.get("model.context_length", "-") if len(contexts) > 1 else "-"),
        "steps": lambda run: Cell(steps(run), last(run, "step")),
        "training loss": lambda run: ending(run, "train/loss", "{:.4f}"),
        "validation loss": lambda run: ending(run, "val/loss", "{:.4f}"),
        "lowest validation loss": lambda run: show(min(run.finite("val/loss"), default=None), "{:.4f}"),
        "perplexity": lambda run: ending(run, "val/perplexity", "{:,.2f}"),
        "tokens/s": lambda run: show(run.typical("perf/tokens_per_second"), "{:,.0f}"),
        "TFLOP/s": lambda run: show(run.typical("perf/tflops"), "{:,.4g}"),
        "MFU": lambda run: show(run.typical("perf/mfu"), "{:.1%}"),
        "peak GPU memory": lambda run: show(max(run.finite("memory/peak_allocated_gib"), default=None), "{:.1f} GiB"),
        "peak process memory": lambda run: show(max(run.finite("memory/peak_rss_gib"), default=None), "{:.1f} GiB"),
        "training time": lambda run: duration(run.seconds()),
    }
    ranked = sorted(runs, key=lambda run: (last(run, "val/loss") is None, last(run, "val/loss")))
    rows = [[fill(run) for fill in columns.values()] for run in ranked]
    filled = [any(row[column].text != "-" for row in rows) for column in range(len(columns))]
    note = (
        "Losses are the last ones, in nats per token, and perplexity is the last validation's. Speeds are medians over "
        "the second half of a run. Training time holds steps alone: no compilation, evaluation or saving."
    )
    return Table("Summary", note, keep(list(columns), filled), [keep(row, filled) for row in rows])


def keep(cells: list, wanted: list[bool]) -> list:
    return [each for each, is_wanted in zip(cells, wanted, strict=True) if is_wanted]


def steps(run: Run) -> str:
    """How far the run came, and of how many steps if it ended before."""
    reached, wanted = (run.rows[-1]["step"] if run.rows else 0), run.settings.get("train.max_steps", "")
    return f"{reached}" if wanted in ("", str(reached)) else f"{reached} of {wanted}"


def duration(seconds: list[float]) -> Cell:
    """The last of `seconds` as hours, minutes and seconds."""
    if not seconds:
        return Cell("-")
    minutes, s = divmod(round(seconds[-1]), 60)
    return Cell(f"{minutes // 60}:{minutes % 60:02}:{s:02}", seconds[-1])


def differences(runs: list[Run]) -> Table:
    """The settings that differ, one row a run; no columns but the run where none does."""
    keys = differing(runs)
    rows = [[Cell(run.name), *(Cell(run.settings.get(key, "-")) for key in keys)] for run in runs]
    return Table("Settings that differ", "", ["run", *keys], rows)


def common(runs: list[Run]) -> Table:
    """The settings that all runs share."""
    return Table(
        "Settings in common", "", ["setting", "value"], [[Cell(k), Cell(v)] for k, v in in_common(runs).items()]
    )


def read_results(place: str) -> list[Table]:
    """The tables of the results files in and below a folder: the page that bench.paper wrote beside its rows, elsewhere
    every list of rows.

    Raises:
        UserError: there is no such file, or one that no benchmark wrote.
    """
    folder = Path(place)
    files = sorted(folder.rglob("*.json"))
    if not folder.exists():
        raise UserError(f"results={place} does not exist; give a folder with JSON files of bench, see bench/results")
    if not files:
        raise UserError(f"results={place} holds no results; give a folder with JSON files of bench, see bench/results")
    return [table for file in files for table in read_file(file, str(file.relative_to(folder).with_suffix("")))]


def read_file(path: Path, name: str) -> list[Table]:
    if path.with_suffix(".md").is_file():
        return read_page(path.with_suffix(".md"))
    try:
        content = json.loads(path.read_text())
        parts = {key: value for key, value in content.items() if isinstance(value, list)}
        about = content["environment"] | {key: v for key, v in content.items() if not isinstance(v, list | dict)}
        titles = {key: name if key == "rows" or Path(name).name == key else f"{name}, {key}" for key in parts}
        return [table_of(rows, titles[key], about) for key, rows in parts.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is no results file of bench; move it away, or name another folder") from error


def read_page(path: Path) -> list[Table]:
    """The tables of a Markdown page, all under its headline. Paragraphs are the notes of the table that follows, and
    those after the last are its.

    Raises:
        UserError: it holds none.
    """
    title, *parts = path.read_text().replace("`", "").strip().split("\n\n")
    tables, notes = [], []
    for part in parts:
        lines = part.splitlines()
        if len(lines) < 2 or not all(line.startswith("|") for line in lines):
            notes.append(" ".join(lines))
            continue
        header, _, *rows = ([word.strip() for word in line.strip("|").split("|")] for line in lines)
        cells = [[printed(word) for word in row] for row in rows]
        tables.append(Table(title.lstrip("# "), " ".join(notes), header, cells))
        notes = []
    if not tables:
        raise UserError(f"{path} holds no table; let python -m bench.paper write it anew, or move it away")
    tables[-1] = tables[-1]._replace(note=" ".join([tables[-1].note, *notes]).strip())
    if len(tables) > 1:  # what their first columns hold tells them apart
        tables = [table._replace(title=f"{table.title}: {table.columns[0]}") for table in tables]
    return tables


def printed(text: str) -> Cell:
    """A cell of a page, sorted by its first number where it begins with one."""
    number = re.match(r"-?[\d,]+(\.\d+)?", text)
    return Cell(text, float(number[0].replace(",", "")) if number else None)


def table_of(rows: list[dict], title: str, about: dict) -> Table:
    """Rows of a results file. What is the same in all of them goes to the note; curves and other nested values, and
    what no row has, are left out."""
    keys = dict.fromkeys(key for row in rows for key in row)
    values = {key: [row.get(key) for row in rows] for key in keys}
    values = {key: of_key for key, of_key in values.items() if not any(isinstance(v, list | dict) for v in of_key)}
    same = {key: of_key[0] for key, of_key in values.items() if len(of_key) > 1 and len(set(of_key)) == 1}
    columns = [key for key, of_key in values.items() if key not in same and set(of_key) != {None}]
    note = "; ".join(
        ", ".join(f"{k} {cell(v).text}" for k, v in of.items() if v is not None) for of in (about, same) if of
    )
    return Table(title, note, columns, [[cell(row.get(key)) for key in columns] for row in rows])
