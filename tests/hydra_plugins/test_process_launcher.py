"""python train.py -m: each job is a process, a failed one does not stop the others, and signals end the sweep."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e import ROOT, TINY, Outcome, curve, run, start, train, wait_for_step
from trainer.checkpoint.folder import find

pytest_plugins = ["tests.e2e"]
# A program that prints what a job sees.
PROBE = """
import os, sys
from conf.cli import is_output_dir_given, launch, output_dir, sweep_name

def probe(config):
    rank = os.environ.get("RANK", "alone")
    print(rank, config.prompt, config.seed, output_dir().name, sweep_name(), is_output_dir_given(), flush=True)
    sys.exit(3 if config.seed == 3 else 0)

if __name__ == "__main__":
    launch(probe, "sample", literal="prompt")
"""


def finish(process: subprocess.Popen) -> Outcome:
    out, err = process.communicate(timeout=200)
    return Outcome(process.returncode, out, err)


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """Run the probe in an empty folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "probe.py").write_text(PROBE)
    return lambda *overrides: finish(start("probe.py", "checkpoint=none", *overrides))


def test_jobs_are_processes_that_know_their_sweep_and_one_that_fails_does_not_stop_the_others(probe):
    ended = probe("seed=3,4", "-m", "hydra.sweep.dir=sweeps/a", "prompt=1, ${x} = 'é'", "top_k=null")
    assert ended.out.splitlines() == [
        "job 1 of 2: seed=3",
        "alone 1, ${x} = 'é' 3 0 a True",
        "job 2 of 2: seed=4",
        "alone 1, ${x} = 'é' 4 1 a True",
    ]
    assert ended.code == 2 and ended.err.splitlines() == [
        "error: job 1 of 2 (seed=3) failed with exit status 3",
        "error: jobs of the sweep failed: 0",
    ]


def test_torchrun_starts_a_job_on_several_processes(probe):
    ended = probe("seed=4", "-m", "hydra.launcher.nproc_per_node=2").ok()
    (sweep,) = Path("multirun").glob("*/*")  # Hydra's default: a day and a time
    lines = ended.out.splitlines()
    assert sorted(lines[1:]) == [f"{rank}  4 0 {sweep.name} False" for rank in (0, 1)]


def test_a_sweep_prints_the_output_of_each_job_and_ends_with_its_report(workplace):
    """The folder has a comma, which separates the runs of python -m bench.report. The first job fails."""
    options = "-m", *TINY, "hydra.sweep.dir='sweep,1'", "model.n_head=3,2", "train.max_steps=2"
    ended = finish(start(str(ROOT / "train.py"), *options))
    first, second, *lines = ended.out.splitlines()
    assert (first, second) == ("job 1 of 2: model.n_head=3", "job 2 of 2: model.n_head=2")
    assert lines[0].startswith("GPT-2 of ") and lines[-1] == "report of the sweep in sweep,1/report.html"
    assert ended.code == 2 and ended.err.splitlines()[1:] == [
        "error: job 1 of 2 (model.n_head=3) failed with exit status 2",
        "error: jobs of the sweep failed: 0_flash2",
    ]
    page = Path("sweep,1/report.html").read_text()
    data = re.search(r'<script type="application/json" id="data">(.*)</script>', page)[1]
    assert [run["name"] for run in json.loads(data)["runs"]] == ["1_flash2"]
    assert "Failed jobs: 0_flash2" in page


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_current_job_and_ends_the_sweep(workplace, number):
    """A terminal sends SIGINT to all processes. SIGTERM goes to the process of the sweep alone."""
    options = "-m", *TINY, "hydra.sweep.dir=sweep", "train.seed=1,2", "train.max_steps=100000"
    sweep = start(str(ROOT / "train.py"), *options, start_new_session=True)
    wait_for_step(3, "sweep/0_flash2", sweep)
    (os.killpg if number == signal.SIGINT else os.kill)(sweep.pid, number)
    ended = finish(sweep)
    assert ended.code == 128 + number
    assert ended.err.endswith(f"{number.name}: the sweep ends; 1 of 2 jobs were not started\n")
    assert find("sweep/0_flash2").stem == f"step-{curve('sweep/0_flash2')[-1][0]:08d}"
    assert not Path("sweep/1_flash2").exists()


def refused(*overrides: str) -> str:
    outcome = run("train.py", *TINY, *overrides)
    assert (outcome.code, outcome.out) == (2, "")
    (sentence,) = outcome.err.splitlines()
    return sentence


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("-m hydra.launcher.nproc_per_node=0", ["hydra.launcher.nproc_per_node=0 must be at least 1"]),
        ("-m hydra.launcher.nproc_per_node=two", ["hydra.launcher.nproc_per_node", "two"]),
        ("hydra.launcher.nproc_per_node=2", ["needs -m", "torchrun --nproc_per_node=2"]),
        ("-m model=gpt2,gpt3", ["model=gpt3 is unknown"]),
        (
            "-m checkpoint.dir=runs/a train.seed=1,2",
            ["runs/a is shared by the jobs 0_flash2 and 1_flash2", "checkpoint.dir=runs/${hydra:job.num}"],
        ),
    ],
)
def test_a_mistake_is_refused_before_the_first_job(workplace, overrides, words):
    sentence = refused("hydra.sweep.dir=sweep", *overrides.split())
    assert [word for word in words if word not in sentence] == []


def test_a_sweep_under_torchrun_is_refused(workplace, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "start python with -m hydra.launcher.nproc_per_node=GPUS" in refused("-m", "train.seed=1,2")


def test_jobs_with_their_own_checkpoints_are_continued(workplace, capfd):
    for job in (0, 1):
        train(f"first/{job}", f"train.seed={job + 1}", f"checkpoint.dir=runs/{job}", "train.max_steps=1").ok()
    sweep = "-m", *TINY, "train.seed=1,2", "checkpoint.resume=auto", "checkpoint.dir='runs/${hydra:job.num}'"
    run("train.py", *sweep, "train.max_steps=2").ok()
    assert capfd.readouterr().out.count("continuing after step 1,") == 2
    assert sorted(path.name for path in Path("runs").iterdir()) == ["0", "1"]
