"""Weights & Biases: the same metrics, plotted against tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errors import UserError, check_choice, described
from trainer.loggers.base import Logger, Metrics


@dataclass
class WandbConfig:
    """Weights & Biases."""

    mode: str = "offline"
    """online: upload while training. offline: write to the output folder, for `wandb sync`. disabled: no wandb."""
    project: str = "gpt2-flash"
    """Project that the run belongs to."""
    name: str | None = None
    """Name of the run; null lets wandb choose one."""
    group: str | None = None
    """Group of runs to show together; null is the name of the sweep's folder, or no group outside a sweep."""
    tags: list[str] | None = None
    """Tags of the run; null is its attention, model, corpus and precision."""
    entity: str | None = None
    """User or team that owns the project; null is wandb's default for the account."""

    def __post_init__(self) -> None:
        check_choice("wandb.mode", self.mode, ("online", "offline", "disabled"))
        if not self.project:
            raise UserError("wandb.project is empty; give it a name, or set wandb.mode=disabled")


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
            f"wandb.mode={config.mode} cannot start a run ({described(error)}); fix that, "
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
