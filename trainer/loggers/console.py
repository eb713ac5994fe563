"""The console: a live progress line on a terminal, plain lines elsewhere."""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from trainer.loggers.base import Logger, Metrics, describe_changes


class ConsoleLogger(Logger):
    """Show progress: a live line on a terminal, with messages above it, or one line per call of `log` elsewhere.

    Output that stdout refuses (full disk, closed terminal) is lost; training goes on.
    """

    def __init__(self, max_steps: int, *, console: Console | None = None, clock: Callable[[], float] = time.monotonic):
        self.max_steps = max_steps
        self._console, self._clock = console or Console(), clock
        self._marks: deque[tuple[int, float]] = deque(maxlen=100)  # the recent steps and when they ended
        self._progress: Progress | None = None

    def log(self, step: int, tokens: int, metrics: Metrics) -> None:
        self._marks.append((step, self._clock()))
        where = f"step {step:>{len(str(self.max_steps))}}/{self.max_steps}"
        if "val/loss" in metrics:
            self.message("  ".join([where, *_fields(metrics, EVALUATION)]))
        if "train/loss" in metrics:
            fields = _fields(metrics, TRAINING)
            if self._console.is_interactive:
                with suppress(OSError):
                    self._show(step, "  ".join([where, self._eta(), *fields]))
            else:
                self.message("  ".join([where, *fields, self._eta()]))

    def settings_changed(self, step: int, tokens: int, changes: dict[str, list]) -> None:
        self.message(f"changed since the checkpoint: {describe_changes(changes)}")

    def message(self, text: str) -> None:
        with suppress(OSError):
            self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def close(self, failed: bool = False) -> None:
        if self._progress:
            with suppress(OSError):
                self._progress.stop()
            self._progress = None

    def _eta(self) -> str:
        """Return the time left at the pace of the recent steps, which includes evaluation and saving."""
        (first_step, began), (step, now) = self._marks[0], self._marks[-1]
        if step == first_step:
            return "ETA -:--:--"
        minutes, seconds = divmod(round((self.max_steps - step) * (now - began) / (step - first_step)), 60)
        return f"ETA {minutes // 60}:{minutes % 60:02}:{seconds:02}"

    def _show(self, step: int, text: str) -> None:
        if self._progress is None:
            bar = BarColumn(bar_width=16, table_column=Column(width=16))
            one_line = Column(no_wrap=True, overflow="ellipsis")  # a narrow terminal cuts the text, not the bar
            fields = TextColumn("{task.description}", markup=False, table_column=one_line)
            self._progress = Progress(bar, fields, console=self._console, auto_refresh=False)
            self._task = self._progress.add_task("", total=self.max_steps)
            self._progress.start()
        self._progress.update(self._task, completed=step, description=text, refresh=True)


def _fields(metrics: Metrics, formats: dict[str, Callable[[float], str]]) -> list[str]:
    return [show(metrics[key]) for key, show in formats.items() if key in metrics]


def _perplexity(x: float) -> str:
    return f"{x:.1f}" if x < 1e6 else f"{x:.1e}"


def _thousands(x: float) -> str:
    for size, suffix in ((1e6, "M"), (1e3, "k")):
        if x >= size:
            return f"{x / size:.0f}{suffix}" if x >= 10 * size else f"{x / size:.1f}{suffix}"
    return f"{x:.0f}"


TRAINING: dict[str, Callable[[float], str]] = {
    "train/loss": lambda x: f"loss {x:6.3f}",
    "train/perplexity": lambda x: f"ppl {_perplexity(x):>7}",
    "train/lr": lambda x: f"lr {x:.1e}",
    "perf/tokens_per_second": lambda x: f"{_thousands(x):>4} tok/s",
    "perf/tflops": lambda x: f"{x:4.0f} TFLOP/s" if x >= 10 else f"{x:.2f} TFLOP/s",
    "perf/mfu": lambda x: f"MFU {x:3.0%}",
    "memory/peak_allocated_gib": lambda x: f"{x:5.1f} GiB",
    "memory/peak_rss_gib": lambda x: f"{x:5.1f} GiB",
}
EVALUATION: dict[str, Callable[[float], str]] = {
    "val/loss": lambda x: f"val loss {x:6.3f}",
    "val/perplexity": lambda x: f"val ppl {_perplexity(x):>7}",
}
