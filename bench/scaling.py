"""Training steps on 1, 2, 4 and 8 GPUs of one machine: python -m bench.scaling --help.

The micro-batch of each GPU stays, so that the work grows with their number. torchrun starts this module anew for every
row: each process takes train.py's own steps on random tokens, and the first of them times them, by the clock of
training, from the third on. `linear` is the speed over that of one GPU times their number, where ddp's one GPU trains
without it, as train.py does; `peak_gib` is the first GPU's. With --checkpoints one is saved at the end: `stall_s` is
what a step waits for it, `saved_s` what passes until it is whole.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from rich.console import Console
from rich.table import Table

from bench.common.command_line import output_file, positive, sizes
from bench.common.results import ROOT, begin, results_folder, write
from bench.training.trainers import DTYPE, Cell, Job, Trainer, ours
from errors import UserError, refusing
from model.attention import AttentionConfig
from trainer.checkpoint import CheckpointConfig
from trainer.distributed.world import World, join
from trainer.parts import build_meter, open_checkpoints
from trainer.precision import Compute

TIMEOUT_S = 600
PIPES = {"capture_output": True, "text": True}


@dataclass(frozen=True)
class Scaling:
    """A model at a context length and a micro-batch, and how processes share it."""

    cell: Cell
    parallel: str

    @property
    def name(self) -> str:
        return f"{self.cell.name}_{self.parallel}"

    def __str__(self) -> str:
        return f"{self.cell.model}:{self.cell.context_length}:{self.cell.batches[0]}:{self.parallel}"

    @classmethod
    def read(cls, text: str) -> Self:
        """What str wrote."""
        model, context_length, batch, parallel = text.split(":")
        return cls(Cell(model, int(context_length), (int(batch),)), parallel)


CELLS = {
    scaling.name: scaling
    for scaling in (
        Scaling(Cell("gpt2", 1024, (128,)), "ddp"),
        Scaling(Cell("gpt3-1.3b", 2048, (16,)), "ddp"),
        Scaling(Cell("gpt3-1.3b", 2048, (16,)), "fsdp"),
        Scaling(Cell("gpt3-2.7b", 8192, (2,)), "fsdp"),
        Scaling(Cell("gpt3-2.7b", 8192, (2,)), "ddp"),
    )
}


def take_steps(scaling: Scaling, arguments: argparse.Namespace) -> None:
    """One of the processes of a row; the first writes what it measured."""
    with join(None if scaling.parallel == "ddp" else scaling.parallel, arguments.device, TIMEOUT_S) as world:
        measured = measure(scaling.cell, arguments, world)
        if world.is_first:
            arguments.out.write_text(json.dumps(measured))


def measure(cell: Cell, arguments: argparse.Namespace, world: World) -> dict:
    """Seconds of the first step, and the medians of `rounds` windows of `steps` steps each."""
    (batch,), compute = cell.batches, Compute(torch.device(arguments.device), DTYPE, world)
    compiled = arguments.device == "cuda"
    job = ours(cell, Trainer("ours", "flash2", compiled), arguments.device, world=world)
    meter = build_meter(job.model, world.size * batch * cell.context_length, compute, AttentionConfig("flash2"))
    began = time.perf_counter()
    job.step(batch)[0].tolist()  # waits for the GPU
    first_step_s = time.perf_counter() - began
    meter.start()  # so that the peak of memory has in it what the second step may capture
    job.step(batch)
    meter.read()
    windows = []
    for _ in range(arguments.rounds):
        for _ in range(arguments.steps):
            meter.step(job.step(batch)[1])
        windows.append(meter.read())
    peak = max(window.get("memory/peak_allocated_gib", window.get("memory/peak_rss_gib")) for window in windows)
    medians = {
        key: statistics.median(window[f"perf/{key}"] for window in windows) if f"perf/{key}" in windows[0] else None
        for key in ("tokens_per_second", "tflops", "mfu")
    }
    samples = [window["perf/tokens_per_second"] for window in windows]
    saved = time_checkpoint(job, arguments.checkpoints, compute) if arguments.checkpoints else {}
    return medians | {"peak_gib": peak, "first_step_s": first_step_s, "samples": samples} | saved


def time_checkpoint(job: Job, folder: Path, compute: Compute) -> dict[str, float]:
    """Saves one below `folder`, as train.py does, and deletes it: seconds that a step waits, and until it is whole."""
    folder = Path(compute.world.from_first(tempfile.mkdtemp(dir=folder) if compute.world.is_first else None))
    checkpoints = open_checkpoints(folder, CheckpointConfig(keep=1), job.model, compute, TIMEOUT_S)
    if compute.device.type == "cuda":
        torch.cuda.synchronize()
    with checkpoints.saving(lambda text: None):
        began = time.perf_counter()
        checkpoints.save(job.state.step, job.state.state_dict())
        stall_s = time.perf_counter() - began
        checkpoints.settle()
        saved_s = time.perf_counter() - began
    if compute.world.is_first:
        shutil.rmtree(folder)
    return {"stall_s": stall_s, "saved_s": saved_s}


def row_of(scaling: Scaling, gpus: int, arguments: argparse.Namespace) -> dict:
    """Has so many processes measure a cell; out of memory and other failures are rows too."""
    cell = scaling.cell
    row = {"trainer": "ours", "model": cell.model, "context_length": cell.context_length, "batch_size": cell.batches[0]}
    row |= {"attention": "flash2", "compiled": arguments.device == "cuda", "parallel": scaling.parallel, "gpus": gpus}
    unknown = (
        "tokens_per_second",
        "tflops",
        "mfu",
        "peak_gib",
        "first_step_s",
        "linear",
        "stall_s",
        "saved_s",
        "message",
    )
    row |= dict.fromkeys(unknown)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]
        command += ["-m", "bench.scaling", f"--process-of={scaling}", f"--device={arguments.device}"]
        command += [f"--steps={arguments.steps}", f"--rounds={arguments.rounds}", f"--out={out}"]
        command += [f"--checkpoints={arguments.checkpoints.absolute()}"] if arguments.checkpoints else []
        ended = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, **PIPES)
        if ended.returncode == 0:
            return row | json.loads(out.read_text()) | {"status": "ok"}
    return row | {"status": "oom" if "OutOfMemoryError" in ended.stderr else "failed", "message": cause(ended.stderr)}


def cause(stderr: str) -> str:
    """The first line in which a process named an error of its own."""
    lines = [line for line in stderr.splitlines() if "Error" in line or line.startswith("error: ")]
    return (lines or ["no error was named"])[0]


def chosen(scaling: Scaling, batch: int | None) -> Scaling:
    """The cell, at another micro-batch if one is given."""
    return replace(scaling, cell=replace(scaling.cell, batches=(batch,))) if batch else scaling


def is_of(row: dict, scaling: Scaling) -> bool:
    """Whether a row is of that cell at its micro-batch."""
    cell = scaling.cell
    shape = row["model"], row["context_length"], row["batch_size"], row["parallel"]
    return shape == (cell.model, cell.context_length, *cell.batches, scaling.parallel)


def add_linear(rows: list[dict]) -> None:
    """Completes the rows of a cell with their speed over that of one GPU times their GPUs, where that was measured."""
    one = next((row["tokens_per_second"] for row in rows if row["gpus"] == 1), None)
    for row in rows:
        row["linear"] = row["tokens_per_second"] / (row["gpus"] * one) if one and row["tokens_per_second"] else None


def show(rows: list[dict]) -> None:
    table = Table(title="training on several GPUs")
    for column in ("model", "context", "batch", "parallel", "GPUs", "tokens/s", "of linear", "TFLOP/s", "GiB", "stall"):
        table.add_column(column, justify="left" if column in ("model", "parallel") else "right")
    for row in rows:
        speeds = [row["status"], "", "", "", ""]
        if row["status"] == "ok":
            linear = f"{row['linear']:.1%}" if row["linear"] else "-"
            speeds = [f"{row['tokens_per_second']:,.0f}", linear, f"{row['tflops']:.0f}", f"{row['peak_gib']:.1f}"]
            speeds.append(f"{row['stall_s']:.2f} s" if row["stall_s"] is not None else "-")
        shape = row["model"], f"{row['context_length']:,}", str(row["batch_size"])
        table.add_row(*shape, row["parallel"], str(row["gpus"]), *speeds)
    Console(width=100).print(table)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.scaling",
        description="Measures train.py's steps on one GPU and on several of the same machine.",
        epilog="Example: python -m bench.scaling --cells gpt2_1k_ddp --gpus 1,8",
    )
    add = parser.add_argument
    add("--cells", default=",".join(CELLS), help=f"only these, separated by commas (all: {', '.join(CELLS)})")
    add("--gpus", type=sizes, default="1,2,4,8", help="how many, separated by commas (1,2,4,8)")
    add("--batch", type=positive, help="micro-batch of each GPU, instead of the cell's")
    add("--steps", type=positive, default=10, help="of a sample (10)")
    add("--rounds", type=positive, default=5, help="samples of a row (5)")
    add(
        "--add", action="store_true", help="keep the rows of other cells that the file has, whatever commit they are of"
    )
    add("--checkpoints", type=Path, metavar="FOLDER", help="save one checkpoint a row there, and time it")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries everything out without a GPU")
    add("--gpu", help="folder under bench/results; by default made of the device's name and the most GPUs: h200x8")
    add("--out", type=output_file, help="file to write instead of bench/results/<gpu>/scaling.json")
    add("--process-of", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def scaling_folder(gpu: str | None, most: int) -> Path:
    """Where the results of so many GPUs go, such as h200x8, unless the user names it otherwise."""
    folder = results_folder(gpu)
    return folder if gpu else folder.with_name(f"{folder.name}x{most}")


def run(arguments: argparse.Namespace) -> None:
    """What the command line asks for.

    Raises:
        UserError: it cannot be done.
    """
    names, counts = arguments.cells.split(","), arguments.gpus
    for name in names:
        if name not in CELLS:
            raise UserError(f"--cells {name} is unknown; choose among {', '.join(CELLS)}")
    if arguments.checkpoints and not arguments.checkpoints.is_dir():
        raise UserError(f"--checkpoints {arguments.checkpoints} is no folder; make it, or name another")
    if arguments.device == "cpu" and not arguments.out:
        raise UserError("--device cpu only tries things out; name a file for its rows by --out")
    if arguments.device == "cuda" and max(counts) > torch.cuda.device_count():
        seen = torch.cuda.device_count()
        raise UserError(f"--gpus {max(counts)}, but torch sees {seen} GPUs here; ask for fewer, or add --device cpu")
    out = arguments.out or scaling_folder(arguments.gpu, max(counts)) / "scaling.json"
    cells = [chosen(CELLS[name], arguments.batch) for name in names]
    results = begin(out, arguments.add, ("model", "context_length", "batch_size", "parallel", "gpus"))
    commit = {"commit": results["environment"]["commit"]}
    for scaling in cells:
        results["rows"], rows = [row for row in results["rows"] if not is_of(row, scaling)], []
        for gpus in counts:
            rows.append(row := row_of(scaling, gpus, arguments) | commit)
            add_linear(rows)
            write(out, results | {"rows": [*results["rows"], *rows]})
            speed = f"{row['tokens_per_second']:,.0f} tokens/s" if row["status"] == "ok" else row["message"]
            print(f"{scaling.name} on {gpus}: {row['status']}, {speed}", flush=True)
        results["rows"] += rows
    show(results["rows"])
    print(f"written to {out}")


def main() -> None:
    arguments = parse()
    with refusing():
        if arguments.process_of:
            take_steps(Scaling.read(arguments.process_of), arguments)
        else:
            run(arguments)


if __name__ == "__main__":
    main()
