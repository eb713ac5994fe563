"""The Slurm launcher. submitit runs its jobs on this machine."""

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from submitit import AutoExecutor

import conf
from conf.schema import register
from conf.slurm import SlurmJobs
from tests.e2e import ROOT, TINY, curve, run, start, wait_for_step

pytest_plugins = ["tests.e2e"]
STEPS = 200  # more than two processes take until the signal reaches both


def processes_of(sweep: Path) -> list[int]:
    """Return the ids of the processes that run a sweep's jobs. Their command lines name the sweep."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # The process has ended.
            words = file.read_text()
            found += [int(file.parent.name)] if "submitit.core._submit" in words and str(sweep) in words else []
    return found


@pytest.mark.slow  # Two processes start, end and start again.
def test_a_job_out_of_time_is_saved_queued_again_and_ends(workplace):
    """submitit starts two processes, and both get the signal that their time is up."""
    submitit = ("-m", "hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2", "hydra.sweep.dir=sweep")
    submitit += ("hydra.launcher.timeout_min=5",)  # In a short job, submitit takes the signal as a time-out.
    sweep = start(str(ROOT / "train.py"), *submitit, *TINY, f"train.max_steps={STEPS}", "checkpoint.resume=auto")
    wait_for_step(3, "sweep/0_flash2", sweep)
    processes = processes_of(Path("sweep").absolute())
    assert len(processes) == 2
    for process in processes:
        os.kill(process, signal.SIGUSR2)
    out, err = sweep.communicate(timeout=240)
    assert sweep.returncode == 0, err
    assert [step for step, *_ in curve("sweep/0_flash2")] == list(range(1, STEPS + 1))
    (log,) = Path("sweep").glob(".submitit/*/*_0_log.out")
    assert re.match(rf"job \d+ \(.*train.max_steps={STEPS}.*\) logs to {log.absolute()}\n", out)
    told = log.read_text()
    assert "2 x CPU (ddp)" in told and "this job is timed-out" in told
    (stopped,) = re.findall(r"SIGUSR2 after step (\d+)", told)
    assert int(stopped) < STEPS and f"continuing after step {stopped}," in told


def test_slurm_gets_a_process_for_each_gpu():
    register()
    with initialize_config_dir(str(Path(conf.__file__).parent), version_base="1.3"):
        config = compose("config", ["hydra/launcher=slurm", "hydra.launcher.gpus_per_node=4"], return_hydra_config=True)
    launcher = OmegaConf.to_container(config.hydra.launcher, resolve=False)
    assert launcher["_target_"].endswith("SlurmLauncher") and launcher["tasks_per_node"] == "${.gpus_per_node}"
    assert config.hydra.launcher.tasks_per_node == 4
    assert launcher["max_num_timeout"] > 0, "otherwise submitit does not queue a job again after a time-out"


def test_a_sweep_prints_the_id_and_the_log_of_each_job_at_the_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(AutoExecutor, "map_array", AutoExecutor.map_array)  # undo what the callback replaces
    SlurmJobs().on_multirun_start(OmegaConf.create({"hydra": {"launcher": {"_target_": "...submitit..."}}}))
    jobs = AutoExecutor(folder=tmp_path, cluster="debug").map_array(len, [["a=1", "b=2"], ["a=2"]])
    assert capsys.readouterr().out.splitlines() == [
        f"job {job.job_id} ({settings}) logs to {job.paths.stdout}"
        for job, settings in zip(jobs, ("a=1 b=2", "a=2"), strict=True)
    ]


def test_without_slurm_a_sentence_names_what_is_missing(workplace, monkeypatch):
    monkeypatch.setenv("PATH", str(workplace))  # It has no srun.
    outcome = run("train.py", "-m", "hydra/launcher=slurm", *TINY, "hydra.sweep.dir=sweep")
    (sentence,) = outcome.err.splitlines()
    assert outcome.code == 2 and sentence.startswith('error: Could not detect "srun"')
    assert sentence.endswith("slurm cluster; start this command on a Slurm cluster, or without hydra/launcher=slurm")
