"""trackio: wandb's calls for a dashboard on this machine. `trackio show` opens it."""

import io
import os
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

from errors import UserError, described
from trainer.folders import check_writable
from trainer.loggers.base import Metrics, PackageLogger
from trainer.loggers.wandb import WandbConfig

UPLOADS = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class TrackioLogger(PackageLogger):
    """Log to trackio's database, which is in TRACKIO_DIR, by default below ~/.cache/huggingface.

    A run is named after wandb.name and wandb.id, so that the id identifies it. Its config has the tags.
    """

    def __init__(
        self,
        config: WandbConfig,
        run_config: dict[str, Any],
        resumed_step: int | None,
        on_failure: Callable[[str], None],
    ):
        run, last_step = _start_run(config, run_config)
        super().__init__("trackio", run, on_failure, redone=range((resumed_step or 0) + 1, last_step + 1))

    def write(self, run: Any, step: int, tokens: int, metrics: Metrics) -> None:
        run.log({"tokens": tokens} | metrics, step=step)

    def end(self, run: Any, failed: bool) -> None:
        import trackio

        with redirect_stdout(io.StringIO()):
            trackio.finish()  # unlike run.finish(), not again when the program ends


def check_trackio() -> None:
    """Refuse environment variables that let trackio upload the run, and a folder for its database that it cannot write.

    trackio would lose the metrics of the run, and only say so in a warning at its end.
    """
    for variable in UPLOADS:
        if value := os.environ.get(variable):
            raise UserError(f"{variable}={value} lets trackio upload, but wandb.backend=trackio is local; unset it")
    if folder := os.environ.get("TRACKIO_DIR"):
        check_writable(Path(folder), "TRACKIO_DIR")


def _start_run(config: WandbConfig, run_config: dict[str, Any]) -> tuple[Any, int]:
    """Return the run, new or continued, and the last step that trackio already has of it."""
    import trackio  # an optional dependency
    from huggingface_hub import constants
    from trackio.sqlite_storage import SQLiteStorage

    name = f"{config.name}-{config.id}" if config.name else config.id
    try:
        last_step = SQLiteStorage.get_max_step_for_run(config.project, name) or 0
        # Otherwise trackio asks the Hugging Face hub for the name of the account, if there is a token.
        offline = mock.patch.object(constants, "HF_HUB_OFFLINE", True)
        with redirect_stdout(io.StringIO()), offline:
            run = trackio.init(
                config.project,
                name,
                group=config.group,
                config=run_config | {"tags": config.tags},
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
    except Exception as error:  # trackio raises many types
        raise UserError(
            f"wandb.backend=trackio cannot start a run ({described(error)}); fix the cause, or set wandb.mode=disabled"
        ) from error
    return run, last_step
