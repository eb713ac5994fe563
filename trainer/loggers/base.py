"""The interface of a logger, and several loggers used as one."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from errors import described

Metrics = dict[str, float]


def finite(value: float) -> float | None:
    """Return the value, or None for NaN and infinities, which JSON does not have."""
    return value if math.isfinite(value) else None


def describe_changes(changes: dict[str, list]) -> str:
    """Return [before, after] of each setting as one line, such as optimizer.lr 0.001 -> 0.004."""
    return ", ".join(f"{key} {setting_text(old)} -> {setting_text(new)}" for key, (old, new) in changes.items())


def setting_text(value: object) -> str:
    """Return the value of a setting as YAML has it."""
    return value if isinstance(value, str) else json.dumps(value)


class Logger:
    """Base class of all loggers. Each overrides the methods that concern it."""

    def log(self, step: int, tokens: int, metrics: Metrics) -> None:
        """Record metrics after `step` optimizer steps and `tokens` training tokens."""

    def settings_changed(self, step: int, tokens: int, changes: dict[str, list]) -> None:
        """Record [before, after] of each setting that a resumed run changes after `step`."""

    def message(self, text: str) -> None:
        """Show the user one line."""

    def summary(self, text: str) -> None:
        """Show the user the last lines of a run. No row follows."""

    def close(self, failed: bool = False) -> None:
        """End the log; `failed` says whether the run failed. A second call does nothing."""


class PackageLogger(Logger, ABC):
    """Base class of the loggers that write with another package.

    If the package fails during the run, `on_failure` reports it once with the `remedy`, the package gets nothing more,
    and training goes on. Steps in `redone` are not logged, because the package has them from before the resume.
    """

    def __init__(self, package: str, run: Any, on_failure: Callable[[str], None], remedy: str = "", redone=range(0)):
        self._package, self._run, self._on_failure, self._remedy = package, run, on_failure, remedy
        self._redone = redone

    @abstractmethod
    def write(self, run: Any, step: int, tokens: int, metrics: Metrics) -> None:
        """Give metrics to the package's `run`."""

    @abstractmethod
    def end(self, run: Any, failed: bool) -> None:
        """End the package's `run`."""

    def log(self, step: int, tokens: int, metrics: Metrics) -> None:
        if step not in self._redone:
            self._attempt(lambda run: self.write(run, step, tokens, metrics))

    def close(self, failed: bool = False) -> None:
        self._attempt(lambda run: self.end(run, failed))
        self._run = None

    def _attempt(self, action: Callable[[Any], None]) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:  # packages raise many types
            self._run = None
            why = f"{self._package} failed and is off from here on ({described(error)})"
            self._on_failure(f"{why}; metrics.jsonl goes on{self._remedy}")


class Loggers(Logger, AbstractContextManager):
    """Forward everything to each of the given loggers. The context ends by closing them."""

    def __init__(self, loggers: list[Logger]):
        self._loggers = loggers

    def log(self, step: int, tokens: int, metrics: Metrics) -> None:
        for logger in self._loggers:
            logger.log(step, tokens, metrics)

    def settings_changed(self, step: int, tokens: int, changes: dict[str, list]) -> None:
        for logger in self._loggers if changes else ():
            logger.settings_changed(step, tokens, changes)

    @contextmanager
    def row(self, step: int, tokens: int) -> Iterator[Metrics]:
        """Collect the metrics of a step in a dict and log them at the end of the context, even after an error."""
        metrics: Metrics = {}
        try:
            yield metrics
        finally:
            if metrics:
                self.log(step, tokens, metrics)

    def message(self, text: str) -> None:
        for logger in self._loggers:
            logger.message(text)

    def summary(self, text: str) -> None:
        for logger in self._loggers:
            logger.summary(text)

    def close(self, failed: bool = False) -> None:
        """Close each logger, the last one first, even if another one raises."""
        with ExitStack() as stack:
            for logger in self._loggers:
                stack.callback(logger.close, failed)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)
