"""Measure the tables and figures of the FlashAttention papers on this machine.

Tables (table=NAME, or table=all):
  gpt2            FlashAttention, table 2: training GPT-2 small and medium with each attention
  gpt2_context    FlashAttention, table 4: GPT-2 small at contexts of 1k, 2k and 4k
  gpt3            FlashAttention-2, table 1: training GPT-3 1.3B and 2.7B at contexts of 2k and 8k
  bert            FlashAttention, table 1: a training step of BERT-large, padded and unpadded
  kernels         FlashAttention-2, figures 4 to 7: attention alone, speed against sequence length
  memory          peak memory against sequence length, fitted by a n and by b n^2
  io              bytes to and from HBM: counted, and measured if Nsight Compute's ncu is installed
  blocks          flash2's forward kernel over its tile sizes: time, registers, shared memory, resident blocks
  scaling         time against length, heads and batch for the grids of flash1 and flash2
  fusion          the steps of attention in five kernels, compiled by torch, and in one kernel
  hierarchy       size and bandwidth of HBM, L2 and shared memory
  softmax         safe softmax in three passes and online softmax in two, against the length
  ladder          each step of kernels/ladder beside the step before it: speed, resources, counters, training
  lra             FlashAttention, tables 3 and 6: attentions on Long Range Arena, steps and accuracies
  approximate     FlashAttention, figure 3: time and memory of approximate attentions against the length

Examples:
  python -m bench.paper table=gpt2 tokens=tokens/openwebtext
  python -m bench.paper size=smoke

Each cell of a table runs in a process of its own. The results are written after each cell, and the same command
continues an interrupted run.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from bench.common.command_line import check_output_file
from bench.common.results import ROOT, environment, read_results, results_folder, set_aside, write
from bench.paper.pages import description, page, publish
from bench.paper.settings import PaperSettings
from bench.paper.tables import TABLES, load_table
from errors import UserError

SMOKE_FOLDER = Path("outputs/paper-smoke")


def run(settings: PaperSettings) -> None:
    """Measure the missing cells of the chosen tables, and write the page and the pictures of each.

    Exit with status 1 if cells failed.
    """
    if settings.size == "full" and not torch.cuda.is_available():
        raise UserError("size=full finds no GPU; use size=smoke")
    folder = SMOKE_FOLDER if settings.size == "smoke" else results_folder()
    commit = environment()["commit"]
    names = list(TABLES) if settings.table == "all" else [settings.table]
    files = {name: folder / f"paper-{name}.json" for name in names}
    if not settings.resume:  # an interrupted run with resume=false must itself be continued, so rename before measuring
        for file in files.values():
            set_aside(file)
    results = {name: begin(file, settings) for name, file in files.items()}
    cells = {name: load_table(name).cells(settings) for name in names}
    pending = {name: missing(cells[name], results[name]["rows"]) for name in names}
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, so that the cell's process ends too
    for name in names:
        try:
            for number, cell in enumerate(pending[name], start=1):
                started = time.monotonic()
                rows = [{**row, "commit": commit} for row in measure(name, cell, settings)]
                results[name]["rows"] = [row for row in results[name]["rows"] if not belongs(row, cell)] + rows
                write(files[name], results[name])
                done = f"{number} of {len(pending[name])}, {time.monotonic() - started:.0f} s"
                print(f"{name}: {description(cell)}: {outcome(rows)} ({done})", flush=True)
        except KeyboardInterrupt:
            print(f"the measured cells are in {folder}; {settings.same_command} continues")
            raise
        finally:  # the page must show the results, even of an interrupted run
            if results[name]["rows"]:
                publish(name, results[name], folder)
        print(f"\n{page(name, results[name])}\n{name}: written to {folder}/paper-{name}.*")
    if failed := sum(len(failures(cells[name], results[name]["rows"])) for name in names):
        print(f"{failed} cells failed; {settings.same_command} tries them again", file=sys.stderr)
        sys.exit(1)


def begin(path: Path, settings: PaperSettings) -> dict:
    """Return the results in a file, which must come from this machine and these versions, or new ones without rows."""
    check_output_file("results", path)
    here = environment()
    if not path.is_file():
        return {"environment": here, "size": settings.size, "rows": []}
    results = read_results(path)
    then = results["environment"]
    for key in ("gpu", "driver", "torch", "triton", *([] if settings.any_commit else ["commit"])):
        if then.get(key) != here[key]:
            raise UserError(
                f"{path} has {key} {then.get(key)}, not {here[key]}; measure all again with resume=false, or add to "
                "results of another commit with any_commit=true"
            )
    return results


def belongs(row: dict, cell: dict) -> bool:
    return all(key in row and row[key] == value for key, value in cell.items())


def missing(cells: list[dict], rows: list[dict]) -> list[dict]:
    """Return the cells without rows and the cells that failed, because the reason may be gone."""
    failed = failures(cells, rows)
    return [cell for cell in cells if cell in failed or not any(belongs(row, cell) for row in rows)]


def failures(cells: list[dict], rows: list[dict]) -> list[dict]:
    """Return the cells with a failed row. The rows of other cells, which the settings leave out, do not count."""
    failed = [row for row in rows if row["status"] == "failed"]
    return [cell for cell in cells if any(belongs(row, cell) for row in failed)]


def measure(table: str, cell: dict, settings: PaperSettings) -> list[dict]:
    """Measure a cell in a process of its own and return its rows. A failure of the process adds a row."""
    given = json.dumps({"cell": cell, "settings": asdict(settings)})
    # Otherwise a cell can run out of memory although enough memory is free, but in pieces.
    allocator = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    on_cpu = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}  # the shapes are tiny
    variables = allocator | os.environ | ({} if torch.cuda.is_available() else on_cpu)
    command = [sys.executable, "-m", "bench.paper.worker", table]
    options = {"cwd": ROOT, "env": variables, "capture_output": True, "timeout": settings.timeout_s}
    try:
        ended = subprocess.run(command, input=given.encode(), **options)
        out, message = ended.stdout, reason(ended)
    except subprocess.TimeoutExpired as late:
        out, message = late.stdout or b"", f"not done within timeout_s={settings.timeout_s}"
    rows = [json.loads(line) for line in out.splitlines()]
    return rows + ([{**cell, "status": "failed", "message": message}] if message else [])


def reason(ended: subprocess.CompletedProcess) -> str | None:
    """Return in one line why a process failed, or None if it did not fail."""
    if ended.returncode < 0:
        return f"the process was killed by signal {-ended.returncode}"
    last = ended.stderr.decode().strip().splitlines()[-1:] or [f"the process ended with status {ended.returncode}"]
    return last[0] if ended.returncode else None


def outcome(rows: list[dict]) -> str:
    """Return the number of rows of each status, and the messages of failures."""
    statuses = [row["status"] for row in rows]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    messages = dict.fromkeys(row["message"] for row in rows if row.get("message"))
    return "; ".join([counts, *messages])
