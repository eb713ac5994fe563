"""Measure train.py's steps on 1, 2, 4 and 8 GPUs of one machine.

The micro-batch of each GPU stays the same, so the work grows with the number of GPUs. For each row torchrun starts the
processes, which take train.py's own steps on random tokens. `linear` is the speed relative to one GPU's speed times the
number of GPUs. `peak_gib` is the first GPU's.

Example: python -m bench.scaling cells=[gpt2_1k_ddp] gpus=[1,8]
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from bench.common.command_line import check_choice, check_output_file, check_positive, launch
from bench.common.console import print_rows
from bench.common.results import ROOT, environment, results_folder, set_aside, write
from bench.common.timing import Cpu, Gpu
from bench.training.steps import complete
from bench.training.trainers import Trainer, TrainingCell, ours
from errors import UserError
from trainer.distributed.world import World, join
from trainer.meters import GIB

ATTENTION = "flash2"
TIMEOUT_S = 600
PROCESS = "BENCH_SCALING_PROCESS"  # environment variable: the cell and the settings of a row, for its processes
COLUMNS = {
    "model": "{model}",
    "context": "{context_length:,}",
    "batch": "{batch_size:d}",
    "parallel": "{parallel}",
    "GPUs": "{gpus:d}",
    "tokens/s": "{tokens_per_second:,.0f}",
    "of linear": "{linear:.1%}",
    "TFLOP/s": "{tflops:.3g}",
    "GiB": "{peak_gib:.1f}",
    "status": "{status}",
}


@dataclass(frozen=True)
class ScalingCell:
    """A model at a context length and a micro-batch, and how processes share the model."""

    model: str
    context_length: int
    batch_size: int
    parallel: str

    @property
    def name(self) -> str:
        return f"{self.model}_{self.context_length // 1024}k_{self.parallel}"


CELLS = {
    cell.name: cell
    for cell in (
        ScalingCell("gpt2", 1024, 128, "ddp"),
        ScalingCell("gpt3-1.3b", 2048, 16, "ddp"),
        ScalingCell("gpt3-1.3b", 2048, 16, "fsdp"),
        ScalingCell("gpt3-2.7b", 8192, 2, "fsdp"),
        ScalingCell("gpt3-2.7b", 8192, 2, "ddp"),
    )
}


@dataclass
class ScalingSettings:
    """What `python -m bench.scaling` reads."""

    cells: list[str] | None = None
    """Measure only these cells, for example [gpt2_1k_ddp]. An unknown name prints all of them."""
    gpus: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    """Numbers of GPUs."""
    batch: int | None = None
    """Micro-batch of each GPU, instead of the cell's."""
    steps: int = 10
    """Steps of a sample."""
    rounds: int = 5
    """Samples of a row."""
    device: str = "cuda"
    """cuda, or cpu to try the benchmark without a GPU."""
    out: Path | None = None
    """File to write. null writes scaling.json in bench/results, in a folder such as h200x8, but only if all cells are
    measured on 1 GPU and more with their own micro-batches. The old file is renamed to *.json.old at the start."""

    def __post_init__(self):
        check_positive(self, "gpus", "batch", "steps", "rounds", most=2**20)
        check_output_file("out", self.out)
        check_choice("device", self.device, ("cuda", "cpu"))
        check_choice("cells", self.cells, CELLS)
        if self.device == "cpu" and not self.out:
            raise UserError("device=cpu writes no published results; add out=FILE")
        if self.device == "cuda" and max(self.gpus) > (seen := torch.cuda.device_count()):
            raise UserError(f"gpus={max(self.gpus)} exceeds the {seen} GPUs that torch sees; use fewer, or device=cpu")

    def is_partial(self) -> bool:
        """Return whether the results are incomplete and must not replace the published ones."""
        return bool(self.cells or self.batch or 1 not in self.gpus or len(self.gpus) < 2)


def run(settings: ScalingSettings) -> None:
    """Measure the cells and write the results after each row."""
    is_published = not (settings.out or settings.is_partial())
    out = Path(f"{results_folder()}x{max(settings.gpus)}/scaling.json") if is_published else settings.out
    if out:
        set_aside(out)
    results = {"environment": environment(), "rows": []}
    for name in settings.cells or CELLS:
        cell, rows = replace(CELLS[name], batch_size=settings.batch or CELLS[name].batch_size), []
        for gpus in settings.gpus:
            rows.append(row := row_of(cell, gpus, settings))
            results["rows"].append(row)
            add_linear(rows)
            if out:
                write(out, results)
            speed = f"{row['tokens_per_second']:,.0f} tokens/s" if row["status"] == "ok" else row["message"]
            print(f"{cell.name} on {gpus}: {row['status']}, {speed}", flush=True)
    print_rows("training on several GPUs", results["rows"], COLUMNS)
    if out:
        print(f"written to {out}")


def row_of(cell: ScalingCell, gpus: int, settings: ScalingSettings) -> dict:
    """Start the processes that measure a row and return the row. Its status is ok, oom or failed."""
    row = {"trainer": "ours", **asdict(cell), "attention": ATTENTION, "compiled": settings.device == "cuda"}
    results = "tokens_per_second", "tflops", "mfu", "peak_gib", "first_step_s", "linear", "message"
    row |= {"gpus": gpus} | dict.fromkeys(results)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]
    command += ["-m", "bench.scaling"]
    with tempfile.NamedTemporaryFile() as out:
        given = [asdict(cell), settings.steps, settings.rounds, settings.device, out.name]
        variables = os.environ | {"OMP_NUM_THREADS": "1", PROCESS: json.dumps(given)}
        ended = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
        if ended.returncode == 0:
            return row | json.loads(Path(out.name).read_text())
    return row | {"status": "oom" if "OutOfMemoryError" in ended.stderr else "failed", "message": cause(ended.stderr)}


def cause(stderr: str) -> str:
    """Return the first line that names an error."""
    error = re.search(r"^(\[rank\d+\]: *)?([\w.]+Error|error):.*", stderr, re.MULTILINE)
    return error[0] if error else "the processes printed no error"


def add_linear(rows: list[dict]) -> None:
    """Fill in `linear` of the rows of a cell, if one GPU was measured."""
    one = next((row["tokens_per_second"] for row in rows if row["gpus"] == 1), None)
    for row in rows:
        row["linear"] = row["tokens_per_second"] / (row["gpus"] * one) if one and row["tokens_per_second"] else None


def take_steps(fields: dict, steps: int, rounds: int, device: str, out: str) -> None:
    """Measure the cell with these fields in one of the processes of a row. The first process writes the results."""
    cell = ScalingCell(**fields)
    with join(None if cell.parallel == "ddp" else cell.parallel, device, TIMEOUT_S) as world:
        measured = measure(cell, steps, rounds, device, world)
        if world.is_first:
            Path(out).write_text(json.dumps(measured))


def measure(cell: ScalingCell, steps: int, rounds: int, device: str, world: World) -> dict:
    """Return the seconds of the first step, and the medians of `rounds` windows of `steps` steps each."""
    trained, batch = TrainingCell(cell.model, cell.context_length, (cell.batch_size,)), cell.batch_size
    job = ours(trained, Trainer("ours", ATTENTION, device == "cuda"), device, world=world)
    step, gpu = partial(job.step, batch), Gpu() if device == "cuda" else Cpu()
    row = {"batch_size": batch, "first_step_s": gpu.milliseconds(step, 1, spin_ms=0) / 1000}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()  # leaves out compilation
    step()  # may capture CUDA graphs
    all_ms = [gpu.milliseconds(step, steps, spin_ms=0) for _ in range(rounds)]
    complete(row, trained, statistics.median(all_ms))
    row["tokens_per_second"] *= world.size
    row["samples"] = [1000 * world.size * batch * cell.context_length / ms for ms in all_ms]
    row["peak_gib"] = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else None
    return row


if __name__ == "__main__":
    if PROCESS in os.environ:
        take_steps(*json.loads(os.environ[PROCESS]))
    else:
        launch(run, ScalingSettings)
