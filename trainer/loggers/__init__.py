"""Where metrics go: metrics.jsonl and the console always, wandb, trackio and TensorBoard if they are on.

Metrics are a flat dict of floats with the README's names, logged with the step and the tokens seen.
"""

import importlib.util
from pathlib import Path
from typing import Any

from rich.console import Console

from errors import UserError
from trainer.folders import keep_previous
from trainer.loggers.base import Loggers, Metrics, describe_changes, finite, setting_text
from trainer.loggers.console import ConsoleLogger
from trainer.loggers.jsonl import JsonlLogger, last_step, truncate_after
from trainer.loggers.tensorboard import TensorBoardLogger
from trainer.loggers.trackio import TrackioLogger, check_trackio
from trainer.loggers.wandb import WandbConfig, WandbLogger, complete, server_problem, with_id

__all__ = [
    "Loggers",
    "Metrics",
    "WandbConfig",
    "check_loggers",
    "complete",
    "describe_changes",
    "finite",
    "server_problem",
    "setting_text",
    "start_loggers",
]


def check_loggers(wandb: WandbConfig, tensorboard: bool) -> WandbConfig:
    """Refuse loggers that cannot start. Return the settings of wandb, with an id if the run has none yet."""
    mode = complete(wandb, {})[0].mode
    if tensorboard:
        check_installed("tensorboard", "tensorboard=true")
    if wandb.backend == "trackio" and mode != "disabled":
        check_installed("trackio", "wandb.backend=trackio")
        check_trackio()
    return with_id(wandb)


def start_loggers(
    folder: Path,
    *,
    max_steps: int,
    has_mfu: bool = True,
    wandb: WandbConfig,
    run_config: dict[str, Any],
    tensorboard: bool = False,
    labels: dict[str, Any] | None = None,
    resumed_step: int | None = None,
    is_branch: bool = False,
    evaluated: int = 0,
    console: Console | None = None,
) -> Loggers:
    """Return the loggers of a run that writes to `folder`.

    `has_mfu` says whether rows may have perf/mfu. `run_config` is the composed config as plain values. `labels` are the
    defaults of wandb's group and tags. A run resumed at `resumed_step`, whose last evaluation was at step `evaluated`,
    continues metrics.jsonl there. A new run (None), or one that continues another folder's run (`is_branch`), keeps an
    old file under another name.
    """
    screen = ConsoleLogger(max_steps, has_mfu=has_mfu, console=console)
    wandb, origins = complete(wandb, labels or {})
    for line in origins:
        screen.message(line)
    path = folder / "metrics.jsonl"
    packages = []
    if tensorboard:
        packages.append(TensorBoardLogger(folder / "tensorboard", resumed_step, screen.message))
    if wandb.mode != "disabled" and wandb.backend == "trackio":
        packages.append(TrackioLogger(wandb, run_config, resumed_step, screen.message))
    elif wandb.mode != "disabled":
        redone = range(0) if resumed_step is None else range(resumed_step + 1, last_step(path) + 1)
        packages.append(WandbLogger(wandb, run_config, folder, screen.message, redone))
    if resumed_step is None or is_branch:
        keep_previous(path)
    else:
        truncate_after(path, resumed_step, evaluated)
    # Loggers closes the last one first, so that the last message of a package still reaches the console.
    return Loggers([JsonlLogger(path, on_failure=screen.message), screen, *packages])


def check_installed(package: str, setting: str) -> None:
    """Refuse a setting that needs a package which is not installed."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f'{setting} needs the package {package}; run pip install -e ".[{package}]"')
