"""TensorBoard: the same metrics, plotted against steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.loggers.base import Metrics, PackageLogger


class TensorBoardLogger(PackageLogger):
    """Write event files to `folder`. A row is on disk when `log` returns.

    TensorBoard hides the steps that earlier event files in `folder` have after `resumed_step`, or all their steps if
    this is a new run (None).
    """

    def __init__(self, folder: Path, resumed_step: int | None, on_failure: Callable[[str], None]):
        from torch.utils.tensorboard import SummaryWriter  # an optional dependency

        first_step = 0 if resumed_step is None else resumed_step + 1
        super().__init__("TensorBoard", SummaryWriter(str(folder), purge_step=first_step), on_failure)

    def write(self, run: Any, step: int, tokens: int, metrics: Metrics) -> None:
        for key, value in ({"tokens": tokens} | metrics).items():
            run.add_scalar(key, value, step)
        run.flush()

    def end(self, run: Any, failed: bool) -> None:
        run.close()
