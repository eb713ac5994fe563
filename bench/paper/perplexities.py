"""Validation perplexity after training on real tokens with train.py, to compare attentions with each other.

A run leaves its checkpoints in a folder of its own, and the next call continues it. So a run can be longer than
timeout_s. The finished run's folder is deleted.
"""

import hashlib
import json
import math
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import train
from bench.common.results import environment
from bench.paper.settings import PaperSettings
from bench.quality import open_gpt2_tokens
from bench.report.runs import read_runs
from conf.cli import launch
from errors import as_text

SEED, OTHER_SEED = 1, 2
STEP_SEQUENCES = {"full": 128, "smoke": 2}
DROPOUT, LEARNING_RATE = 0.1, 1e-3
RECIPE = "tokens", "steps", "global_batch_size", "dropout", "lr"
VALIDATION_TOKENS = 360_448
CHECKPOINT_STEPS = 100  # a killed process loses at most these steps; at the time limit, a run saves first
RESERVE_S = 60  # of a cell's time limit: the seconds to import torch, and to save a checkpoint at the end
FOLDER = Path("outputs/paper-perplexities")


def perplexity_cell(speed_cell: dict, settings: PaperSettings, seed: int = SEED) -> dict:
    """Return the cell that trains the model whose steps `speed_cell` times. It has the same micro-batches."""
    recipe = Path(settings.tokens).name, settings.steps, STEP_SEQUENCES[settings.size], DROPOUT, LEARNING_RATE
    return speed_cell | {"measured": "perplexity", **dict(zip(RECIPE, recipe, strict=True)), "seed": seed}


def recipe_text(row: dict) -> str:
    """Return the recipe of a row in words."""
    batch = f"{row['global_batch_size']} x {row['context_length']:,} tokens"
    steps = f"`{row['tokens']}` after {row['steps']:,} steps of {batch}"
    return f"{steps}, dropout {row['dropout']:g}, learning rate {row['lr']:g}"


def measure(cell: dict, gpu: object, settings: PaperSettings) -> Iterator[dict]:
    """Yield one row with the perplexity. All runs of a seed begin with the same weights and see the same tokens.

    Raises:
        TimeoutError: The time limit of the cell is over. The run is saved, and the next call continues it.
    """
    open_gpt2_tokens(settings.tokens, cell["context_length"])  # raises a UserError that names tokens=
    folder = folder_of(cell)
    with sigterm_after(settings.timeout_s - min(RESERVE_S, settings.timeout_s // 2)):
        train_in(folder, cell, settings.tokens)
    [run] = read_runs([str(folder)])
    perplexities = run.series("val/perplexity")  # the last step is evaluated, unless a signal comes meanwhile
    if not perplexities:
        done = f"step {run.rows[-1]['step']:,} of {cell['steps']:,} at timeout_s={settings.timeout_s}"
        raise TimeoutError(f"{done}; {settings.same_command} continues from there")
    [found] = perplexities.values()
    if found is None or not math.isfinite(found):
        raise ArithmeticError(f"the perplexity after {cell['steps']} steps is {found}")
    shutil.rmtree(folder)
    yield {"perplexity": found, "status": "ok"}


def folder_of(cell: dict) -> Path:
    """Return the folder of a cell's run. Each recipe and each commit has its own."""
    recipe = json.dumps([cell, environment()["commit"]], sort_keys=True)
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    return FOLDER.absolute() / f"{cell['model']}-{cell['attention']}-seed-{cell['seed']}-{digest}"


@contextmanager
def sigterm_after(seconds: int) -> Iterator[None]:
    """Send SIGTERM to this process if the body is not done after some seconds."""
    handler = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGTERM))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


def train_in(folder: Path, cell: dict, tokens: str) -> None:
    """Run train.py in this process, from the newest checkpoint in `folder` if there is one, to the end or SIGTERM."""
    settings = {
        "attention": cell["attention"],
        "model": cell["model"],
        "model.context_length": cell["context_length"],
        "model.dropout": cell["dropout"],
        "data": "tokens",
        "data.dir": as_text(tokens),
        "train.batch_size": cell["batch_size"],
        "train.global_batch_size": cell["global_batch_size"],
        "train.max_steps": cell["steps"],
        "train.seed": cell["seed"],
        "train.compile": cell["compiled"],
        "train.eval_interval": cell["steps"],
        "train.eval_tokens": VALIDATION_TOKENS,
        "train.sample_tokens": 0,
        "optimizer.lr": cell["lr"],
        "optimizer.warmup_steps": cell["steps"] // 10,
        "checkpoint.interval": CHECKPOINT_STEPS,
        "checkpoint.keep": 1,
        "checkpoint.resume": "auto",
        "wandb.mode": "disabled",
        "hydra.run.dir": as_text(folder),
    }
    sys.argv = ["train.py", *(f"{key}={value}" for key, value in settings.items())]
    try:
        launch(train.main, "config", typed=False)
    except SystemExit as ended:
        if ended.code != 128 + signal.SIGTERM:
            raise
