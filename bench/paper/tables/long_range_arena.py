"""FlashAttention (Dao et al., 2022), tables 3 and 6: attentions on Long Range Arena.

One process times the training steps of all attentions on a task in turn. For Path-X and Path-256, each attention has a
process of its own, which tries larger and larger batches. Accuracies are cells of their own, so that a run can stop and
go on between them.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import geometric_mean

import numpy as np
import torch

from bench.common.formatting import cost_text, speed_text, table, value_text
from bench.common.timing import Gpu
from bench.lra.attentions import ATTENTIONS, UNPADDED
from bench.lra.datasets import Examples, load
from bench.lra.tasks import TABLE_3, TASKS, Task
from bench.lra.training import train_and_evaluate
from bench.paper.classifier_steps import draw_batch, step_row, time_steps
from bench.paper.settings import PaperSettings
from trainer.precision import Compute

TITLE = "FlashAttention's tables 3 and 6: Long Range Arena"
OURS = "flash1", "flash2", UNPADDED, "block_sparse"
BASE, COMPILED = ("naive", False), ("naive", True)
LONG_TASKS = "path_x", "path_256"
TITLES = {"listops": "ListOps", "text": "Text", "retrieval": "Retrieval", "image": "Image", "pathfinder": "Pathfinder"}
TITLES |= {"path_x": "Path-X", "path_256": "Path-256"}
BATCHES = {"full": (1, 4, 16, 64), "smoke": (1, 2)}
BACKENDS = {"full": "inductor", "smoke": "eager"}  # a smoke run is shorter than its compilation
ROUNDS = {"full": 15, "smoke": 1}
SMOKE = {"context_length": 32, "batch_size": 2}
SMOKE_ATTENTIONS = "naive", "flash2", UNPADDED, "performer"
CROSS = "✗"
SEED, NOISE = 1, "flash2"
OTHER_SEEDS = {NOISE: (2, 3), "linear": (2, 3), "reformer": (2,)}  # linear and reformer did not learn from SEED
COMPILED_TASKS = ("pathfinder",)  # the runs that are long enough for a compilation
TRAINED = {"listops": ATTENTIONS, "pathfinder": ("flash2", "block_sparse", "linformer")}
"""The attentions whose accuracy is measured, by task: for the long runs of Pathfinder, one of each kind."""
# Speedup and accuracies of table 3 in the order of TABLE_3, then of table 6 in the order of LONG_TASKS. None: a cross.
PAPER = {
    "naive": (None, (36.0, 63.6, 81.6, 42.3, 72.7), (None, None)),
    "flash1": (2.4, (37.6, 63.9, 81.4, 43.5, 72.7), (61.4, None)),
    "block_sparse": (2.8, (37.0, 63.0, 81.3, 43.6, 73.3), (56.0, 63.1)),
    "linformer": (2.5, (35.6, 55.9, 77.7, 37.8, 67.6), (None, None)),
    "linear": (2.3, (38.8, 63.2, 80.7, 42.6, 72.5), (None, None)),
    "performer": (1.8, (36.8, 63.6, 82.2, 42.1, 69.9), (None, None)),
    "local_window": (1.7, (36.1, 60.2, 76.7, 40.6, 66.6), (None, None)),
    "reformer": (1.3, (36.5, 63.8, 78.5, 39.6, 69.4), (None, None)),
    "smyrf": (1.7, (36.1, 64.1, 79.0, 39.6, 70.5), (None, None)),
}


def cells(settings: PaperSettings) -> list[dict]:
    """Return the steps of each task, the long tasks, and the accuracies, ListOps first."""
    timed = [{"measured": "step", "task": task} for task in TABLE_3]
    attentions = [name for name in ATTENTIONS if name != UNPADDED]  # images have no padding
    long = [{"measured": "long", "task": task, "attention": name} for task in LONG_TASKS for name in attentions]
    learned = [accuracy_cell(task, name, settings) for task, names in TRAINED.items() for name in names]
    learned += [accuracy_cell("listops", name, settings, s) for name, seeds in OTHER_SEEDS.items() for s in seeds]
    return [*timed, *long, *learned] if settings.size == "full" else [timed[0], long[0], learned[0]]


def accuracy_cell(task: str, attention: str, settings: PaperSettings, seed: int = SEED) -> dict:
    """Return the cell that trains a classifier for the task's number of steps."""
    steps = TASKS[task].steps if settings.size == "full" else 2
    return {"measured": "accuracy", "task": task, "attention": attention, "steps": steps, "seed": seed}


def task_of(cell: dict, settings: PaperSettings) -> Task:
    """Return the task of a cell, in its smoke size if the settings say so."""
    task = TASKS[cell["task"]]
    return task if settings.size == "full" else replace(task, **SMOKE)


def measure(cell: dict, gpu: Gpu, settings: PaperSettings) -> Iterator[dict]:
    return MEASURES[cell["measured"]](cell, gpu, settings)


def measure_steps(cell: dict, gpu: Gpu, settings: PaperSettings) -> Iterator[dict]:
    """Yield a row for the training step of each attention on a task."""
    task = task_of(cell, settings)
    eager = [(name, False) for name in (ATTENTIONS if settings.size == "full" else SMOKE_ATTENTIONS)]
    rows = [step_row(name, task.batch_size, compiled) for name, compiled in (BASE, COMPILED, *eager[1:])]
    time_steps(rows, task, BACKENDS[settings.size], gpu, ROUNDS[settings.size])
    yield from rows


def measure_batches(cell: dict, gpu: Gpu, settings: PaperSettings) -> Iterator[dict]:
    """Yield a row for each batch size until memory runs out."""
    for batch_size in BATCHES[settings.size]:
        row = step_row(cell["attention"], batch_size)
        time_steps([row], task_of(cell, settings), BACKENDS[settings.size], gpu, ROUNDS[settings.size])
        yield row
        gpu.release()
        if row["status"] != "ok":
            return


def measure_accuracy(cell: dict, gpu: Gpu, settings: PaperSettings) -> Iterator[dict]:
    """Yield one row with the scores of a trained classifier. The smoke size trains on random tokens."""
    task = task_of(cell, settings)
    compute = Compute(torch.device(gpu.device), torch.bfloat16)
    splits = [examples_of(task, split, settings) for split in ("train", "test")]
    compiled = settings.size == "full" and cell["task"] in COMPILED_TASKS
    run = {"steps": cell["steps"], "seed": cell["seed"], "compiled": compiled}
    test, train = train_and_evaluate(task, cell["attention"], *splits, compute, **run)
    scores = {"accuracy": test.accuracy, "loss": test.loss, "train_accuracy": train.accuracy, "train_loss": train.loss}
    yield {**scores, "status": "ok"}


def examples_of(task: Task, split: str, settings: PaperSettings) -> Examples:
    if settings.size == "full":
        return load(task, split)
    tokens, labels = (x.numpy() for x in draw_batch(task, 2 * task.batch_size))
    return Examples(tokens.astype(np.uint8), np.full(len(tokens), tokens.shape[1], np.int32), labels)


MEASURES = {"step": measure_steps, "long": measure_batches, "accuracy": measure_accuracy}


def markdown(rows: list[dict]) -> str:
    """Return the table of steps, the table of long tasks, and the table of accuracies."""
    return "\n\n".join([*step_parts(rows), *long_parts(rows), *accuracy_parts(rows)])


def texts(row: dict | None, name: str) -> list[str]:
    """Return the milliseconds and the GiB of a row. A star says that the step is not a CUDA graph."""
    star = "*" if row and row["status"] == "ok" and row["graph"] is False else ""
    cost = partial(cost_text, ours=name in OURS)
    return [value_text(row, "ms", cost) + star, value_text(row, "peak_gib", cost)]


def title_of(name: str, compiled: bool = False) -> str:
    """Return how the tables call an attention. Only naive has a compiled row."""
    eager = {True: ", compiled", False: ", eager"}[compiled] if name == "naive" else ""
    return f"`{name}`{eager}"


def speedups(rows: list[dict]) -> dict[tuple[str, bool], float]:
    """Return the geometric mean over the tasks of the speed of each attention relative to naive eager.

    An attention without a time for one of the measured tasks has no mean.
    """
    times = {(r["attention"], r["compiled"], r["task"]): r["ms"] for r in rows if r["status"] == "ok"}
    tasks = {row["task"] for row in rows}
    found = {}
    for name, compiled in dict.fromkeys((row["attention"], row["compiled"]) for row in rows):
        pairs = [(times.get((*BASE, task)), times.get((name, compiled, task))) for task in tasks]
        if all(base and ms for base, ms in pairs):
            found[name, compiled] = geometric_mean(base / ms for base, ms in pairs)
    return found


def step_parts(rows: list[dict]) -> list[str]:
    """Return the table of training steps and its note, if steps were measured."""
    steps = [row for row in rows if row["measured"] == "step" and "attention" in row]
    if not steps:
        return []
    found = {(row["task"], row["attention"], row["compiled"]): row for row in steps}
    tasks = [task for task in TABLE_3 if any(row["task"] == task for row in steps)]
    gains, lines = speedups(steps), []
    for name, compiled in dict.fromkeys((row["attention"], row["compiled"]) for row in steps):
        costs = [text for task in tasks for text in texts(found.get((task, name, compiled)), name)]
        gain, theirs = gains.get((name, compiled)), None if compiled else PAPER.get(name)
        ours = speed_text(gain, name in OURS) if gain else "-"
        lines.append([title_of(name, compiled), *costs, ours, f"{theirs[0]:.1f}" if theirs and theirs[0] else "-"])
    columns = [text for task in tasks for text in (f"{TITLES[task]}, ms", "GiB")]
    batches = ", ".join(f"{TITLES[task]} {batch_of(steps, task)}" for task in tasks)
    notes = [
        "A training step (forward, backward, AdamW) of a classifier of 2 layers on random tokens, in bf16 autocast.",
        f"Examples of a step: {batches}; an example of Retrieval is 2 documents.",
        "GiB: peak with weights and moments. x: geometric mean over the tasks. Paper: table 3, on an A100.",
        "All rows compute full-length sequences, except `flash2_unpadded` on ListOps, which has the lengths of new "
        "expressions. The other attentions would compute the padding too. Only one row of `naive` is compiled.",
        graph_note(steps),
    ]
    return [table(["attention", *columns, "x naive, eager", "paper, x"], lines), " ".join(filter(None, notes))]


def batch_of(rows: list[dict], task: str) -> int:
    return next(row["batch_size"] for row in rows if row["task"] == task)


def graph_note(rows: list[dict]) -> str:
    """Return whether the steps are CUDA graphs, and why some are not."""
    if not any(row["graph"] is not None for row in rows):
        return ""
    not_graphs = [row for row in rows if row["status"] == "ok" and row["graph"] is False]
    failed = dict.fromkeys(f"{title_of(row['attention'])}: {row['message']}" for row in not_graphs)
    stars = f" *: not a graph, because the capture failed ({'; '.join(failed)})." if failed else ""
    return f"Steps are CUDA graphs.{stars}"


def long_parts(rows: list[dict]) -> list[str]:
    """Return the table of Path-X and Path-256 with its note, if they were measured."""
    long = [row for row in rows if row["measured"] == "long" and "batch_size" in row]
    if not long:
        return []
    lines = []
    for name in dict.fromkeys(row["attention"] for row in long):
        line = [title_of(name)]
        for number, task in enumerate(LONG_TASKS):
            of_batch = {r["batch_size"]: r for r in long if (r["task"], r["attention"]) == (task, name)}
            accuracy = PAPER[name][2][number] or CROSS if name in PAPER else "-"
            line += [*batch_texts(of_batch, name), str(accuracy)]
        lines.append(line)
    header = ["attention"]
    for task in LONG_TASKS:
        header += [f"{TITLES[task]}, batch 1: ms", "GiB", "largest batch", "ms", "GiB", "paper, %"]
    sizes = ", ".join(map(str, sorted({row["batch_size"] for row in long})))
    notes = [
        f"The largest batch of {sizes} that fits. A step slower than 1 s is timed once.",
        f"Paper: accuracy in table 6. {CROSS}: the model ran out of memory or did not learn.",
        graph_note(long),
        unsupported_note(long),
    ]
    return [table(header, lines), " ".join(filter(None, notes))]


def batch_texts(of_batch: dict[int, dict], name: str) -> list[str]:
    """Return the cost at batch 1, and the largest batch that fits with its cost. `of_batch` are the rows by batch."""
    fits = [size for size, row in of_batch.items() if row["status"] == "ok"]
    largest = [str(max(fits)), *texts(of_batch[max(fits)], name)] if fits else ["-"] * 3
    return [*texts(of_batch.get(1), name), *largest]


def unsupported_note(rows: list[dict]) -> str:
    reasons = dict.fromkeys(
        f"{title_of(r['attention'])}: {r['message']}." for r in rows if r["status"] == "unsupported"
    )
    return " ".join(["UNSUPPORTED:", *reasons]) if reasons else ""


def accuracy_parts(rows: list[dict]) -> list[str]:
    """Return the table of accuracies with its note, if any was measured."""
    learned = [row for row in rows if row["measured"] == "accuracy"]
    if not learned:
        return []
    found = {(row["task"], row["attention"], row["seed"]): row for row in learned}
    percent = partial(value_text, key="accuracy", text=lambda share: f"{100 * share:.1f}")
    order, lines = list(ATTENTIONS), []
    for name, seed in sorted({(r["attention"], r["seed"]) for r in learned}, key=lambda x: (order.index(x[0]), x)):
        ours = [percent(found.get((task, name, seed))) for task in TABLE_3]
        theirs = [f"{x:.1f}" for x in PAPER[name][1]] if name in PAPER and seed == SEED else ["-"] * len(TABLE_3)
        lines.append([f"`{name}`" + (f", seed {seed}" if seed != SEED else ""), *ours, *theirs])
    steps = {TITLES[row["task"]]: f"{row['steps']:,}" for row in learned}
    drawn = "Our own generator draws the Pathfinder images, so compare their accuracies only with each other. "
    drawn += "A run on Pathfinder is long, so only three attentions are trained."
    header = ["accuracy, %", *(TITLES[task] for task in TABLE_3), *(f"paper: {TITLES[task]}" for task in TABLE_3)]
    notes = [
        f"Test accuracy. Steps: {', '.join(map(' '.join, steps.items()))}.",
        noise_note(learned),
        "A dash: not trained. Text, Retrieval and Image need files from other sites. Paper: table 3, tuned for each "
        "attention.",
        drawn if any(row["task"] == "pathfinder" for row in learned) else "",
        training_note(learned),
    ]
    return [table(header, lines), " ".join(filter(None, notes))]


def noise_note(rows: list[dict]) -> str:
    """Return the standard error of an accuracy on ListOps, and how far apart the accuracies of several seeds are."""
    of_seeds = [r["accuracy"] for r in rows if (r["task"], r["attention"], r["status"]) == ("listops", NOISE, "ok")]
    if not of_seeds:
        return ""
    share, examples = of_seeds[0], TASKS["listops"].examples["test"]
    error = 100 * math.sqrt(share * (1 - share) / examples)
    text = f"With {examples:,} test examples, the standard error on ListOps is {error:.1f} points."
    spread = 100 * (max(of_seeds) - min(of_seeds))
    return f"{text} {len(of_seeds)} seeds of `{NOISE}` differ by up to {spread:.1f} points." if spread else text


def training_note(rows: list[dict]) -> str:
    """Return the accuracies on training examples. Rows of earlier versions have none."""
    of_task = {}
    for row in sorted(rows, key=lambda row: (list(ATTENTIONS).index(row["attention"]), row["seed"])):
        if row.get("train_accuracy") is not None:
            name = f"`{row['attention']}`" + (f" with seed {row['seed']}" if row["seed"] != SEED else "")
            of_task.setdefault(TITLES[row["task"]], []).append(f"{name} {100 * row['train_accuracy']:.1f} %")
    texts = "; ".join(f"{task}: {', '.join(accuracies)}" for task, accuracies in of_task.items())
    return f"Accuracy on the first training examples, of the same number: {texts}." if texts else ""
