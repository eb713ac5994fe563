"""Where metrics go: metrics.jsonl always, the console always, wandb when it is on.

Metrics are a flat dict of floats under the names of the README ("train/loss", "perf/mfu", ...), logged against the step
and the tokens seen. Evaluation may come in the same call as training or in one of its own.
"""

import json
import math
import os
import ssl
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http.client import HTTPException
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from data.patience import within
from errors import UserError, described

Metrics = dict[str, float]


def finite(value: float) -> float | None:
    """The value, or None, as JSON has no other, for what is no number."""
    return value if math.isfinite(value) else None


@dataclass
class WandbConfig:
    """Weights & Biases."""

    mode: str = "offline"
    """online: upload while training. offline: write below the output folder, for `wandb sync`. disabled: no wandb."""

    project: str = "gpt2-flash"
    """Project the run belongs to."""

    name: str | None = None
    """Name of the run; None lets wandb invent one."""

    group: str | None = None
    """Group of runs to show together; None is the name of the sweep's folder, or no group outside a sweep."""

    tags: list[str] | None = None
    """Tags to find the run by; None names its attention, model, corpus and precision."""

    entity: str | None = None
    """User or team that owns the project; None is wandb's default for the account."""

    def __post_init__(self) -> None:
        if self.mode not in ("online", "offline", "disabled"):
            raise UserError(f"wandb.mode is {self.mode!r}; set it to online, offline or disabled")
        if not self.project:
            raise UserError("wandb.project is empty; give it a name, or set wandb.mode=disabled")


class Logger:
    """What a logger may do; each does the part that concerns it."""

    def log(self, step: int, tokens: int, metrics: Metrics) -> None:
        """Records metrics after `step` optimizer steps and `tokens` training tokens."""

    def message(self, text: str) -> None:
        """Tells whoever watches the run one line."""

    def close(self, failed: bool = False) -> None:
        """Ends the log, of a run that `failed` or not; a second call does nothing."""


class JsonlLogger(Logger):
    """One JSON object a line: {"step": ..., "tokens": ..., metrics}, on disk as soon as `log` returns.

    Strict JSON: a metric that is NaN or infinite keeps its key and becomes null. An existing file is continued, without
    the torn last line that a killed run may have left. What a full disk refuses is told once through `on_failure`,
    kept, and written with a later row; and that the file was deleted, when it begins anew.
    """

    def __init__(self, path: str | os.PathLike[str], on_failure: Callable[[str], None] = print):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._on_failure = on_failure
        self._file: FileIO | None = None
        self._unwritten = b""
        self.truncate_after(math.inf)

    def truncate_after(self, step: float) -> None:
        """Removes the rows past `step`, which a killed run logged after its last checkpoint; atomic."""
        self.close()
        if self.path.exists():
            kept = [line for line in self.path.read_bytes().splitlines() if _logged_step(line) <= step]
            shorter = self.path.with_name(self.path.name + ".tmp")
            shorter.write_bytes(b"".join(line + b"\n" for line in kept))
            os.replace(shorter, self.path)
        self._file = self.path.open("ab", buffering=0)

    def log(self, step: int, tokens: int, metrics: Metrics) -> None:
        row = {"step": step, "tokens": tokens} | {key: finite(value) for key, value in metrics.items()}
        was_full = bool(self._unwritten)
        self._unwritten += json.dumps(row, allow_nan=False).encode() + b"\n"
        if (reason := self._write()) and not was_full:
            self._on_failure(f"{self.path} cannot be written ({reason}); its rows wait until there is room")

    def _write(self) -> str | None:
        """Writes what is to be written; why the disk refuses."""
        try:
            if (
                self._unwritten and not os.fstat(self._file.fileno()).st_nlink
            ):  # or rows would go where nobody finds them
                self.path.parent.mkdir(parents=True, exist_ok=True)
                deleted, self._file = self._file, self.path.open("ab", buffering=0)
                deleted.close()
                self._on_failure(f"{self.path} was deleted; a new one has the rows from here on")
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            return error.strerror
        return None

    def close(self, failed: bool = False) -> None:
        if self._file and not self._file.closed:
            if reason := self._write():
                rows = self._unwritten.count(b"\n")
                self._on_failure(f"{self.path} lacks its last {rows} rows ({reason}); make room before the next run")
            self._file.close()


def _logged_step(line: bytes) -> float:
    """The step of a row; NaN, which compares as false with everything, where the line is torn."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.nan


class Pace:
    """Seconds per step over the last `window` marks, evaluation and saving between them included.

    The first mark starts the clock, so whatever came before it, the compiling first step among it, is not counted.
    """

    def __init__(self, window: int = 100, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._marks: deque[tuple[int, float]] = deque(maxlen=window)

    def mark(self, step: int) -> None:
        """Notes that `step` is reached now."""
        self._marks.append((step, self._clock()))

    def seconds_for(self, steps: int) -> float | None:
        """How long that many steps will take; None before two different steps are marked."""
        if not self._marks:
            return None
        (first_step, began), (last_step, now) = self._marks[0], self._marks[-1]
        if last_step == first_step:
            return None
        return steps * (now - began) / (last_step - first_step)


class _Screen(Console):
    def on_broken_pipe(self) -> None:
        """Training goes on where nobody reads any more what it says: rich would end the process."""
        self.quiet = True
        with open(os.devnull, "w") as nothing:  # for what Python would flush at the end
            os.dup2(nothing.fileno(), 1)


class ConsoleLogger(Logger):
    """A live progress line on a terminal, one plain line per call of `log` elsewhere.

    Messages and evaluations stand above the live line. `clock` returns seconds, for the ETA. What stdout cannot take, a
    file on a full disk, a pipe without a reader or a terminal that is closed, is lost: training does not stop for it.
    """

    def __init__(self, max_steps: int, *, console: Console | None = None, clock: Callable[[], float] = time.monotonic):
        self.max_steps = max_steps
        self._console = console or _Screen()
        self._pace = Pace(clock=clock)
        self._progress: Progress | None = None

    def log(self, step: int, tokens: int, metrics: Metrics) -> None:
        self._pace.mark(step)
        where = f"step {step:>{len(str(self.max_steps))}}/{self.max_steps}"
        if "val/loss" in metrics:
            self.message("  ".join([where, *_evaluation_fields(metrics)]))
        if "train/loss" in metrics:
            eta = f"ETA {_hours(self._pace.seconds_for(self.max_steps - step))}"
            if self._console.is_interactive:
                with suppress(OSError):
                    self._show(step, "  ".join([where, eta, *_training_fields(metrics)]))
            else:
                self.message("  ".join([where, *_training_fields(metrics), eta]))

    def message(self, text: str) -> None:
        with suppress(OSError):
            self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def close(self, failed: bool = False) -> None:
        if self._progress:
            with suppress(OSError):
                self._progress.stop()
            self._progress = None

    def _show(self, step: int, text: str) -> None:
        if self._progress is None:
            bar = BarColumn(bar_width=16, table_column=Column(width=16))
            one_line = Column(no_wrap=True, overflow="ellipsis")  # a narrow terminal cuts the text, not the bar
            fields = TextColumn("{task.description}", markup=False, table_column=one_line)
            self._progress = Progress(bar, fields, console=self._console, auto_refresh=False)
            self._task = self._progress.add_task("", total=self.max_steps)
            self._progress.start()
        self._progress.update(self._task, completed=step, description=text, refresh=True)


def _training_fields(metrics: Metrics) -> list[str]:
    formats = {
        "train/loss": lambda x: f"loss {x:6.3f}",
        "train/perplexity": lambda x: f"ppl {_short(x):>7}",
        "train/lr": lambda x: f"lr {x:.1e}",
        "perf/tokens_per_second": lambda x: f"{_thousands(x):>4} tok/s",
        "perf/tflops": lambda x: f"{x:4.0f} TFLOP/s" if x >= 10 else f"{x:.2f} TFLOP/s",
        "perf/mfu": lambda x: f"MFU {x:3.0%}",
        "memory/peak_allocated_gib": lambda x: f"{x:5.1f} GiB",
        "memory/peak_rss_gib": lambda x: f"{x:5.1f} GiB",
    }
    return [show(metrics[key]) for key, show in formats.items() if key in metrics]


def _evaluation_fields(metrics: Metrics) -> list[str]:
    fields = [f"val loss {metrics['val/loss']:6.3f}"]
    if "val/perplexity" in metrics:
        fields.append(f"val ppl {_short(metrics['val/perplexity']):>7}")
    return fields


def _short(perplexity: float) -> str:
    return f"{perplexity:.1f}" if perplexity < 1e6 else f"{perplexity:.1e}"


def _thousands(x: float) -> str:
    for size, suffix in ((1e6, "M"), (1e3, "k")):
        if x >= size:
            return f"{x / size:.0f}{suffix}" if x >= 10 * size else f"{x / size:.1f}{suffix}"
    return f"{x:.0f}"


def _hours(seconds: float | None) -> str:
    if seconds is None:
        return "-:--:--"
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{s:02}"


class WandbLogger(Logger):
    """The same metrics in wandb, plotted against tokens, with step beside it; files below `folder`, never elsewhere.

    A failure to start raises UserError, within 15 seconds. A failure later never stops training: it is told once
    through `on_failure`, and wandb is off from then on.
    """

    def __init__(
        self,
        config: WandbConfig,
        run_config: dict[str, Any],
        folder: str | os.PathLike[str],
        on_failure: Callable[[str], None] = print,
    ):
        self._on_failure, self._folder = on_failure, Path(folder)
        self._run = None if config.mode == "disabled" else _start_wandb_run(config, run_config, Path(folder))

    def log(self, step: int, tokens: int, metrics: Metrics) -> None:
        self._attempt(lambda run: run.log({"step": step, "tokens": tokens} | metrics, step=step))

    def close(self, failed: bool = False) -> None:
        self._attempt(lambda run: run.finish(exit_code=int(failed)))
        self._run = None

    def _attempt(self, action: Callable[[Any], None]) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:
            failed, self._run = self._run, None
            self._on_failure(
                f"wandb failed and is off from here on; metrics.jsonl goes on ({described(error)}); what it has not "
                f"sent, wandb sync {self._folder}/wandb/*run-* sends"
            )
            _let_go(failed)


# Left to itself wandb takes up to 90 s to start and any time at all to finish.
REACH_TIMEOUT_S = 4.0
INIT_TIMEOUT_S = 7.0
FINISH_TIMEOUT_S = 60.0


def _let_go(run: Any) -> None:
    """Ends a run that failed, and wandb's process, if that takes no long: the next job of a sweep would get them."""
    import wandb  # as in _start_wandb_run

    for end in (lambda: run.finish(exit_code=1), wandb.teardown):
        with suppress(Exception):
            within(REACH_TIMEOUT_S, end)


def _start_wandb_run(config: WandbConfig, run_config: dict[str, Any], folder: Path) -> Any:
    import wandb  # here and not above: a run without wandb does not pay for its import

    folder.mkdir(parents=True, exist_ok=True)  # wandb writes elsewhere, with a warning, when it is missing
    try:
        settings = wandb.Settings(
            mode=config.mode,
            root_dir=str(folder),
            silent=True,
            console="off",
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
            finish_timeout_raises=True,
        )
        if config.mode == "online" and (problem := server_problem(settings)):
            raise UserError(f"wandb.mode=online finds {problem}, or set wandb.mode=offline")
        run = wandb.init(
            project=config.project,
            name=config.name,
            group=config.group,
            tags=config.tags,
            entity=config.entity,
            config=run_config,
            settings=settings,
        )
        run.define_metric("tokens")
        run.define_metric("step")
        run.define_metric("*", step_metric="tokens")
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"wandb.mode={config.mode} could not start a run ({described(error)}); mend that, "
            f"or set wandb.mode={'offline' if config.mode == 'online' else 'disabled'}"
        ) from error
    return run


def server_problem(settings: Any) -> str | None:
    """What is missing to use the server of these wandb.Settings, and the remedy; None if nothing is.

    Left to itself wandb would prompt for credentials, and wait for a server.
    """
    import wandb  # as in _start_wandb_run

    server = wandb.setup(settings).settings.base_url
    if not wandb.login(prompt=False, verify=False):
        return f"no credentials for {server}; run `wandb login` or set WANDB_API_KEY"
    if not _answers(server):
        return f"no answer from {server}; mend the network, the proxy or WANDB_BASE_URL"
    return None


def _answers(server: str) -> bool:
    """Whether anything speaks HTTP at that URL, through the environment's proxy if it names one."""
    try:
        ask = Request(server, method="HEAD")
        within(REACH_TIMEOUT_S, lambda: urlopen(ask, timeout=REACH_TIMEOUT_S).close())
    except HTTPError:
        return True  # an error status is an answer
    except URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # wandb has certificates of its own; let it judge
    except (OSError, ValueError, HTTPException):  # a ValueError is of a URL that is none
        return False
    return True


class Loggers:
    """Passes everything on to each of its loggers; none of them, and nothing happens."""

    def __init__(self, loggers: list[Logger]):
        self._loggers = loggers

    def log(self, step: int, tokens: int, metrics: Metrics) -> None:
        """Records metrics after `step` optimizer steps and `tokens` training tokens."""
        for logger in self._loggers:
            logger.log(step, tokens, metrics)

    def message(self, text: str) -> None:
        """Tells whoever watches the run one line."""
        for logger in self._loggers:
            logger.message(text)

    def close(self, failed: bool = False) -> None:
        """Closes each logger, the last first, even where another raises; a second call does nothing."""
        with ExitStack() as stack:
            for logger in self._loggers:
                stack.callback(logger.close, failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close(failed=kind is not None)


def start_loggers(
    folder: str | os.PathLike[str],
    *,
    max_steps: int,
    wandb: WandbConfig,
    run_config: dict[str, Any],
    resumed_step: int | None = None,
    console: Console | None = None,
) -> Loggers:
    """The loggers of a run that writes to `folder`: metrics.jsonl, the console, and wandb unless disabled.

    `run_config` is the composed config as plain values. A run resumed at `resumed_step` continues metrics.jsonl after
    that step; a new one in an old folder (None) keeps the old file as metrics.previous.jsonl. UserError when wandb
    cannot start, before any file is touched.
    """
    screen = ConsoleLogger(max_steps, console=console)
    remote = WandbLogger(wandb, run_config, folder, on_failure=screen.message)
    path = Path(folder) / "metrics.jsonl"
    try:
        if resumed_step is None and path.exists():
            path.replace(path.with_name("metrics.previous.jsonl"))
        rows = JsonlLogger(path, on_failure=screen.message)
        if resumed_step is not None:
            rows.truncate_after(resumed_step)
    except OSError:
        remote.close(failed=True)
        raise
    # The last is closed first, so that what wandb has to say at its end still finds the console.
    return Loggers([rows, screen, remote])
