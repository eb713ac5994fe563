"""The training runs of a report: find their folders, read their metrics, and compare their settings."""

import fnmatch
import glob
import json
import os
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from conf.resume import flat
from data.folders import real_files
from errors import UserError
from trainer.loggers import finite, setting_text

Row = dict[str, float | None]


@dataclass(frozen=True)
class TrainingRun:
    """The settings and metrics of one run of train.py."""

    name: str
    """The run's folder, relative to the parent folder that all runs of the report share."""
    settings: dict[str, str]
    """Values as in YAML by dotted key; empty if the folder has no config.yaml."""
    rows: list[Row]
    """The rows of metrics.jsonl; None is a metric that was not finite."""
    changes: dict[int, dict[str, list]]
    """The settings that a resume changed, by the number of the row: {"optimizer.lr": [before, after]}."""

    def series(self, key: str) -> dict[int, float | None]:
        """Return a metric by the number of its row, for the rows that have it."""
        return {number: row[key] for number, row in enumerate(self.rows) if key in row}

    def finite(self, key: str) -> list[float]:
        return [value for value in self.series(key).values() if value is not None]

    def typical(self, key: str) -> float | None:
        """Return the median over the second half of the rows that have the metric, or None if no row has it."""
        values = self.finite(key)
        return statistics.median_high(values[len(values) // 2 :]) if values else None

    def seconds(self) -> list[float]:
        """Return the training time in seconds up to each row, without compilation, evaluation and saving.

        Each step counts with the speed of its timing window. A run that was resumed in a new folder starts one
        train.log_interval before its first row. The list is empty if the run has no timings.
        """
        paces, pace = [], (self.finite("perf/step_ms") or [None])[-1]
        if pace is None:
            return []
        for row in reversed(self.rows):  # a window ends with the row that has its speed
            pace = row.get("perf/step_ms") or pace
            paces.append(pace)
        first = self.rows[0]["step"]
        began = max(first - int(self.settings.get("train.log_interval", first)), 0)
        steps = pairwise([began, *(row["step"] for row in self.rows)])
        windows = zip(steps, reversed(paces), strict=True)
        return list(accumulate((end - start) * ms / 1e3 for (start, end), ms in windows))


def read_runs(places: list[str]) -> list[TrainingRun]:
    """Return the runs in and below `places`, which are folders or globs. Each run appears once."""
    folders = list(dict.fromkeys(folder for place in places for folder in find(place)))
    common = os.path.commonpath([folder.parent for folder in folders])
    return [
        TrainingRun(folder.relative_to(common).as_posix(), read_settings(folder / "config.yaml"), *read_rows(folder))
        for folder in folders
    ]


def find(place: str) -> list[Path]:
    """Return the folders that `place` names and that have a metrics.jsonl, or else such folders below them."""
    named = [place] if os.path.exists(place) else glob.glob(place, recursive=True)
    folders = []
    for path in sorted(map(Path, named), key=natural):
        below = [path / "metrics.jsonl"] if (path / "metrics.jsonl").is_file() else files_below(path, "metrics.jsonl")
        folders += sorted((file.parent.resolve() for file in below), key=natural)
    if not folders:
        raise UserError(f"runs={place} has no metrics.jsonl in it or below; give output folders of train.py")
    return folders


def files_below(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a name pattern in and below a folder, each real file once, also through links to folders.

    Copies in hidden files and folders, such as .ipynb_checkpoints, are skipped and named.
    """

    def matching(paths: Iterable[Path]) -> list[Path]:
        return [path for path in paths if fnmatch.fnmatch(path.name, pattern) and path.is_file()]

    found, skipped = real_files([folder], (pattern.removeprefix("*"),))
    hidden = matching(file for path in skipped.get("hidden", ()) for file in (path, *sorted(path.rglob("*"))))
    if hidden:
        print(f"skipped {len(hidden)} hidden files: {', '.join(map(str, hidden))}")
    return matching(found)


def natural(path: Path) -> list:
    """Return a sort key that puts 2_naive before 10_naive."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]


def read_settings(path: Path) -> dict[str, str]:
    """Return the settings of config.yaml by dotted key, or none if the file is missing."""
    if not path.exists():
        return {}
    try:
        settings = flat(OmegaConf.to_container(OmegaConf.load(path)))
    except (YAMLError, OmegaConfBaseException, OSError, ValueError, AttributeError) as error:  # a list has no items
        raise UserError(f"{path} is not a configuration of train.py; fix it or move it away") from error
    settings.pop("wandb.id", None)  # It differs between all runs.
    return {key: setting_text(value) for key, value in settings.items()}


def read_rows(folder: Path) -> tuple[list[Row], dict[int, dict[str, list]]]:
    """Return the rows of metrics.jsonl and the changes of settings. A killed run's incomplete last line is left out."""
    path = folder / "metrics.jsonl"
    rows, changes = [], {}
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        try:
            row = json.loads(line)
            changed = row.pop("settings_changed", {})
            if not all(len(pair) == 2 for pair in changed.values()):
                raise ValueError("a change has two values")
            if not all(isinstance(row[key], int) for key in ("step", "tokens")):
                raise ValueError("a row has a step and tokens")
            rows.append({key: None if value is None else finite(value) for key, value in row.items()})
            if changed:
                changes[len(rows) - 1] = changed
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            if not line.endswith(b"\n"):
                break
            raise UserError(f"{path} line {number} is not a row of metrics; remove the line") from error
    return rows, changes
