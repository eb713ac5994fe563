"""Training steps side by side on one GPU, and how far they are from the floor: python -m bench.training --help.

Each trainer (bench.trainers) is tried alone at the cell's micro-batches, from the smallest until the speed falls or
memory is out; then all of a cell, each at its best, are timed in turn, round after round, in the same process: a sample
is a few steps without waiting in between, and before each the trainer gets the GPU to itself, the others' weights and
moments having been given up. The floor (bench.floor) takes its turns too. The README's table is made of this.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.attention.contenders import available
from bench.common.command_line import output_file, positive, sizes
from bench.common.results import ROOT, begin, results_folder, write
from bench.common.timing import Gpu, recorded
from bench.training import floor
from bench.training.breakdown import breakdown
from bench.training.steps import Contender, alternate, empty_row, search
from bench.training.trainers import Cell, Job, Trainer, huggingface, load_nanogpt, nanogpt, ours
from errors import UserError, refusing
from model.gpt2 import CHECKPOINTING

# Of the GPT-3s: what nanoGPT has memory for on an H200, and twice as much, for which it has none and ours has.
CELLS = [
    Cell("gpt2", 1024, (32, 64, 128, 256)),
    Cell("gpt2", 8192, (1, 8, 16)),
    Cell("gpt2", 16384, (1, 4)),
    Cell("gpt2-medium", 1024, (32, 64)),
    Cell("gpt3-1.3b", 2048, (24, 48), "selective"),
    Cell("gpt3-1.3b", 8192, (6, 12), "selective"),
    Cell("gpt3-2.7b", 2048, (12, 24), "selective"),
    Cell("gpt3-2.7b", 8192, (3, 6), "selective"),
    Cell("gpt2", 65536, (1,)),
    Cell("gpt2", 131072, (1,)),
    Cell("gpt2", 262144, (1,), "full"),
    Cell("gpt2", 1048576, (1,), "full"),
]
OURS = "flash2", "sdpa", "flash1", "fused_softmax", "naive"  # the attentions that see all of the past
TRAINERS = [
    *(Trainer("ours", attention, compiled) for compiled in (True, False) for attention in OURS),
    *(Trainer("nanogpt", attention, compiled) for compiled in (True, False) for attention in ("sdpa", "naive")),
    *(Trainer("huggingface", attention, compiled) for compiled in (True, False) for attention in ("sdpa", "naive")),
]
MAIN = "ours:flash2", "nanogpt:sdpa"
LAST_OF_NAIVE = "gpt2_8k", "gpt2_16k"  # around the longest context that its matrices leave room for
LONGEST_FLOOR = 8192  # tokens of context; beyond, the floor is attention


def measure(cell: Cell, arguments: argparse.Namespace, gpu: Gpu, until: float) -> list[dict]:
    """The rows of a cell; see alternate for `until`."""
    rows, contenders = [], []
    for trainer in chosen_trainers(arguments, cell):
        build = partial(builder(trainer, arguments), cell, trainer, gpu.device)
        new, best = search(cell, trainer, build, gpu)
        rows += new
        contenders += [best] if best else []
        print(f"  {trainer}: " + ", ".join(map(text_of, new)), flush=True)
    best_of_ours = next((row for row in rows if row["best"] and row["trainer"] == "ours"), None)
    parts = floor_parts(cell, best_of_ours, arguments, gpu)
    alternate(cell, [*contenders, *parts.values()], arguments.rounds, gpu, until)
    for contender in (*contenders, *parts.values()):
        if contender.row["status"] != "ok":
            print(f"  {contender.row['trainer']}, timed in turn: {text_of(contender.row)}", flush=True)
        elif arguments.breakdown and contender.steps and contender in contenders:
            profile(contender, gpu)
    contenders.clear()
    torch._dynamo.reset()
    gpu.release()
    return rows + ([floor.row_of(cell, parts)] if parts else [])


def profile(contender: Contender, gpu: Gpu) -> None:
    """Adds where a step goes to the row; that it cannot be told leaves the row as it is."""
    failure = {}
    with recorded([failure], gpu), contender.job.alone():
        contender.row["breakdown_ms"] = breakdown(partial(contender.job.step, contender.row["batch_size"]))
    if failure:
        print(f"  no breakdown of {contender.row['trainer']}: {failure.get('message', 'out of memory')}", flush=True)


def text_of(row: dict) -> str:
    """A micro-batch in a word."""
    if row["status"] != "ok":
        return f"batch {row['batch_size']} {row['status']}" + (f" ({row['message']:.150})" if row["message"] else "")
    speed = f"{row['tokens_per_second'] / 1000:.1f}k tokens/s, {row['peak_gib']:.1f} GiB"
    return f"batch {row['batch_size']} {speed}, first step {row['first_step_s']:.1f} s"


def floor_parts(cell: Cell, ours: dict | None, arguments: argparse.Namespace, gpu: Gpu) -> dict[str, Contender]:
    """The parts of the floor at our best micro-batch; none where there is no such, or no floor is wanted."""
    if ours is None or arguments.no_floor or cell.context_length > LONGEST_FLOOR:
        return {}
    known = available(arguments.fa3_library)
    fused = {name: attend for name, attend in known.items() if name not in ("naive", "flex")}
    return floor.contenders(cell, ours["batch_size"], fused, gpu)


def builder(trainer: Trainer, arguments: argparse.Namespace) -> Callable[..., Job]:
    """What builds this trainer's job."""
    if trainer.name == "nanogpt":
        return partial(nanogpt, module=load_nanogpt(arguments.nanogpt))
    return {"ours": ours, "huggingface": huggingface}[trainer.name]


def chosen_trainers(arguments: argparse.Namespace, cell: Cell) -> list[Trainer]:
    """The trainers of a cell: the ones asked for, or all at the smallest and the two main ones elsewhere, with naive
    attention where it is about to run out of memory."""
    default = [str(trainer) for trainer in TRAINERS] if cell.name == "gpt2_1k" else list(MAIN)
    if cell.name in LAST_OF_NAIVE:
        default += ["ours:naive", "nanogpt:naive"]
    wanted = arguments.trainers.split(",") if arguments.trainers else default
    known = {str(trainer): trainer for trainer in TRAINERS}
    for name in wanted:
        if name not in known:
            raise UserError(f"--trainers {name} is unknown; choose among {', '.join(known)}")
    chosen = [known[name] for name in wanted]
    without = [trainer for trainer in chosen if trainer.name != "nanogpt"]
    if arguments.trainers and without != chosen and not arguments.nanogpt:
        raise UserError("--trainers names nanogpt, whose model.py is not given; add --nanogpt path/to/model.py")
    return chosen if arguments.nanogpt else without


def chosen_cells(arguments: argparse.Namespace) -> list[Cell]:
    """The cells asked for, with other micro-batches or checkpointing where the command line says so."""
    known = {cell.name: cell for cell in CELLS}
    wanted = arguments.cells.split(",") if arguments.cells else list(known)
    for name in wanted:
        if name not in known:
            raise UserError(f"--cells {name} is unknown; choose among {', '.join(known)}")
    cells = [known[name] for name in wanted]
    if arguments.batches:
        batches = tuple(sorted(set(arguments.batches)))  # the search begins with the smallest
        cells = [replace(cell, batches=batches) for cell in cells]
    mode = arguments.activation_checkpointing
    return [replace(cell, activation_checkpointing=mode) for cell in cells] if mode else cells


def is_whole(arguments: argparse.Namespace) -> bool:
    """Whether all is measured as it is meant to be, so that it may take the place of the results there are."""
    parts = arguments.cells, arguments.trainers, arguments.batches, arguments.activation_checkpointing
    return not (any(parts) or arguments.no_floor)


def first_steps() -> dict[str, float]:
    """Seconds of gpt2's first step in a fresh process, without a compile cache and with the one that it left."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        out, seconds = Path(folder) / "row.json", {}
        command = [sys.executable, "-m", "bench.training", "--cells", "gpt2_1k", "--trainers", "ours:flash2"]
        command += ["--batches", "32", "--rounds", "1", "--no-floor", "--out", str(out)]
        for cache in ("cold", "warm"):
            ended = subprocess.run(command, cwd=ROOT, env=os.environ | caches, capture_output=True, text=True)
            if ended.returncode:
                raise UserError(f"--first-step failed: {ended.stderr.strip().splitlines()[-1]}")
            row = json.loads(out.read_text())["rows"][0]
            if row["status"] != "ok":
                raise UserError(f"--first-step failed: {row['message'] or 'out of memory'}")
            seconds[cache] = row["first_step_s"]
    return seconds


def is_of(row: dict, cell: Cell) -> bool:
    """Whether a row is of that cell, by whatever trainer and at whatever micro-batch."""
    return (row["model"], row["context_length"]) == (cell.model, cell.context_length)


def ratios(rows: list[dict]) -> str:
    """What our best row is to nanoGPT's, to Hugging Face's eager one and to the floor, in speed and in memory."""
    speed, memory = {}, {}
    for row in rows:
        name = str(Trainer(row["trainer"], row["attention"], row["compiled"]))
        if row["status"] == "ok" and (row["best"] or row["trainer"] == "floor"):
            speed["floor" if row["trainer"] == "floor" else name] = row["tokens_per_second"]
        if row["status"] == "ok" and name in MAIN:
            memory.setdefault(row["batch_size"], {})[name] = row["peak_gib"]
    ours, parts = speed.get(MAIN[0]), []
    for peer in (MAIN[1], "huggingface:naive:eager"):
        parts += [f"{ours / speed[peer]:.3f} x {peer}"] if ours and peer in speed else []
    parts += [f"{ours / speed['floor']:.1%} of the floor"] if ours and "floor" in speed else []
    both = [f"{of[MAIN[0]] / of[MAIN[1]]:.2f} at batch {batch}" for batch, of in memory.items() if len(of) == 2]
    return ", ".join(parts) + (f"; memory x {MAIN[1]} {', '.join(both)}" if both else "")


def show(rows: list[dict]) -> None:
    """The best rows as a table."""
    table = Table(title="training steps, each trainer at its best micro-batch")
    for column in ("model", "context", "trainer", "batch", "tokens/s", "TFLOP/s", "MFU", "GiB", "first step"):
        table.add_column(column, justify="left" if column in ("model", "trainer") else "right")
    for row in rows:
        if row["best"] or row["trainer"] == "floor":
            table.add_row(
                row["model"],
                f"{row['context_length']:,}",
                str(Trainer(row["trainer"], row["attention"] or "-", row["compiled"] or row["trainer"] == "floor")),
                str(row["batch_size"]),
                f"{row['tokens_per_second']:,.0f}" if row["status"] == "ok" else row["status"],
                f"{row['tflops']:.0f}" if row["tflops"] else "-",
                f"{row['mfu']:.1%}" if row["mfu"] else "-",
                f"{row['peak_gib']:.1f}" if row["peak_gib"] else "-",
                f"{row['first_step_s']:.1f} s" if row["first_step_s"] else "-",
            )
    Console(width=120).print(table)


def show_breakdown(rows: list[dict]) -> None:
    """Milliseconds of each class of kernels, a column per trainer."""
    parted = [row for row in rows if row.get("breakdown_ms")]
    for cell in dict.fromkeys((row["model"], row["context_length"]) for row in parted):
        of_cell = [row for row in parted if (row["model"], row["context_length"]) == cell]
        table = Table(title=f"milliseconds a step, {cell[0]} at {cell[1]:,}")
        table.add_column("")
        for row in of_cell:
            name = Trainer(row["trainer"], row["attention"], row["compiled"])
            table.add_column(f"{name}\nbatch {row['batch_size']}", justify="right")
        for part in of_cell[0]["breakdown_ms"]:
            table.add_row(part, *(f"{row['breakdown_ms'][part]:.2f}" for row in of_cell))
        Console(width=120).print(table)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.training",
        description="Measures a training step of ours beside nanoGPT's, Hugging Face's and the floor, on one GPU.",
        epilog="Example: python -m bench.training --cells gpt2_1k --nanogpt path/to/nanoGPT/model.py --breakdown",
    )
    add = parser.add_argument
    add("--cells", help=f"only these, separated by commas (all: {', '.join(cell.name for cell in CELLS)})")
    help_ = (
        f"only these (all: {', '.join(map(str, TRAINERS))}); by default all for gpt2_1k, {' and '.join(MAIN)} "
        f"elsewhere, with both's naive for {' and '.join(LAST_OF_NAIVE)}"
    )
    add("--trainers", help=help_)
    add("--nanogpt", type=Path, help="nanoGPT's model.py; without it nanoGPT is left out")
    add("--batches", type=sizes, help="micro-batches to try, e.g. 32,64, instead of the cell's")
    add("--activation-checkpointing", choices=CHECKPOINTING, help="of ours, in every cell, instead of the cells' own")
    add("--rounds", type=positive, default=5, help="samples of each trainer, taken in turn (5)")
    add("--breakdown", action="store_true", help="also where a step goes, by the profiler")
    add("--first-step", action="store_true", help="also gpt2's first step with a cold and a warm compile cache")
    add("--no-floor", action="store_true", help="without the floor")
    add("--fa3-library", type=Path, help="FlashAttention-3 for the floor, as a bare library (FA3_LIBRARY)")
    help_ = "after so long no cell is begun, nor a round of the one at hand but its first (3600)"
    add("--budget-seconds", type=float, default=3600, help=help_)
    add("--gpu", help="folder under bench/results; by default made of the device's name")
    add("--out", type=output_file, help="file to write; part of the cells is written only if this is given")
    add(
        "--add", action="store_true", help="keep the rows of other cells that the file has, whatever commit they are of"
    )
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> None:
    """What the command line asks for.

    Raises:
        UserError: it cannot be done.
    """
    cells = chosen_cells(arguments)
    for cell in cells:
        for trainer in chosen_trainers(arguments, cell):
            builder(trainer, arguments)
    available(arguments.fa3_library)  # refused here, if it is to be
    if not torch.cuda.is_available():
        raise UserError("bench.training measures a GPU, and torch finds none; run it where there is one")
    out = arguments.out or (results_folder(arguments.gpu) / "training.json" if is_whole(arguments) else None)
    torch.backends.cuda.matmul.allow_tf32 = True  # as nanoGPT sets it
    torch._dynamo.config.automatic_dynamic_shapes = False  # each micro-batch is compiled for itself
    torch._dynamo.config.recompile_limit = 64
    results = begin(out, arguments.add, empty_row(cells[0], TRAINERS[0], 1))
    gpu, started = Gpu(), time.monotonic()
    until = started + arguments.budget_seconds
    gpu.wake()
    if arguments.first_step:
        seconds = first_steps()
        print("first step of gpt2: " + ", ".join(f"{k} cache {v:.1f} s" for k, v in seconds.items()))
        results["first_step_s"] = seconds | {"commit": results["environment"]["commit"]}
    for number, cell in enumerate(cells):
        if time.monotonic() > until:
            print(f"--budget-seconds are spent; skipped: {', '.join(c.name for c in cells[number:])}")
            break
        print(f"{cell.name} ({time.monotonic() - started:.0f} s)", flush=True)
        new = [row | {"commit": results["environment"]["commit"]} for row in measure(cell, arguments, gpu, until)]
        results["rows"] = [row for row in results["rows"] if not is_of(row, cell)] + new
        print(f"  {ratios(new)}", flush=True)
        if out:
            write(out, results)
    show_breakdown(results["rows"])
    show(results["rows"])
    print(f"{time.monotonic() - started:.0f} seconds" + (f"; written to {out}" if out else ""))


def main() -> None:
    with refusing():
        run(parse())
