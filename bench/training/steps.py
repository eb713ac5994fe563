"""How training steps are measured: each trainer alone at a cell's micro-batches, then the best of each in turn."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from bench.common.timing import Gpu, in_turn, recorded
from bench.training.trainers import DTYPE, Job, Trainer, TrainingCell
from trainer.flops import model_flops_per_token, peak_flops
from trainer.meters import GIB

SAMPLE_S = 0.6  # A sample has enough steps to last this long, but at most MOST_STEPS.
MOST_STEPS = 12
LONG_MS = 3000  # A longer step is timed once, in the search, and not in turn.


@dataclass
class Finalist:
    """A trainer at its best micro-batch, to be timed in turn with the others."""

    row: dict
    job: Job
    steps: int
    """Steps of a sample; 0 if the row is complete already."""
    samples: list[float] = field(default_factory=list)
    """Milliseconds a step."""


def empty_row(cell: TrainingCell, trainer: Trainer, batch: int) -> dict:
    """Return a row with its shape and without results."""
    shape = {"model": cell.model, "context_length": cell.context_length, "batch_size": batch}
    checkpointing = cell.activation_checkpointing if trainer.name == "ours" else "none"
    how = {"attention": trainer.attention, "compiled": trainer.compiled, "activation_checkpointing": checkpointing}
    how |= {} if trainer.precision == "bf16" else {"precision": trainer.precision}
    results = ("tokens_per_second", "tflops", "mfu", "peak_gib", "first_step_s", "ms", "status", "message")
    return {"trainer": trainer.name, **shape, **how, **dict.fromkeys(results), "best": False}


def complete(row: dict, cell: TrainingCell, ms: float) -> None:
    """Fill in the speeds of a step of `ms` milliseconds. All trainers use our model's count of FLOPs."""
    shape = cell.shape()
    width, projected = shape.n_embd, shape.n_embd + 2 * shape.kv_heads * shape.head_dim
    # The number of GPT2.n_params(), without building a model, which would cool the GPU between timings. A layer has the
    # projection to q, k and v, the other weights, and the other biases with two LayerNorms.
    of_layer = projected * (width + 1) + 9 * width**2 + 10 * width
    n_params = shape.n_layer * of_layer + (shape.padded_vocab_size + 2) * width
    flops = model_flops_per_token(n_params, shape.n_layer, width, cell.context_length)
    speed = row["batch_size"] * cell.context_length / ms * 1000
    peak = peak_flops(torch.cuda.get_device_name(), DTYPE) if torch.cuda.is_available() else None
    row.update(ms=ms, tokens_per_second=speed, tflops=speed * flops / 1e12, status="ok")
    row["mfu"] = speed * flops / peak if peak else None


def text_of(row: dict) -> str:
    """Return a micro-batch's result in a few words."""
    if row["status"] != "ok":
        return f"batch {row['batch_size']} {row['status']}" + (f" ({row['message']:.150})" if row["message"] else "")
    speed = f"{row['tokens_per_second'] / 1000:.1f}k tokens/s, {row['peak_gib']:.1f} GiB"
    return f"batch {row['batch_size']} {speed}, first step {row['first_step_s']:.1f} s"


def try_batch(row: dict, cell: TrainingCell, job: Job, gpu: Gpu) -> int:
    """Complete the row with three steps and a sample. Return the steps of a sample.

    The first step compiles. The second step's memory includes the optimizer's moments. The third step is timed.
    """
    step = partial(job.step, row["batch_size"])
    row["first_step_s"] = gpu.milliseconds(step, calls=1, spin_ms=0) / 1000
    row["peak_gib"] = gpu.peak(step) / GIB
    row["peak_of"] = "second step"
    complete(row, cell, gpu.milliseconds(step, calls=1, spin_ms=0))
    if steps := steps_of(row["ms"]):  # One step is too noisy to choose the best micro-batch.
        complete(row, cell, gpu.milliseconds(step, steps, spin_ms=0))
    return steps


def steps_of(ms: float) -> int:
    """Return the steps of a sample if one step takes `ms` milliseconds; 0 if the step is timed only once."""
    return 0 if ms > LONG_MS else min(max(round(1000 * SAMPLE_S / ms), 2), MOST_STEPS)


def search(
    cell: TrainingCell, trainer: Trainer, build: Callable[[], Job], gpu: Gpu
) -> tuple[list[dict], Finalist | None]:
    """Try the micro-batches in order until the speed falls or memory runs out. Return all rows and the finalist.

    Print a line for each micro-batch, because each may compile for minutes.
    """
    rows, best, job = [], None, None
    for batch in cell.batches:
        rows.append(row := empty_row(cell, trainer, batch))
        with recorded([row], gpu):
            job = job or build()
            steps = try_batch(row, cell, job, gpu)
        print(f"  {trainer}: {text_of(row)}", flush=True)
        if row["status"] != "ok" or (best and row["tokens_per_second"] <= best.row["tokens_per_second"]):
            break
        best = Finalist(row, job, steps)
    if job:
        job.park()
    gpu.release()
    return rows, best


def alternate(cell: TrainingCell, finalists: list[Finalist], rounds: int, gpu: Gpu) -> None:
    """Take one sample of each finalist per round, complete the rows with the medians, and mark them as best.

    Rows of an interrupted run are therefore not marked: their speeds come from the search, not from turns.
    """
    timed = [finalist for finalist in finalists if finalist.steps]
    for finalist in in_turn(timed, rounds):
        if finalist.row["status"] == "ok":
            step = partial(finalist.job.step, finalist.row["batch_size"])
            with recorded([finalist.row], gpu), finalist.job.alone():
                step()  # The first step after resume() does not use CUDA graphs.
                finalist.samples.append(gpu.milliseconds(step, finalist.steps, spin_ms=0))
            gpu.release()
    for finalist in finalists:
        finalist.row["best"] = True
        if finalist.samples and finalist.row["status"] == "ok":
            complete(finalist.row, cell, statistics.median(finalist.samples))
            finalist.row["samples"] = finalist.samples
