"""Hydra's launcher for `-m`: it starts each job of a sweep as a new process, one after another.

Hydra instantiates only launchers from a package called hydra_plugins. Other projects have such a package too, so this
folder has no __init__.py.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from errors import UserError, as_text, assigned, check_range, values_in

TORCHRUN = str(Path(__file__).with_name("_torchrun.py"))  # Hydra imports each module here that has no _.
failed_jobs: list[str] = []
"""Names of the jobs that ended with an exit status other than 0. Hydra drops what a launcher returns."""


@dataclass
class LauncherConfig:
    """Settings of a sweep, hydra.launcher.KEY=..."""

    _target_: str = "hydra_plugins.process_launcher.ProcessLauncher"
    nproc_per_node: int = 1
    """Processes of a job, one per GPU. With more than one, torchrun starts the job."""


def register() -> None:
    """Replace Hydra's default launcher, which Hydra calls basic and which runs all jobs in one process."""
    Plugins.instance()  # Hydra stores its launcher when it loads the plugins.
    ConfigStore.instance().store(group="hydra/launcher", name="basic", node=LauncherConfig)


class ProcessLauncher(Launcher):
    """Run each job as `python PROGRAM OVERRIDES`, or with torchrun, on the terminal of the sweep."""

    def __init__(self, nproc_per_node: int):
        self.nproc_per_node = nproc_per_node
        self.process: subprocess.Popen | None = None
        self.stopped_by: int | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.loader = config, hydra_context.config_loader
        self.owners: dict[str, Path] = {}  # folders of the jobs by setting=value, for what jobs cannot share
        failed_jobs.clear()

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list:
        """Run the jobs. Return nothing, because a job's process returns nothing.

        SIGINT, SIGTERM and SIGHUP end the sweep when the current job has saved its state and ended.
        """
        if "RANK" in os.environ:
            raise UserError(
                "-m does not work under torchrun; start python with -m hydra.launcher.nproc_per_node=GPUS instead, and "
                "the sweep starts each job with torchrun"
            )
        check_range("hydra.launcher.nproc_per_node", self.nproc_per_node, 1)
        shared = set.intersection(*map(set, job_overrides))
        jobs = [self._compose(i, list(job), shared) for i, job in enumerate(job_overrides, start=initial_job_idx)]
        heeded = [x for x in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(x) != signal.SIG_IGN]
        handlers = {number: signal.signal(number, self._stop) for number in heeded}
        try:
            for number, job in enumerate(jobs, start=1):
                self._run(f"{initial_job_idx + number} of {initial_job_idx + len(jobs)}", *job)
                if self.stopped_by:
                    left = f"the sweep ends; jobs not started: {len(jobs) - number} of {len(jobs)}"
                    print(f"{signal.Signals(self.stopped_by).name}: {left}{self._remedy()}", file=sys.stderr)
                    sys.exit(128 + self.stopped_by)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return []

    def _remedy(self) -> str:
        """Return the command that continues the sweep, or "" if the jobs begin from another run or do not train."""
        is_training = isinstance(OmegaConf.select(self.config, "checkpoint"), DictConfig)
        if not is_training or values_in(sys.argv[1:]).get("checkpoint.resume", "auto") != "auto":
            return ""
        places = {"checkpoint.resume": "auto", "hydra.sweep.dir": self.config.hydra.sweep.dir}
        kept = [word for word in sys.argv[1:] if values_in([word]).keys().isdisjoint(places)]
        words = [*map(shlex.quote, [os.path.relpath(sys.argv[0]), *kept]), *starmap(assigned, places.items())]
        return f"; to continue the sweep:\n  python {' '.join(words)}"

    def _compose(self, number: int, overrides: list[str], shared: set[str]) -> tuple[str, str, list[str]]:
        """Compose the configuration of a job, which its process composes again, for the name of its folder.

        Return the name, a title (the settings that differ from the other jobs) and the arguments of the program.
        """
        config = self.loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.num = number
        HydraConfig.instance().set_config(config)  # for ${hydra:job.num}
        folder = Path(self.config.hydra.sweep.dir, config.hydra.sweep.subdir)
        given = self.config.hydra.overrides
        own = ["hydra.mode=RUN", f"hydra.job.num={number}", f"hydra.run.dir={as_text(folder)}"]
        own.append(f"hydra.sweep.subdir={as_text(config.hydra.sweep.subdir)}")
        flags = [x for x in sys.argv[1:] if x not in ("-m", "--multirun", *given.task, *given.hydra)]  # --config-dir
        # Hydra resolved ${...} in hydra.sweep.subdir without quotes.
        of_hydra = [x for x in given.hydra if not x.lstrip("+").startswith("hydra.sweep.subdir=")]
        arguments = [*flags, *overrides, *of_hydra, *own]
        title = " ".join(override for override in overrides if override not in shared) or " ".join(overrides)
        self._refuse_shared(config, folder)
        return folder.name, title, arguments

    def _refuse_shared(self, config: DictConfig, folder: Path) -> None:
        """Raise UserError if an earlier job has the same checkpoint.dir, or the same id in wandb."""
        remedy = "give each job its own, such as 'checkpoint.dir=runs/${hydra:job.num}'"
        owned = [("checkpoint.dir", OmegaConf.select(config, "checkpoint.dir"), remedy)]
        logs = config.get("wandb")  # only training has it
        if logs and (logs.mode or os.environ.get("WANDB_MODE")) != "disabled":
            key, value = ("wandb.id", logs.id) if logs.id else ("WANDB_RUN_ID", os.environ.get("WANDB_RUN_ID"))
            owned.append((key, value, "leave it unset, and each job gets its own id"))
        for key, value, remedy in owned:
            if value and (other := self.owners.setdefault(f"{key}={value}", folder)) != folder:
                raise UserError(f"{key}={value} is shared by the jobs {other.name} and {folder.name}; {remedy}")

    def _run(self, position: str, name: str, title: str, arguments: list[str]) -> None:
        print(f"job {position}: {title}", flush=True)
        torchrun = [TORCHRUN, "--standalone", f"--nproc_per_node={self.nproc_per_node}"]
        launcher, main = torchrun if self.nproc_per_node > 1 else [], sys.modules["__main__"]
        program = ["-m", main.__spec__.name] if main.__spec__ else [main.__file__]
        self.process = subprocess.Popen([sys.executable, *launcher, *program, *arguments])
        if self.stopped_by:  # a signal that came before the job existed
            self.process.terminate()
        status = self.process.wait()
        if status and not self.stopped_by:
            failed_jobs.append(name)
            ended = f"exit status {status}" if status > 0 else signal.Signals(-status).name
            print(f"error: job {position} ({title}) failed with {ended}", file=sys.stderr)

    def _stop(self, number: int, frame: object) -> None:
        """Note the signal. Only SIGTERM is forwarded: a terminal sends SIGINT and SIGHUP to the job itself."""
        self.stopped_by = number
        if number == signal.SIGTERM and self.process:
            self.process.terminate()
