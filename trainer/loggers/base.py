"""The interface of a logger, and several loggers used as one."""

import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

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

    def close(self, failed: bool = False) -> None:
        """End the log; `failed` says whether the run failed. A second call does nothing."""


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

    def close(self, failed: bool = False) -> None:
        """Close each logger, the last one first, even if another one raises."""
        with ExitStack() as stack:
            for logger in self._loggers:
                stack.callback(logger.close, failed)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)
