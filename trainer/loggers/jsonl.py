"""metrics.jsonl: one JSON object a line."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from trainer.loggers.base import Logger, Metrics, finite


class JsonlLogger(Logger):
    """Append rows {"step": ..., "tokens": ..., metrics} to a file. A row is on disk when `log` returns.

    NaN and infinity become null. If the disk refuses a row, the row waits in memory and the next `log` tries again.
    `on_failure` reports each outage once, and how many rows are lost if an outage lasts until the end.
    """

    def __init__(self, path: Path, on_failure: Callable[[str], None]):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)  # our own buffer says what is not on disk
        self._waiting = b""
        self._on_failure, self._has_failed = on_failure, False

    def log(self, step: int, tokens: int, metrics: Metrics) -> None:
        self._write({"step": step, "tokens": tokens} | {key: finite(value) for key, value in metrics.items()})

    def settings_changed(self, step: int, tokens: int, changes: dict[str, list]) -> None:
        self._write({"step": step, "tokens": tokens, "settings_changed": changes})

    def _write(self, row: dict) -> None:
        self._waiting += json.dumps(row, allow_nan=False).encode() + b"\n"
        self._attempt(self._flush)

    def _flush(self) -> None:
        while self._waiting:  # a disk that is nearly full takes a part
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def close(self, failed: bool = False) -> None:
        if self._file.closed:
            return
        self._attempt(self._flush)
        self._attempt(self._file.close)
        if rows := self._waiting.count(b"\n"):
            self._on_failure(f"{self.path} lacks the last {rows} rows, because the disk refused them until the end")

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                why = f"{self.path} cannot be written ({error.strerror})"
                self._on_failure(f"{why}; make room: training goes on, and the rows wait in memory")
            self._has_failed = True


def truncate_after(path: Path, step: int, evaluated: int) -> None:
    """Remove the rows after `step`, and the incomplete last line of a killed run. The file is replaced atomically.

    Changes of settings after `step` go too, because the run that is resumed from there may change others. Evaluations
    after the step `evaluated` go, because that run repeats them.
    """
    if not path.exists():
        return
    shorter = path.with_name(path.name + ".tmp")
    with shorter.open("wb") as new:
        for line, row in _rows(path):
            is_repeated = "val/loss" in row and row["step"] > evaluated
            if row["step"] + ("settings_changed" in row) <= step and not is_repeated:
                new.write(line.rstrip(b"\n") + b"\n")
    shorter.replace(path)


def last_step(path: Path) -> int:
    """Return the step of the last row of metrics, or 0 for an empty file."""
    return max((row["step"] for _, row in _rows(path) if "settings_changed" not in row), default=0)


def _rows(path: Path) -> Iterator[tuple[bytes, dict]]:
    """Yield the complete lines of a file, if it exists, each with its content."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            with suppress(ValueError, TypeError, KeyError):  # an incomplete line is not a row
                row = json.loads(line)
                row["step"] + 0  # a TypeError if the step is not a number
                yield line, row
