"""Weights & Biases: the same metrics, plotted against tokens."""

import glob
import os
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from errors import UserError, check_choice, described
from trainer.loggers.base import Metrics, PackageLogger

BACKENDS = ("wandb", "trackio")
MODES = ("online", "offline", "disabled")
DEFAULTS = {"mode": "offline", "project": "gpt2-flash"}
VARIABLES = {key: f"WANDB_{key.upper()}" for key in ("mode", "project", "name", "tags", "entity")}
VARIABLES |= {"group": "WANDB_RUN_GROUP", "id": "WANDB_RUN_ID"}


@dataclass
class WandbConfig:
    """Weights & Biases. A setting that is null is taken from wandb's environment variable, such as WANDB_MODE."""

    mode: str | None = None
    """online: upload while training. offline (default): write to the output folder, for `wandb sync`. disabled: no
    wandb. With trackio, offline is the only mode that logs."""
    project: str | None = None
    """Project that the run belongs to; by default gpt2-flash."""
    name: str | None = None
    """Name of the run; by default wandb chooses one."""
    group: str | None = None
    """Group of runs to show together (WANDB_RUN_GROUP); by default the name of the sweep's folder, or no group."""
    tags: list[str] | None = None
    """Tags of the run; by default its attention, model, corpus and precision."""
    entity: str | None = None
    """User or team that owns the project; by default wandb's default for the account. trackio has no accounts."""
    id: str | None = None
    """Id of the run (WANDB_RUN_ID); by default a new one. A resumed run has the id of its checkpoint and so continues
    its run in wandb. null then begins another run, for example for a branch."""
    backend: str = "wandb"
    """wandb, or trackio: the same calls, for a dashboard on this machine without an account."""

    def __post_init__(self) -> None:
        if self.mode is not None:
            check_choice("wandb.mode", self.mode, MODES)
        check_choice("wandb.backend", self.backend, BACKENDS)
        if self.backend == "trackio" and self.mode == "online":
            raise UserError("wandb.mode=online needs wandb.backend=wandb; trackio logs locally, so leave mode out")
        if self.project == "":
            raise UserError("wandb.project= is empty; give a name, or set wandb.mode=disabled")
        for key in ("project", "name", "group", "id"):  # An offline run is not compared with the limits of the server.
            if len(value := getattr(self, key) or "") > 128:
                raise UserError(f"wandb.{key}={value} has {len(value)} characters; use at most 128")
        for tag in self.tags or []:
            if not 1 <= len(tag) <= 64:
                raise UserError(f"wandb.tags=[{tag}] has a tag of {len(tag)} characters; use 1 to 64")


def with_id(config: WandbConfig) -> WandbConfig:
    """Return the settings with the id of the run. The checkpoints keep it, so that a resumed run continues the run."""
    return replace(config, id=config.id or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(6))


def complete(config: WandbConfig, defaults: dict[str, Any]) -> tuple[WandbConfig, list[str]]:
    """Fill each null of `config` from the environment, else from `defaults`.

    Return the settings, and a line for each environment variable that is used or overridden.
    """
    given = {key: os.environ[variable] for key, variable in VARIABLES.items() if os.environ.get(variable)}
    if "mode" in given and config.mode is None:
        check_choice("WANDB_MODE", given["mode"], MODES)
    lines, values = [], {key: value for key, value in asdict(config).items() if value is not None}
    for key, text in given.items():
        value = text.split(",") if key == "tags" else text
        is_used = values.setdefault(key, value) == value
        lines.append(f"{VARIABLES[key]}={text} {'is used' if is_used else f'is overridden by wandb.{key}'}")
    return WandbConfig(**DEFAULTS | defaults | values), lines


class WandbLogger(PackageLogger):
    """Log to wandb, with all files below `folder`.

    `redone` are the steps that the run logs again after a resume. If the folder has files of this run, wandb has these
    steps already and keeps their first values.
    """

    def __init__(
        self,
        config: WandbConfig,
        run_config: dict[str, Any],
        folder: Path,
        on_failure: Callable[[str], None],
        redone: range = range(0),
    ):
        remedy = f", and `wandb sync {folder}/wandb/*run-*` uploads what is missing"
        is_continued = any(folder.glob(f"wandb/*run-*-{glob.escape(config.id or '')}"))
        redone = redone if is_continued else range(0)
        super().__init__("wandb", _start_run(config, run_config, folder), on_failure, remedy, redone)

    def write(self, run: Any, step: int, tokens: int, metrics: Metrics) -> None:
        run.log({"step": step, "tokens": tokens} | metrics, step=step)

    def end(self, run: Any, failed: bool) -> None:
        run.finish(exit_code=int(failed))


def _start_run(config: WandbConfig, run_config: dict[str, Any], folder: Path) -> Any:
    import wandb  # a run without wandb does not import it

    folder.mkdir(parents=True, exist_ok=True)  # otherwise wandb writes elsewhere
    where = ""
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
        if config.mode == "online":
            if problem := server_problem(settings):
                raise UserError(f"wandb.mode=online finds {problem}, or set wandb.mode=offline")
            where = f" at {wandb.setup(settings).settings.base_url}"
        labels = {key: getattr(config, key) for key in ("project", "name", "group", "tags", "entity")}
        run = wandb.init(**labels, id=config.id, resume="allow", config=run_config, settings=settings)
        run.define_metric("tokens")
        run.define_metric("step")
        run.define_metric("*", step_metric="tokens")
    except UserError:
        raise
    except Exception as error:  # wandb raises many types
        raise UserError(
            f"wandb.mode={config.mode} cannot start a run{where} ({_cause(error)}); fix the cause, "
            f"or set wandb.mode={'offline' if config.mode == 'online' else 'disabled'}"
        ) from error
    return run


def _cause(error: Exception) -> str:
    """Return the cause of an error. The first line of a ValidationError does not name the setting that is refused."""
    from pydantic import ValidationError  # a dependency of wandb

    if not isinstance(error, ValidationError):
        return described(error)
    refused = error.errors()[0]
    return f"wandb's setting {'.'.join(map(str, refused['loc']))}: {refused['msg']}"


def server_problem(settings: Any) -> str | None:
    """Return that there are no credentials for the server of these wandb.Settings, with the remedy, or None."""
    import wandb

    server = wandb.setup(settings).settings.base_url
    if wandb.login(prompt=False, verify=False):
        return None
    return f"no credentials for {server}; run `wandb login` or set WANDB_API_KEY"
