"""Measures tables: each cell in a process of its own, the results written after each, and resumed."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from bench.attention.charts import save
from bench.common.results import ROOT, check_same, environment, read_results, results_folder, write
from bench.paper import blocks, gpt2, gpt2_context, gpt3, io, kernels, memory, scaling
from bench.paper.config import PaperConfig
from errors import UserError

TABLES = {
    "gpt2": gpt2,
    "gpt2_context": gpt2_context,
    "gpt3": gpt3,
    "kernels": kernels,
    "memory": memory,
    "io": io,
    "blocks": blocks,
    "scaling": scaling,
}
SMOKE_FOLDER = Path("outputs/paper-smoke")
SHORT = 40  # lines of a table that is shown when it is done
PERIOD_S = 3600  # over which the speed of the cells is averaged for the time that remains


def run(config: PaperConfig) -> None:
    """Measures what is missing of the tables that `config` asks for, and writes and draws them all.

    Raises:
        UserError: an unknown table, no GPU to measure, or results that were measured elsewhere or cannot be read.
        SystemExit: after Ctrl-C, SIGTERM or SIGHUP, with status 130; at the end, with status 1, if cells failed.
    """
    names, commit = chosen_tables(config), environment()["commit"]
    folder = destination(config)
    check_writable(folder, names)
    if not config.resume:
        set_aside([folder / f"paper-{name}.json" for name in names])
    results = {name: begin(folder / f"paper-{name}.json", config) for name in names}
    pending = {name: missing(TABLES[name].cells(config), results[name]["rows"]) for name in names}
    times = MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn
    columns = [BarColumn(20), *(column(table_column=Column(no_wrap=True)) for column in times)]
    # A narrow terminal cuts the cell's name, not the time left.
    columns.append(TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)))
    with stopping(folder), Progress(*columns, expand=True, speed_estimate_period=PERIOD_S) as progress:
        say = partial(progress.console.print, highlight=False, soft_wrap=True)
        task = progress.add_task("bench.paper", total=sum(map(len, pending.values())))
        for name in names:
            try:
                for cell in pending[name]:
                    progress.update(task, description=f"{name}: {text_of(cell)}")
                    started = time.monotonic()
                    rows = [{**row, "commit": commit} for row in measure(name, cell, config)]
                    replace(results[name]["rows"], cell, rows)
                    write(folder / f"paper-{name}.json", results[name])
                    seconds = time.monotonic() - started
                    progress.advance(task)
                    ahead = time_left(progress.tasks[task])  # a log has no bar that tells it
                    say(f"{name}: {text_of(cell)}: {outcome(rows)} ({seconds:.0f} s{ahead})")
            finally:  # however it ends, the pages are those of the results
                if results[name]["rows"]:
                    publish(name, results[name], folder)
            if (made := TABLES[name].markdown(results[name]["rows"])).count("\n") <= SHORT:
                say(f"\n{made}\n", markup=False)
            say(f"{name}: written to {folder / f'paper-{name}'}.*")
    if failed := sum(row["status"] == "failed" for name in names for row in results[name]["rows"]):
        print(f"{failed} of the rows failed; without resume=false the same command tries them again", file=sys.stderr)
        sys.exit(1)


def time_left(task: Task) -> str:
    """What the cells that remain take, if they take as long as those before; nothing at the end."""
    minutes = task.elapsed / task.completed * task.remaining / 60
    return f", some {math.ceil(minutes)} min left" if task.remaining else ""


def set_aside(files: list[Path]) -> None:
    """All of them at once, so that what is measured anew is resumed, if it is interrupted, as any other."""
    for file in filter(Path.is_file, files):
        file.replace(file.with_name(f"{file.name}.old"))


@contextmanager
def stopping(folder: Path) -> Iterator[None]:
    """Around the measuring: Ctrl-C, SIGTERM and a terminal that is closed end it with a sentence."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        if before[number] != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        where = f"the cells done are in {folder}, and without resume=false the same command goes on from there"
        print(f"interrupted; {where}", file=sys.stderr)
        sys.exit(130)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def chosen_tables(config: PaperConfig) -> list[str]:
    """The names of the tables asked for."""
    if config.table != "all" and config.table not in TABLES:
        raise UserError(f"table={config.table} is unknown; choose one of {', '.join(TABLES)}, or all")
    return list(TABLES) if config.table == "all" else [config.table]


def destination(config: PaperConfig) -> Path:
    """The folder of the results."""
    if config.size == "smoke":
        return SMOKE_FOLDER
    if not torch.cuda.is_available():
        raise UserError("size=full measures a GPU, and torch finds none; size=smoke runs everywhere")
    return results_folder(config.gpu)


def check_writable(folder: Path, names: list[str]) -> None:
    """UserError where the results could not be written, before any is measured."""
    remedy = "mend that, or move it away"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}, where the results go, cannot be made ({error.strerror}); {remedy}") from error
    files = [path for name in names for path in folder.glob(f"paper-{name}[.-]*")]
    for path in (folder, *files):
        if path.is_file() == (path == folder) or not os.access(path, os.W_OK):
            raise UserError(f"{path}, where results go, cannot be written; {remedy}")


def read_table(path: Path) -> dict:
    """The results of a table from its file, of which its page can be made.

    Raises:
        UserError: they cannot be read, or bench.paper did not write them so.
    """
    results = read_results(path)
    try:
        if not {row["status"] for row in results["rows"]} <= {"ok", "oom", "failed"}:
            raise ValueError("a row has no status that there is")
        page(path.stem.removeprefix("paper-"), results)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{path} is not as bench.paper wrote it ({why}); put it back, or resume=false measures all anew"
        ) from error
    return results


def begin(path: Path, config: PaperConfig) -> dict:
    """The results that a file holds, or new ones.

    Raises:
        UserError: they cannot be read, or were measured on another machine, with other versions or, unless any_commit
            is set, at another commit.
    """
    here = environment()
    if not path.is_file():
        return {"environment": here, "size": config.size, "rows": []}
    results = read_table(path)
    remedy = "resume=false measures all anew, and any_commit=true adds to results of another commit"
    check_same(results["environment"], here, path, remedy, config.any_commit)
    return results


def belongs(row: dict, cell: dict) -> bool:
    """Whether a row is of a cell."""
    return all(key in row and row[key] == value for key, value in cell.items())


def missing(cells: list[dict], rows: list[dict]) -> list[dict]:
    """The cells without rows, and those that failed, which may have been for a reason that has gone."""

    def is_done(cell: dict) -> bool:
        statuses = [row["status"] for row in rows if belongs(row, cell)]
        return bool(statuses) and "failed" not in statuses

    return [cell for cell in cells if not is_done(cell)]


def replace(rows: list[dict], cell: dict, new: list[dict]) -> None:
    """Puts the new rows of a cell in the place of those it had."""
    rows[:] = [row for row in rows if not belongs(row, cell)] + new


def measure(table: str, cell: dict, config: PaperConfig) -> list[dict]:
    """The rows of a cell from a process of its own; what ends it becomes a row, after those that it had measured."""
    command = [sys.executable, "-m", "bench.paper.cell", table]
    given = json.dumps({"cell": cell, "config": asdict(absolute(config))})
    on_cpu = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}  # kernels run in the interpreter, and shapes are tiny
    variables = os.environ | ({} if torch.cuda.is_available() else on_cpu)
    try:
        ended = run_group(command, input=given, timeout=config.timeout_s, env=variables)
    except subprocess.TimeoutExpired as late:
        out, message = late.stdout, f"not done within timeout_s={config.timeout_s}"
    else:
        out, message = ended.stdout, reason(ended)
    rows = [json.loads(line) for line in out.splitlines()]
    return rows + ([{**cell, "status": "failed", "message": message}] if message else [])


def run_group(
    command: list[str], *, input: str, timeout: float, env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Runs a command at the project's root, in a group of its own: what ends it early ends all that it has started.

    Raises:
        subprocess.TimeoutExpired: it took longer; with what it had printed.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=ROOT, env=env, text=True, start_new_session=True, **pipes)
    try:
        out, err = process.communicate(input, timeout)
    except BaseException as error:
        with suppress(ProcessLookupError):  # it may have ended by now
            os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            error.output = out
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def absolute(config: PaperConfig) -> PaperConfig:
    """With paths that hold in any working directory."""
    paths = {key: str(Path(path).absolute()) for key in ("tokens", "fa3_library") if (path := getattr(config, key))}
    return PaperConfig(**asdict(config) | paths)


def reason(ended: subprocess.CompletedProcess) -> str | None:
    """Why a process failed, in a line; None if it did not."""
    if ended.returncode < 0:
        return f"the process was killed by signal {-ended.returncode}"
    last = ended.stderr.strip().splitlines()[-1:] or [f"the process ended with status {ended.returncode}"]
    return last[0] if ended.returncode else None


def text_of(row: dict) -> str:
    """A cell, or a row that failed, in words."""
    known = {
        key: value for key, value in row.items() if value is not None and key not in ("status", "message", "commit")
    }
    what = ", ".join(f"{key} {value}" for key, value in known.items())
    return f"{what}: {row['message']}" if row.get("message") else what


def outcome(rows: list[dict]) -> str:
    """How often each status came out, and what the failures say."""
    statuses = [row["status"] for row in rows]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    messages = dict.fromkeys(row["message"] for row in rows if row.get("message"))
    return "; ".join([counts, *messages])


def publish(name: str, results: dict, folder: Path) -> None:
    """Writes a table's Markdown and its pictures beside its results."""
    (folder / f"paper-{name}.md").write_text(page(name, results))
    pictures: dict[str, Figure] = TABLES[name].pictures(results["rows"], device_of(results))
    for ending, figure in pictures.items():
        for suffix in ("png", "svg"):
            save(figure, folder / f"paper-{name}{ending}.{suffix}", results["rows"])


def page(name: str, results: dict) -> str:
    """A table's Markdown: headline, table, failures, and on what it was measured."""
    table, rows, where = TABLES[name], results["rows"], results["environment"]
    failures = dict.fromkeys(f"- {text_of(row)}" for row in rows if row["status"] == "failed")
    parts = [f"# {table.TITLE}", table.markdown(rows)]
    parts += ["Failed:\n\n" + "\n".join(failures)] if failures else []
    warning = "Sizes of a smoke run, which say nothing of speed. " if results["size"] == "smoke" else ""
    versions = f"torch {where['torch']}, Triton {where['triton']}, {commits_of(results)}"
    return "\n\n".join([*parts, f"{warning}Measured on {device_of(results)} ({versions})."]) + "\n"


def commits_of(results: dict) -> str:
    """The commit that was measured and the day, or how many rows, of what, each commit has and the day of the first."""
    first, day = results["environment"]["commit"], results["environment"]["date"]
    counts = Counter((row.get("commit", first)[:12], row.get("measured")) for row in results["rows"])
    commits = {commit for commit, _ in counts}
    if len(commits) < 2:
        return f"commit {min(commits, default=first[:12])}, {day}"
    rows = (
        f"{commit} ({count} row{'s' * (count > 1)}{f' of {measured}' if measured else ''})"
        for (commit, measured), count in counts.items()
    )
    return f"commits {', '.join(rows)}, since {day}"


def device_of(results: dict) -> str:
    """What the results were measured on."""
    return results["environment"]["gpu"] or "a CPU"
