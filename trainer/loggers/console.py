"""The console: a table with a line per row, on a terminal with a live last line. No line exceeds 100 columns."""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from trainer.layout import duration, paragraph, three_digits
from trainer.loggers.base import Logger, Metrics, describe_changes

HEADER_INTERVAL = 20  # printed rows between two headers
BAR_WIDTH = 16


class ConsoleLogger(Logger):
    """Show a table of the metrics. On a terminal, the newest training row is a live line with a bar, below all others.

    `has_mfu` says whether rows may have perf/mfu. Output that stdout refuses (full disk, closed terminal) is lost;
    training goes on.
    """

    def __init__(
        self,
        max_steps: int,
        *,
        has_mfu: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.max_steps = max_steps
        self._console, self._clock = console or Console(), clock
        self._marks: deque[tuple[int, float]] = deque(maxlen=100)  # the recent steps and when they ended
        self._progress: Progress | None = None
        self._columns = {title: column for title, column in COLUMNS.items() if has_mfu or title != "MFU"}
        self._printed = 0  # rows below the newest header

    def log(self, step: int, tokens: int, metrics: Metrics) -> None:
        self._marks.append((step, self._clock()))
        if "val/loss" in metrics:
            self._print_row(self._row("val", step, {key: x for key, x in metrics.items() if key.startswith("val/")}))
        if "train/loss" in metrics:
            row = self._row("train", step, metrics, self._eta())
            if self._console.is_interactive:
                with suppress(OSError):
                    self._show(step, row)
            else:
                self._print_row(row)

    def settings_changed(self, step: int, tokens: int, changes: dict[str, list]) -> None:
        self.message(paragraph("changed", f"since the checkpoint: {describe_changes(changes)}"))

    def message(self, text: str) -> None:
        with suppress(OSError):
            self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def summary(self, text: str) -> None:
        self.close()  # otherwise the live line would stay below the summary
        self.message(text)

    def close(self, failed: bool = False) -> None:
        if self._progress:
            with suppress(OSError):
                self._progress.stop()
            self._progress = None

    def _eta(self) -> str:
        """Return the time left at the pace of the recent steps, which includes evaluation and saving."""
        (first_step, began), (step, now) = self._marks[0], self._marks[-1]
        return duration((self.max_steps - step) * (now - began) / (step - first_step)) if step > first_step else "-"

    def _line(self, first: str, cells: dict[str, str]) -> str:
        rest = "".join(f" {cells.get(title, ''):>{width}}" for title, (width, *_) in self._columns.items())
        return f"{first:>{len(f'train {self.max_steps}/{self.max_steps}')}}{rest}".rstrip()

    def _row(self, split: str, step: int, metrics: Metrics, eta: str = "") -> str:
        cells = {"ETA": eta}
        for title, (_, show, keys) in self._columns.items():
            for name in (key.format(split=split) for key in keys):
                if name in metrics:
                    cells[title] = show(metrics[name])
        digits = len(str(self.max_steps))
        return self._line(f"{split:5} {step:>{digits}}/{self.max_steps}", cells)

    def _print_row(self, row: str) -> None:
        self._print_header()
        self._printed += 1
        self.message(row)

    def _print_header(self) -> None:
        if self._printed % HEADER_INTERVAL == 0:
            self.message(self._line("step", {title: title for title in self._columns}))

    def _show(self, step: int, row: str) -> None:
        if self._progress is None:
            if not self._printed:
                self._print_header()
                self._printed = 1
            one_line = Column(no_wrap=True, overflow="ellipsis")  # a narrow terminal cuts the text
            columns = [TextColumn("{task.description}", markup=False, table_column=one_line)]
            if self._console.width > len(row) + BAR_WIDTH:
                columns.append(BarColumn(bar_width=BAR_WIDTH))
            self._progress = Progress(*columns, console=self._console, auto_refresh=False)
            self._task = self._progress.add_task("", total=self.max_steps)
            self._progress.start()
        self._progress.update(self._task, completed=step, description=row, refresh=True)


def _loss(x: float) -> str:
    return f"{x:.4f}" if x < 1000 else three_digits(x)


# By title: the width of the column, its format of a number, and the metrics to show. A row has at most one of them.
COLUMNS: dict[str, tuple[int, Callable[[float], str], tuple[str, ...]]] = {
    "loss": (8, _loss, ("{split}/loss",)),
    "perplexity": (10, three_digits, ("{split}/perplexity",)),
    "tokens/s": (9, three_digits, ("perf/tokens_per_second",)),
    "TFLOP/s": (8, three_digits, ("perf/tflops",)),
    "MFU": (6, lambda x: f"{x:.1%}", ("perf/mfu",)),
    "peak GiB": (8, three_digits, ("memory/peak_allocated_gib", "memory/peak_rss_gib")),
    "ETA": (9, str, ()),
}
