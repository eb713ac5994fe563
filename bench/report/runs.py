"""Training runs as a report sees them: found, read, and told apart by their settings."""

import glob
import json
import math
import os
import re
import statistics
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from errors import UserError

Row = dict[str, float | None]


@dataclass(frozen=True)
class Run:
    """What one run of train.py left behind."""

    name: str
    """Its folder, below the one that all runs of the report share."""
    settings: dict[str, str]
    """By dotted key, as YAML spells them; empty where the folder has no config.yaml."""
    rows: list[Row]
    """Of metrics.jsonl; None is a metric that was not finite."""

    def series(self, key: str) -> dict[int, float | None]:
        """A metric by the number of its row, for the rows that have it."""
        return {number: row[key] for number, row in enumerate(self.rows) if key in row}

    def finite(self, key: str) -> list[float]:
        """A metric's finite values."""
        return [value for value in self.series(key).values() if value is not None]

    def typical(self, key: str) -> float | None:
        """The median over the second half of the rows that have the metric, as bench.parity takes it."""
        values = self.finite(key)
        return statistics.median_high(values[len(values) // 2 :]) if values else None

    def seconds(self) -> list[float]:
        """Training time up to each row: its steps at the speed of the timing window they lie in, without compilation,
        evaluation and saving, as the windows are. Of a run that continued another in a folder of its own, from one
        train.log_interval before its first row on. Empty where the run timed nothing."""
        paces, pace = [], (self.finite("perf/step_ms") or [None])[-1]
        if pace is None:
            return []
        for row in reversed(self.rows):  # a window ends with the row that tells its speed
            pace = row.get("perf/step_ms") or pace
            paces.append(pace)
        first = self.rows[0]["step"]
        began = max(first - int(self.settings.get("train.log_interval", first)), 0)
        steps = pairwise([began, *(row["step"] for row in self.rows)])
        return list(
            accumulate((end - start) * ms / 1e3 for (start, end), ms in zip(steps, reversed(paces), strict=True))
        )


def read_runs(places: list[str]) -> list[Run]:
    """The runs in and below `places`, which are folders or globs; each once.

    Raises:
        UserError: a place that holds no run, or a file that train.py did not write.
    """
    folders = list(dict.fromkeys(folder for place in places for folder in find(place)))
    common = os.path.commonpath([folder.parent for folder in folders])
    return [
        Run(folder.relative_to(common).as_posix(), read_settings(folder / "config.yaml"), read_rows(folder))
        for folder in folders
    ]


def find(place: str) -> list[Path]:
    """The folders with metrics.jsonl among those that `place` names, or else below them."""
    named = [place] if os.path.exists(place) else glob.glob(place, recursive=True)
    folders = []
    for path in sorted(map(Path, named), key=natural):
        below = [path / "metrics.jsonl"] if (path / "metrics.jsonl").is_file() else path.rglob("metrics.jsonl")
        folders += sorted((file.parent.resolve() for file in below if file.is_file()), key=natural)
    if not named:
        raise UserError(f"runs={place} does not exist; give folders that python train.py wrote, such as runs=outputs")
    if not folders:
        raise UserError(f"runs={place} holds no run, as no metrics.jsonl is in it or below; give a folder of train.py")
    return folders


def natural(path: Path) -> list:
    """A key that sorts 2_naive before 10_naive."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]


def read_settings(path: Path) -> dict[str, str]:
    """config.yaml, flat; nothing where there is none."""
    if not path.exists():
        return {}
    try:
        config = OmegaConf.to_container(OmegaConf.load(path))
        if not isinstance(config, dict):
            raise ValueError("it holds no settings")
    except (YAMLError, OmegaConfBaseException, ValueError, OSError) as error:
        raise UserError(f"{path} is no configuration that train.py wrote; mend it or move it away") from error
    return dict(flat(config, ""))


def flat(node: object, key: str) -> list[tuple[str, str]]:
    if isinstance(node, dict):
        return [pair for name, child in node.items() for pair in flat(child, f"{key}.{name}" if key else str(name))]
    return [(key, node if isinstance(node, str) else json.dumps(node))]


def read_rows(folder: Path) -> list[Row]:
    """The rows of metrics.jsonl, but for a last line that a killed run left torn."""
    path = folder / "metrics.jsonl"
    rows, lines = [], path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(parse_row(line))
        except ValueError as error:
            if not line.endswith(b"\n"):
                break
            raise UserError(f"{path} has no row of metrics in line {number}; remove that line") from error
    return rows


def parse_row(line: bytes) -> Row:
    row = json.loads(line)
    if not isinstance(row, dict) or not all(isinstance(row.get(key), int) for key in ("step", "tokens")):
        raise ValueError("a row has a step and tokens")
    if not all(isinstance(value, int | float | None) for value in row.values()):
        raise ValueError("a metric is a number")
    return {key: value if value is not None and math.isfinite(value) else None for key, value in row.items()}


def differing(runs: list[Run]) -> list[str]:
    """The settings that are not the same in all runs whose settings are known."""
    known = [run.settings for run in runs if run.settings]
    keys = dict.fromkeys(key for settings in known for key in settings)
    return [key for key in keys if len({settings.get(key) for settings in known}) > 1]


def in_common(runs: list[Run]) -> dict[str, str]:
    """The other settings."""
    apart = set(differing(runs))
    return {key: value for run in runs for key, value in run.settings.items() if key not in apart}
