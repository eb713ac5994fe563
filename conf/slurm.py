"""The job ids and log files that a sweep on Slurm prints. conf/config.yaml names this class, and Hydra calls it."""

from functools import wraps

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class SlurmJobs(Callback):
    """Print the id and the log file of each job. The launcher, hydra-submitit-launcher, only waits for them."""

    def on_multirun_start(self, config: DictConfig, **_) -> None:
        if "submitit" not in config.hydra.launcher._target_:
            return
        from submitit import AutoExecutor  # an optional dependency

        submit = AutoExecutor.map_array

        @wraps(submit)
        def submit_and_print(executor: AutoExecutor, launcher: object, overrides: list, *others) -> list:
            jobs = submit(executor, launcher, overrides, *others)
            for job, settings in zip(jobs, overrides, strict=True):
                print(f"job {job.job_id} ({' '.join(settings)}) logs to {job.paths.stdout}", flush=True)
            return jobs

        AutoExecutor.map_array = submit_and_print
