"""python train.py -m ends with a report, of the jobs that trained if others failed."""

import json
import re
from functools import partial
from pathlib import Path

import torch

from tests.e2e import TINY, run

pytest_plugins = ["tests.e2e"]


def sweep(*overrides: str):
    """In a folder with a comma, which separates the runs of python -m bench.report."""
    return run("train.py", "-m", *TINY, "hydra.sweep.dir='sweep,1'", *overrides)


def names() -> list[str]:
    page = Path("sweep,1/report.html").read_text()
    data = re.search(r'<script type="application/json" id="data">(.*)</script>', page)[1]
    return [run["name"] for run in json.loads(data)["runs"]]


def test_a_sweep_ends_with_its_report(workplace):
    out = sweep("attention=naive,sdpa").ok().out
    assert out.endswith("report of the sweep in sweep,1/report.html\n")
    assert names() == ["0_naive", "1_sdpa"]


def test_a_failed_job_ends_neither_the_sweep_nor_its_report(workplace):
    outcome = sweep("model.n_head=3,2", "attention=naive,sdpa")
    assert outcome.code == 2
    one, other, last = outcome.err.splitlines()
    for sentence, job in ((one, "0_naive"), (other, "1_sdpa")):
        assert sentence.startswith("error: model.n_embd=32") and f"(job {job}: " in sentence and "n_head=3" in sentence
    assert last == "error: of the sweep these jobs failed, as told above: 0_naive, 1_sdpa"
    assert names() == ["2_naive", "3_sdpa"]


def test_a_sweep_in_which_nothing_trained_says_so(workplace):
    outcome = sweep("model.n_head=3,5")
    assert outcome.code == 2 and "no report of the sweep: runs=sweep,1 holds no run" in outcome.out
    assert not Path("sweep,1/report.html").exists()


def test_a_job_is_compiled_as_if_it_were_alone(workplace, monkeypatch):
    """For its own context length: compiled for any, as torch does at the second it sees, sdpa is refused."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    sweep("attention=sdpa", "model.context_length=16,32", "train.compile=true").ok()


def test_a_job_is_not_deterministic_because_another_was(workplace, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    sweep("train.deterministic=true,false").ok()
    assert asked == [True, False]
