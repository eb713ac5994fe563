"""Where metrics go: metrics.jsonl and the console always, wandb if it is on.

Metrics are a flat dict of floats with the README's names ("train/loss", "perf/mfu", ...), logged with the step and the
tokens seen. Evaluation metrics may come in the same call as training metrics or in a call of their own.
"""

import os
from pathlib import Path
from typing import Any

from rich.console import Console

from trainer.loggers.base import Loggers, Metrics, finite
from trainer.loggers.console import ConsoleLogger
from trainer.loggers.jsonl import JsonlLogger, truncate_after
from trainer.loggers.wandb import WandbConfig, WandbLogger, server_problem

__all__ = ["Loggers", "Metrics", "WandbConfig", "finite", "server_problem", "start_loggers"]


def start_loggers(
    folder: str | os.PathLike[str],
    *,
    max_steps: int,
    wandb: WandbConfig,
    run_config: dict[str, Any],
    resumed_step: int | None = None,
    console: Console | None = None,
) -> Loggers:
    """Return the loggers of a run that writes to `folder`: metrics.jsonl, the console, and wandb unless disabled.

    `run_config` is the composed config as plain values. A run resumed at `resumed_step` continues metrics.jsonl after
    that step. A new run (None) in an old folder keeps the old file as metrics.previous.jsonl.
    """
    screen = ConsoleLogger(max_steps, console=console)
    remote = WandbLogger(wandb, run_config, folder, on_failure=screen.message)
    path = Path(folder) / "metrics.jsonl"
    try:
        if resumed_step is not None:
            truncate_after(path, resumed_step)
        elif path.exists():
            path.replace(path.with_name("metrics.previous.jsonl"))
        rows = JsonlLogger(path, on_failure=screen.message)
    except OSError:
        remote.close(failed=True)
        raise
    # Loggers closes the last one first, so that wandb's last message still reaches the console.
    return Loggers([rows, screen, remote])
