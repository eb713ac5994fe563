"""The report at the end of a sweep. conf/config.yaml names this class, and Hydra calls it after train.py -m."""

from pathlib import Path

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from errors import UserError
from hydra_plugins import process_launcher


class SweepReport(Callback):
    """Compare the runs of a sweep on one page, report.html in the sweep's folder."""

    def on_multirun_end(self, config: DictConfig, **_) -> None:
        from bench.report.page import write_page  # Not above, so that a single run does not pay for the import.
        from bench.report.runs import read_runs

        folder = Path(config.hydra.sweep.dir)
        try:
            write_page(read_runs([str(folder)]), [], folder / "report.html", process_launcher.failed_jobs)
            print(f"report of the sweep in {folder / 'report.html'}")
        except UserError as error:
            print(f"no report of the sweep: {error}")
