"""The tables of a report: the settings of runs, and the results of benchmarks."""

import json
import math
import re
from pathlib import Path
from typing import NamedTuple

from bench.report.runs import TrainingRun, files_below
from errors import UserError
from trainer.loggers import setting_text


class TableCell(NamedTuple):
    """The text of a cell, and the number that the column is sorted by, if any."""

    text: str
    order: float | None = None


EMPTY = TableCell("-")


class Table(NamedTuple):
    """A table with a title and a note on the whole table."""

    title: str
    note: str
    columns: list[str]
    rows: list[list[TableCell]]

    def is_numeric(self, column: int) -> bool:
        """Return whether a column holds numbers, which are aligned to the right."""
        return any(row[column].order is not None for row in self.rows)


def json_cell(value: object) -> TableCell:
    """Return the cell of a JSON value: numbers with at least four digits, commits with twelve."""
    if value is None:
        return EMPTY
    if isinstance(value, bool):
        return TableCell("yes" if value else "no")
    if isinstance(value, int):
        return TableCell(f"{value:,}", value)
    if isinstance(value, float) and math.isfinite(value):
        return TableCell(f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}", value)
    return TableCell(str(value)[: 12 if re.fullmatch(r"[0-9a-f]{40}", str(value)) else None])


def differences(runs: list[TrainingRun]) -> Table:
    """Return the settings that differ, one row per run. Runs without known settings do not count."""
    known = [run.settings for run in runs if run.settings]
    every = dict.fromkeys(key for settings in known for key in settings)
    keys = [key for key in every if len({settings.get(key) for settings in known}) > 1]
    rows = [[TableCell(run.name), *(TableCell(run.settings.get(key, "-")) for key in keys)] for run in runs]
    return Table("Settings that differ", "", ["run", *keys], rows)


def common(runs: list[TrainingRun]) -> Table:
    apart = differences(runs).columns
    shared = {key: value for run in runs for key, value in run.settings.items() if key not in apart}
    rows = [[TableCell(key), TableCell(value)] for key, value in shared.items()]
    return Table("Settings in common", "", ["setting", "value"], rows)


def changes(runs: list[TrainingRun]) -> Table:
    """Return the settings that were changed when runs were resumed, one row per run, step and setting."""
    rows = []
    for run in runs:
        for number, of_resume in run.changes.items():
            for key, pair in of_resume.items():
                texts = map(TableCell, (key, *map(setting_text, pair)))
                rows.append([TableCell(run.name), json_cell(run.rows[number]["step"]), *texts])
    note = "The curves have a diamond there. The other tables show the settings that a run ended with."
    return Table("Settings changed on resume", note, ["run", "after step", "setting", "before", "after"], rows)


def read_tables(place: str) -> list[Table]:
    """Return the tables of all results files in and below a folder.

    A file of bench.paper gives the tables of its page; any other file gives a table for each list of rows.
    """
    folder = Path(place)
    files = sorted(files_below(folder, "*.json")) if folder.is_dir() else []
    if not files:
        raise UserError(f"results={place} has no JSON files; give a folder of results, such as bench/results")
    return [table for file in files for table in tables_of_file(file, str(file.relative_to(folder).with_suffix("")))]


def tables_of_file(path: Path, name: str) -> list[Table]:
    try:
        if path.with_suffix(".md").is_file():
            return read_page(path.with_suffix(".md"))
        content = json.loads(path.read_text())
        parts = {key: value for key, value in content.items() if isinstance(value, list)}
        about = content["environment"] | {key: v for key, v in content.items() if not isinstance(v, list | dict)}
        titles = {key: name if key == "rows" or Path(name).name == key else f"{name}, {key}" for key in parts}
        return [table_of(rows, titles[key], about) for key, rows in parts.items()]
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise UserError(f"{path} is not a results file of bench; move it away, or name another folder") from error


def read_page(path: Path) -> list[Table]:
    """Return the tables of a Markdown page. Its paragraphs become the note of each table."""
    title, *parts = path.read_text().replace("`", "").strip().split("\n\n")
    title, drawn = title.lstrip("# "), [part for part in parts if part.startswith("|")]
    note, tables = " ".join(part for part in parts if part not in drawn), []
    for part in drawn:
        header, _, *rows = ([word.strip() for word in line.strip("|").split("|")] for line in part.splitlines())
        cells = [[printed(word) for word in row] for row in rows]
        tables.append(Table(title if len(drawn) == 1 else f"{title}: {header[0]}", note, header, cells))
    return tables


def printed(text: str) -> TableCell:
    """Return a cell of a page, sorted by its number if it begins with one."""
    number = re.match(r"-?[\d,]+(\.\d+)?", text)
    return TableCell(text, float(number[0].replace(",", "")) if number else None)


def table_of(rows: list[dict], title: str, about: dict) -> Table:
    """Return the table of a results file's rows.

    Values that all rows share go to the note. Nested values, such as curves, and empty columns are left out.
    """
    keys = dict.fromkeys(key for row in rows for key in row)
    values = {key: [row.get(key) for row in rows] for key in keys}
    values = {key: of_key for key, of_key in values.items() if not any(isinstance(v, list | dict) for v in of_key)}
    same = {key: of_key[0] for key, of_key in values.items() if len(of_key) > 1 and len(set(of_key)) == 1}
    columns = [key for key, of_key in values.items() if key not in same and set(of_key) != {None}]
    note = "; ".join(
        ", ".join(f"{k} {json_cell(v).text}" for k, v in of.items() if v is not None) for of in (about, same) if of
    )
    return Table(title, note, columns, [[json_cell(row.get(key)) for key in columns] for row in rows])
