"""How the steps of trainers are measured: each at the micro-batches of a cell, then the best of all in turn."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from bench.common.timing import Gpu, recorded
from bench.training.trainers import DTYPE, Cell, Job, Trainer
from trainer.flops import model_flops_per_token, peak_flops
from trainer.meters import GIB

SAMPLE_S = 0.6  # a sample is as many steps as fill this, at most MOST_STEPS
MOST_STEPS = 12
LONG_MS = 3000  # a longer step is timed once, when it is tried, and not in turn
LONGEST_S = 120  # a longer first step is the only one: of a million tokens, where compilation is the lesser part


@dataclass
class Contender:
    """A trainer's row at its best micro-batch, the job that takes its steps, and how many make a sample."""

    row: dict
    job: Job
    steps: int
    samples: list[float] = field(default_factory=list)


def empty_row(cell: Cell, trainer: Trainer, batch: int) -> dict:
    """A row of which only the shape is known."""
    shape = {"model": cell.model, "context_length": cell.context_length, "batch_size": batch}
    checkpointing = cell.activation_checkpointing if trainer.name == "ours" else "none"
    how = {"attention": trainer.attention, "compiled": trainer.compiled, "activation_checkpointing": checkpointing}
    unknown = ("tokens_per_second", "tflops", "mfu", "peak_gib", "first_step_s", "ms", "status", "message")
    return {"trainer": trainer.name, **shape, **how, **dict.fromkeys(unknown), "best": False}


def complete(row: dict, cell: Cell, ms: float) -> None:
    """The speeds that follow from a step's duration, for all trainers by our model's count of FLOPs."""
    shape = cell.shape()
    count = shape.n_layer * (12 * shape.n_embd**2 + 13 * shape.n_embd) + (shape.padded_vocab_size + 2) * shape.n_embd
    flops = model_flops_per_token(count, shape.n_layer, shape.n_embd, cell.context_length)
    speed = row["batch_size"] * cell.context_length / ms * 1000
    peak = peak_flops(torch.cuda.get_device_name(), DTYPE) if torch.cuda.is_available() else None
    row.update(ms=ms, tokens_per_second=speed, tflops=speed * flops / 1e12, status="ok")
    row["mfu"] = speed * flops / peak if peak else None


def try_batch(row: dict, cell: Cell, job: Job, gpu: Gpu) -> int:
    """Completes the row by a first step, which compiles, a second, and a sample; returns how many steps make one, or 0.

    A single step would include what the host takes to queue its first kernels, and too little to choose the best by.
    """
    step = partial(job.step, row["batch_size"])

    def first() -> None:
        row["first_step_s"] = gpu.milliseconds(step, calls=1, spin_ms=0) / 1000

    row["peak_gib"] = gpu.peak(first) / GIB
    if row["first_step_s"] > LONGEST_S:
        complete(row, cell, 1000 * row["first_step_s"])
        row["message"] = "the first step, compilation included, and without the optimizer's moments"
        return 0
    row["peak_gib"] = gpu.peak(step) / GIB  # beside the activations there are now the moments, 8 bytes a parameter
    row["peak_of"] = "second step"
    complete(row, cell, gpu.milliseconds(step, calls=1, spin_ms=0))
    if steps := steps_of(row["ms"]):
        complete(row, cell, gpu.milliseconds(step, steps, spin_ms=0))
    return steps


def steps_of(ms: float) -> int:
    """How many steps of so many milliseconds make a sample; 0 of one that is timed once."""
    return 0 if ms > LONG_MS else min(max(round(1000 * SAMPLE_S / ms), 2), MOST_STEPS)


def search(cell: Cell, trainer: Trainer, build: Callable[[], Job], gpu: Gpu) -> tuple[list[dict], Contender | None]:
    """A row for each micro-batch, from the smallest until the speed falls or memory is out, and the best of them."""
    rows, best, job = [], None, None
    for batch in cell.batches:
        rows.append(row := empty_row(cell, trainer, batch))
        with recorded([row], gpu):
            job = job or build()
            steps = try_batch(row, cell, job, gpu)
        if row["status"] != "ok" or (best and row["tokens_per_second"] <= best.row["tokens_per_second"]):
            break
        best = Contender(row, job, steps)
    if best:
        best.row["best"] = True
    if job:
        job.park()
    gpu.release()
    return rows, best


def alternate(cell: Cell, contenders: list[Contender], rounds: int, gpu: Gpu, until: float = math.inf) -> None:
    """Times the contenders in turn, several steps a sample, and completes their rows with the medians.

    After the first, no round is begun once the time `until`, of time.monotonic(), is over.
    """
    timed = [contender for contender in contenders if contender.steps]
    for number in range(rounds):
        if number and time.monotonic() > until:
            print(f"  time is over after {number} of {rounds} rounds")
            break
        for contender in timed:
            if contender.row["status"] == "ok":
                step = partial(contender.job.step, contender.row["batch_size"])
                with recorded([contender.row], gpu), contender.job.alone():
                    step()  # as the first of a run, which captures none of its kernels
                    contender.samples.append(gpu.milliseconds(step, contender.steps, spin_ms=0))
                gpu.release()
    for contender in timed:
        if contender.row["status"] == "ok":
            complete(contender.row, cell, statistics.median(contender.samples))
            contender.row["samples"] = contender.samples
