"""Weights & Biases: the same metrics, plotted against tokens."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from errors import UserError, check_choice, described
from trainer.loggers.base import Logger, Metrics

MODES = ("online", "offline", "disabled")
DEFAULTS = {"mode": "offline", "project": "gpt2-flash"}
VARIABLES = {key: f"WANDB_{key.upper()}" for key in ("mode", "project", "name", "tags", "entity")}
VARIABLES["group"] = "WANDB_RUN_GROUP"


@dataclass
class WandbConfig:
    """Weights & Biases. A setting that is null is taken from wandb's environment variable, such as WANDB_MODE."""

    mode: str | None = None
    """online: upload while training. offline (default): write to the output folder, for `wandb sync`. disabled: no
    wandb."""
    project: str | None = None
    """Project that the run belongs to; by default gpt2-flash."""
    name: str | None = None
    """Name of the run; by default wandb chooses one."""
    group: str | None = None
    """Group of runs to show together (WANDB_RUN_GROUP); by default the name of the sweep's folder, or no group."""
    tags: list[str] | None = None
    """Tags of the run; by default its attention, model, corpus and precision."""
    entity: str | None = None
    """User or team that owns the project; by default wandb's default for the account."""

    def __post_init__(self) -> None:
        if self.mode is not None:
            check_choice("wandb.mode", self.mode, MODES)
        if self.project == "":
            raise UserError("wandb.project= is empty; give a name, or set wandb.mode=disabled")
        for key in ("project", "name", "group"):  # An offline run is not compared with the limits of the server.
            if len(value := getattr(self, key) or "") > 128:
                raise UserError(f"wandb.{key}={value} has {len(value)} characters; use at most 128")
        for tag in self.tags or []:
            if not 1 <= len(tag) <= 64:
                raise UserError(f"wandb.tags=[{tag}] has a tag of {len(tag)} characters; use 1 to 64")


def complete(config: WandbConfig, defaults: dict[str, Any]) -> tuple[WandbConfig, list[str]]:
    """Fill each null of `config` from the environment, else from `defaults`.

    Return the settings, and a line for each environment variable that is used or overridden.
    """
    given = {key: os.environ[variable] for key, variable in VARIABLES.items() if os.environ.get(variable)}
    if "mode" in given and config.mode is None:
        check_choice("WANDB_MODE", given["mode"], MODES)
    lines, values = [], {key: value for key, value in asdict(config).items() if value is not None}
    for key, text in given.items():
        lines.append(f"{VARIABLES[key]}={text} {f'is overridden by wandb.{key}' if key in values else 'is used'}")
        values.setdefault(key, text.split(",") if key == "tags" else text)
    return WandbConfig(**DEFAULTS | defaults | values), lines


class WandbLogger(Logger):
    """Log to wandb, with all files below `folder`.

    If wandb fails during the run, `on_failure` reports it once, wandb is off from then on, and training goes on.
    """

    def __init__(
        self, config: WandbConfig, run_config: dict[str, Any], folder: Path, on_failure: Callable[[str], None]
    ):
        self._on_failure, self._folder = on_failure, folder
        self._run = None if config.mode == "disabled" else _start_run(config, run_config, folder)

    def log(self, step: int, tokens: int, metrics: Metrics) -> None:
        self._attempt(lambda run: run.log({"step": step, "tokens": tokens} | metrics, step=step))

    def close(self, failed: bool = False) -> None:
        self._attempt(lambda run: run.finish(exit_code=int(failed)))
        self._run = None

    def _attempt(self, action: Callable[[Any], None]) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:  # wandb raises many types
            self._run = None
            self._on_failure(
                f"wandb failed and is off from here on ({described(error)}); metrics.jsonl goes on, and "
                f"`wandb sync {self._folder}/wandb/*run-*` uploads what is missing"
            )


def _start_run(config: WandbConfig, run_config: dict[str, Any], folder: Path) -> Any:
    import wandb  # a run without wandb does not import it

    folder.mkdir(parents=True, exist_ok=True)  # otherwise wandb writes elsewhere
    try:
        settings = wandb.Settings(
            mode=config.mode,
            root_dir=str(folder),
            silent=True,
            console="off",
            init_timeout=7.0,  # seconds; wandb's default is 90
            finish_timeout=60.0,  # wandb's default has no limit
            finish_timeout_raises=True,
        )
        if config.mode == "online" and (problem := server_problem(settings)):
            raise UserError(f"wandb.mode=online finds {problem}, or set wandb.mode=offline")
        labels = {key: getattr(config, key) for key in ("project", "name", "group", "tags", "entity")}
        run = wandb.init(**labels, config=run_config, settings=settings)
        run.define_metric("tokens")
        run.define_metric("step")
        run.define_metric("*", step_metric="tokens")
    except UserError:
        raise
    except Exception as error:  # wandb raises many types
        raise UserError(
            f"wandb.mode={config.mode} cannot start a run ({described(error)}); fix the cause, "
            f"or set wandb.mode={'offline' if config.mode == 'online' else 'disabled'}"
        ) from error
    return run


def server_problem(settings: Any) -> str | None:
    """Return that there are no credentials for the server of these wandb.Settings, with the remedy, or None."""
    import wandb

    server = wandb.setup(settings).settings.base_url
    if wandb.login(prompt=False, verify=False):
        return None
    return f"no credentials for {server}; run `wandb login` or set WANDB_API_KEY"
