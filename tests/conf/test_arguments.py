"""Slips that the words of a command line show, before Hydra reads them."""

from functools import partial

import pytest
from hydra._internal.core_plugins.basic_launcher import BasicLauncherConf
from hydra.core.config_store import ConfigStore

from conf.arguments import slip_in
from hydra_plugins import process_launcher
from tests.e2e import TINY, python_path, run

pytest_plugins = ["tests.e2e"]


def refused(*arguments: str) -> str:
    outcome = run("train.py", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    (line,) = outcome.err.splitlines()
    return line.removeprefix("error: ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "-m hydra.run.dir=runs/a train.seed=1,2",
            "hydra.run.dir=runs/a is for a single run; with -m, set hydra.sweep.dir=runs/a",
        ),
        (
            "hydra.mode=MULTIRUN ++hydra.run.dir=runs/a",
            "hydra.run.dir=runs/a is for a single run; with -m, set hydra.sweep.dir=runs/a",
        ),
        (
            "hydra.sweep.dir=runs/a",
            "hydra.sweep.dir=runs/a needs -m; for a single run, set hydra.run.dir=runs/a",
        ),
    ],
    ids=["folder of a run in a sweep", "mode", "folder of a sweep in a run"],
)
def test_an_output_folder_that_the_start_ignores_is_refused(workplace, arguments, sentence):
    """The outputs once went to multirun or outputs, without a word."""
    assert refused(*TINY, *arguments.split()) == sentence
    assert [path.name for path in workplace.iterdir()] == ["tokens"]


@pytest.mark.parametrize(
    "arguments",
    ["-m hydra.sweep.dir=a", "hydra.run.dir=a", "hydra.mode=RUN hydra.sweep.dir=a hydra.run.dir=a/0", "-m", ""],
)
def test_an_output_folder_that_is_used_is_accepted(arguments):
    assert slip_in(arguments.split()) is None


@pytest.mark.parametrize("launcher", ["basic", "submitit_local"])
def test_a_sweep_in_its_folder_works_with_other_launchers(workplace, monkeypatch, launcher):
    """The launchers themselves give hydra.run.dir to their jobs. Ours has the name of Hydra's, basic."""
    store = partial(ConfigStore.instance().store, "basic", BasicLauncherConf, "hydra/launcher")
    monkeypatch.setattr(process_launcher, "register", store)
    monkeypatch.setenv("PYTHONPATH", python_path())
    run("train.py", "-m", f"hydra/launcher={launcher}", *TINY, "hydra.sweep.dir=runs/a", "train.max_steps=1").ok()
    assert {path.name for path in workplace.iterdir()} == {"runs", "tokens"}
    assert (workplace / "runs/a/0_flash2/metrics.jsonl").exists()
