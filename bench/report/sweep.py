"""What a sweep ends with: conf/config.yaml has Hydra call this after python train.py -m."""

from pathlib import Path

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from errors import UserError
from trainer.distributed.world import started


class SweepReport(Callback):
    """Compares the runs of a sweep on one page, report.html in the sweep's folder."""

    def on_multirun_end(self, config: DictConfig, **_) -> None:
        if started()[0] > 0:
            return
        from bench.report.page import write_page  # only here: a single run does not pay for the import
        from bench.report.runs import read_runs

        folder = Path(config.hydra.sweep.dir)
        try:
            write_page(read_runs([str(folder)]), [], folder / "report.html")
            print(f"report of the sweep in {folder / 'report.html'}")
        except UserError as error:
            print(f"no report of the sweep: {error}")
