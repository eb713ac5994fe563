"""Where metrics go: metrics.jsonl and the console always, wandb if it is on.

Metrics are a flat dict of floats with the README's names, logged with the step and the tokens seen.
"""

from pathlib import Path
from typing import Any

from rich.console import Console

from trainer.loggers.base import Loggers, Metrics, describe_changes, finite, setting_text
from trainer.loggers.console import ConsoleLogger
from trainer.loggers.jsonl import JsonlLogger, truncate_after
from trainer.loggers.wandb import WandbConfig, WandbLogger, complete, server_problem

__all__ = [
    "Loggers",
    "Metrics",
    "WandbConfig",
    "complete",
    "describe_changes",
    "finite",
    "server_problem",
    "setting_text",
    "start_loggers",
]


def start_loggers(
    folder: Path,
    *,
    max_steps: int,
    wandb: WandbConfig,
    run_config: dict[str, Any],
    labels: dict[str, Any] | None = None,
    resumed_step: int | None = None,
    console: Console | None = None,
) -> Loggers:
    """Return the loggers of a run that writes to `folder`.

    `run_config` is the composed config as plain values. `labels` are the defaults of wandb's group and tags. A run
    resumed at `resumed_step` continues metrics.jsonl after that step. A new run (None) in an old folder keeps the old
    file as metrics.previous.jsonl.
    """
    screen = ConsoleLogger(max_steps, console=console)
    wandb, origins = complete(wandb, labels or {})
    for line in origins:
        screen.message(line)
    remote = WandbLogger(wandb, run_config, folder, on_failure=screen.message)
    path = folder / "metrics.jsonl"
    if resumed_step is not None:
        truncate_after(path, resumed_step)
    elif path.exists():
        path.replace(path.with_name("metrics.previous.jsonl"))
    # Loggers closes the last one first, so that wandb's last message still reaches the console.
    return Loggers([JsonlLogger(path, on_failure=screen.message), screen, remote])
