"""python train.py -m: each job is a process, a failed one does not stop the others, and signals end the sweep.

The sweep runs in the process of the test. Its jobs are a program that does not import torch, or calls of tests.e2e.run.
"""

import json
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

from hydra_plugins import process_launcher
from tests.e2e import TINY, python_path, run, train

pytest_plugins = ["tests.e2e"]
PROGRAM = """
import json, os, signal, sys, time

if os.environ.get("STAND_IN") and "hydra.mode=RUN" in sys.argv:
    rank, job = os.environ.get("RANK", "alone"), dict(word.lstrip("+").split("=", 1) for word in sys.argv[1:])
    os.write(1, (json.dumps([rank, sys.argv[1:]]) + "\\n").encode())  # at once: another job writes here too
    if rank != "alone":
        open(rank, "w").close()
        while not (os.path.exists("0") and os.path.exists("1")):  # torchrun ends both when one has ended
            time.sleep(0.01)
    if job["prompt"] == "SIGTERM":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)
    if job["prompt"] == "wait":
        time.sleep(20)
        open("ended", "w").close()
    if job["prompt"] == "SIGINT":
        os.kill(os.getppid(), signal.SIGINT)
        sys.exit(130)
    sys.exit(3 if job["seed"] == "3" else 0)

from conf.cli import is_output_dir_given, launch, output_dir, sweep_name

def probe(config):
    print(config.prompt, config.seed, output_dir().name, sweep_name(), is_output_dir_given())

if __name__ == "__main__":
    launch(probe, "sample", literal=LITERAL)
"""


@pytest.fixture
def probe(tmp_path, monkeypatch, capfd):
    """Run the program in an empty folder. Return its outcome, and the rank and arguments of each stand-in job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", python_path())

    def sweep(*overrides: str, literal: str | None = None, stand_in: str = "yes"):
        monkeypatch.setenv("STAND_IN", stand_in)
        process_launcher.failed_jobs.clear()
        (tmp_path / "probe.py").write_text(PROGRAM.replace("LITERAL", repr(literal)))
        outcome = run(str(tmp_path / "probe.py"), "checkpoint=none", *overrides)
        out, err = capfd.readouterr()
        return outcome, [json.loads(line) for line in out.splitlines()], err

    return sweep


@pytest.fixture
def in_process(monkeypatch):
    """Run the jobs of a sweep in this process, too."""

    class Job:
        def __init__(self, command: list[str]):
            self.command = command

        def wait(self) -> int:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(process_launcher, "failed_jobs", [])
                outcome = run(*self.command[1:])
            print(outcome.out, end="")
            print(outcome.err, end="", file=sys.stderr)
            return outcome.code

    monkeypatch.setattr(process_launcher, "failed_jobs", [])  # An earlier test may have failed jobs.
    monkeypatch.setattr(process_launcher.subprocess, "Popen", Job)


def test_jobs_are_processes_that_know_their_sweep_and_one_that_fails_does_not_stop_the_others(probe):
    text = "prompt=1, ${x} = 'é'"
    sweep, jobs, _ = probe("seed=3,4", "-m", "hydra.sweep.dir=sweeps/a", text, "top_k=null", literal="prompt")
    assert sweep.out.splitlines() == ["job 1 of 2: seed=3", "job 2 of 2: seed=4"]
    assert sweep.code == 2 and sweep.err.splitlines() == [
        "error: job 1 of 2 (seed=3) failed with exit status 3",
        "error: jobs of the sweep failed (0); see their errors above",
    ]
    alone = [probe(*words[1:], literal="prompt", stand_in="")[0].ok().out for _, words in jobs]
    assert alone == ["1, ${x} = 'é' 3 0 a True\n", "1, ${x} = 'é' 4 1 a True\n"]


def test_the_folder_of_a_job_can_be_named_by_its_settings(probe):
    """The name has an equals sign and a comma, and Hydra once could not read it in the command of a job."""
    name = "hydra.sweep.subdir=${hydra:job.override_dirname}"
    sweep, jobs, _ = probe("seed=1,2", "prompt=none", "-m", "hydra.sweep.dir=sweeps/a", name)
    assert sweep.ok().out.splitlines() == ["job 1 of 2: seed=1", "job 2 of 2: seed=2"]
    folders = [f"checkpoint=none,prompt=none,seed={seed}" for seed in (1, 2)]
    alone = [probe(*words[1:], stand_in="")[0].ok().out for _, words in jobs]
    assert alone == [f"none {seed} {folder} a True\n" for seed, folder in zip((1, 2), folders, strict=True)]


def test_torchrun_starts_a_job_on_several_processes_and_adds_a_few_lines_to_an_error(probe):
    sweep, jobs, err = probe("seed=3", "prompt=none", "-m", "hydra.launcher.nproc_per_node=2")
    assert (sweep.code, sorted(rank for rank, _ in jobs)) == (2, ["0", "1"])
    assert sweep.err.startswith("error: job 1 of 1 (checkpoint=none seed=3 prompt=none) failed with exit status 3")
    assert "Traceback" not in err and len(err.splitlines()) < 10
    (folder,) = Path("multirun").glob("*/*")  # Hydra's default: a day and a time
    job = probe(*jobs[0][1][1:], stand_in="")[0].ok()
    assert job.out == f"none 3 0 {folder.name} False\n"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_sweep_after_the_current_job(probe, name):
    """A terminal sends SIGINT to all processes. SIGTERM goes to the process of the sweep, which passes it on."""
    sweep, jobs, _ = probe(f"prompt={name}", "seed=1,2", "-m")
    assert sweep.code == 128 + signal.Signals[name] and len(jobs) == 1
    assert sweep.err == f"{name}: the sweep ends; jobs not started: 1 of 2\n"


def test_a_signal_before_the_job_exists_ends_the_job_too(probe, tmp_path, monkeypatch):
    """A SIGTERM between the line of a job and its process once waited for the end of the job."""
    start = process_launcher.subprocess.Popen

    def start_late(*arguments):
        signal.raise_signal(signal.SIGTERM)
        return start(*arguments)

    monkeypatch.setattr(process_launcher.subprocess, "Popen", start_late)
    sweep, *_ = probe("-m", "seed=1,2", "prompt=wait")
    assert sweep.code == 128 + signal.SIGTERM and "jobs not started: 1 of 2" in sweep.err
    assert not (tmp_path / "ended").exists()


def test_a_sweep_prints_the_output_of_each_job_and_ends_with_its_report(workplace, in_process):
    """The folder has a comma, which separates the runs of python -m bench.report. The first job fails."""
    ended = run("train.py", "-m", *TINY, "hydra.sweep.dir='sweep,1'", "model.n_head=3,2", "train.max_steps=2")
    first, second, *lines = ended.out.splitlines()
    assert (first, second) == ("job 1 of 2: model.n_head=3", "job 2 of 2: model.n_head=2")
    assert lines[0].startswith("model  ") and lines[-1] == "report of the sweep in sweep,1/report.html"
    assert ended.code == 2 and ended.err.splitlines()[1:] == [
        "error: job 1 of 2 (model.n_head=3) failed with exit status 2",
        "error: jobs of the sweep failed (0_flash2); see their errors above",
    ]
    page = Path("sweep,1/report.html").read_text()
    data = re.search(r'<script type="application/json" id="data">(.*)</script>', page)[1]
    assert [run["name"] for run in json.loads(data)["runs"]] == ["1_flash2"]
    assert "Failed jobs: 0_flash2" in page


def stop_after_each_job(monkeypatch) -> None:
    """Send SIGINT to the sweep at the end of a job."""
    wait = process_launcher.subprocess.Popen.wait
    stopping = lambda job: (wait(job), signal.raise_signal(signal.SIGINT))[0]  # noqa: E731
    monkeypatch.setattr(process_launcher.subprocess.Popen, "wait", stopping)


@pytest.mark.parametrize("plus", ["", "++"])
def test_a_sweep_that_begins_from_another_run_has_no_command(workplace, in_process, monkeypatch, plus):
    """With checkpoint.resume=auto, the jobs that were not started would begin without the other run."""
    train("first", "train.max_steps=1").ok()
    stop_after_each_job(monkeypatch)
    resume = f"{plus}checkpoint.resume=first", "hydra.sweep.dir=sweep", "wandb.id=null"
    stopped = run("train.py", "-m", *TINY, *resume, "train.max_steps=2,3")
    assert stopped.err == "SIGINT: the sweep ends; jobs not started: 1 of 2\n"


def test_the_command_of_a_stopped_sweep_trains_the_rest_and_passes_over_the_finished_runs(
    workplace, in_process, monkeypatch
):
    """The sweep's folder has a comma. SIGINT comes at the end of the first of two runs."""
    with monkeypatch.context() as patch:
        stop_after_each_job(patch)
        sweep = "train.seed=1,2", "train.max_steps=1", "++hydra.sweep.dir='sweep,1'"
        stopped = run("train.py", "-m", *TINY, *sweep)
    assert stopped.code == 128 + signal.SIGINT and not Path("sweep,1/1_flash2").exists()
    told, command = stopped.err.splitlines()
    assert told == "SIGINT: the sweep ends; jobs not started: 1 of 2; to continue the sweep:"
    python, program, *words = shlex.split(command)
    assert (python, Path(program).name) == ("python", "train.py")
    continued = run("train.py", *words).ok()
    assert continued.out.count("continuing after step 1,") == 1 and "report of the sweep in" in continued.out
    assert len(list(Path("sweep,1").glob("*/checkpoints/step-00000001.pt"))) == 2


def refused(*overrides: str) -> str:
    outcome = run("train.py", *TINY, *overrides)
    assert (outcome.code, outcome.out) == (2, "")
    (sentence,) = outcome.err.splitlines()
    return sentence


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("-m hydra.launcher.nproc_per_node=0", ["hydra.launcher.nproc_per_node=0 is out of range; give at least 1"]),
        ("-m hydra.launcher.nproc_per_node=two", ["hydra.launcher.nproc_per_node", "two"]),
        ("hydra.launcher.nproc_per_node=2", ["needs -m", "torchrun --nproc_per_node=2"]),
        ("-m model=gpt2,gpt3", ["model=gpt3 is unknown"]),
        (
            "-m checkpoint.dir=runs/a train.seed=1,2",
            ["runs/a is shared by the jobs 0_flash2 and 1_flash2", "checkpoint.dir=runs/${hydra:job.num}"],
        ),
        (
            "-m wandb.mode=offline wandb.id=abc train.seed=1,2",
            ["wandb.id=abc is shared by the jobs 0_flash2 and 1_flash2; leave it unset, and each job gets its own"],
        ),
    ],
)
def test_a_mistake_is_refused_before_the_first_job(workplace, overrides, words):
    folder = "hydra.sweep.dir=sweep" if "-m" in overrides else "hydra.run.dir=run"
    sentence = refused(folder, *overrides.split())
    assert [word for word in words if word not in sentence] == []


def test_the_jobs_of_a_sweep_do_not_share_the_wandb_run_of_the_environment(workplace, in_process, monkeypatch):
    """`wandb sync` merged their metrics into one run."""
    monkeypatch.setenv("WANDB_RUN_ID", "abc")
    sweep = "-m", "hydra.sweep.dir=sweep", "train.seed=1,2", "train.max_steps=1"
    assert "WANDB_RUN_ID=abc is shared by the jobs 0_flash2 and 1_flash2" in refused(*sweep, "wandb.mode=offline")
    run("train.py", *TINY, *sweep, "wandb.mode=disabled").ok()


def test_a_sweep_under_torchrun_is_refused(workplace, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "start python with -m hydra.launcher.nproc_per_node=GPUS" in refused("-m", "train.seed=1,2")


def test_jobs_with_their_own_checkpoints_are_continued(workplace, in_process):
    for job in (0, 1):
        train(f"first/{job}", f"train.seed={job + 1}", f"checkpoint.dir=runs/{job}", "train.max_steps=1").ok()
    options = "-m", *TINY, "train.seed=1,2", "checkpoint.resume=auto", "checkpoint.dir='runs/${hydra:job.num}'"
    assert run("train.py", *options, "train.max_steps=2").ok().out.count("continuing after step 1,") == 2
    assert sorted(path.name for path in Path("runs").iterdir()) == ["0", "1"]
