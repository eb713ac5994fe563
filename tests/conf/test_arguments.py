"""Slips that the words of a command line show, before Hydra reads them."""

import re
from functools import partial
from operator import attrgetter

import pytest
from hydra._internal.core_plugins.basic_launcher import BasicLauncherConf
from hydra.core.config_store import ConfigStore
from submitit import AutoExecutor

from conf import cli
from conf.arguments import OTHER_VALUES, SETTINGS, slip_in
from conf.schema import Config
from hydra_plugins import process_launcher
from tests.e2e import ROOT, TINY, python_path, run

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
    [
        "-m hydra.sweep.dir=a",
        "hydra.run.dir=a",
        "hydra.mode=RUN hydra.sweep.dir=a hydra.run.dir=a/0",
        "-m",
        "",
        "--cfg hydra hydra.sweep.dir=a",
        "hydra.run.dir=.",
    ],
)
def test_an_output_folder_that_is_used_is_accepted(arguments):
    assert slip_in(arguments.split(), is_training=True) is None


@pytest.mark.parametrize(
    "argument",
    [
        *("hydra.run.dir=", "++hydra.run.dir=''", "hydra.run.dir=' '", "hydra.sweep.dir=", "data.dir=", "+data.dir=''"),
        *("checkpoint.dir=", "checkpoint.resume=", "model.pretrained="),
    ],
)
def test_a_path_without_a_name_is_refused(workplace, argument):
    """The outputs, or the tokens, once went to the current folder, without a word."""
    sweep = ["-m"] if "sweep" in argument else []
    key = argument.lstrip("+").partition("=")[0]
    assert refused(*sweep, *TINY, argument) == f"{argument} is empty; give a path, or leave {key} out"
    assert [path.name for path in workplace.iterdir()] == ["tokens"]


@pytest.mark.parametrize("launcher", ["basic", "submitit_local"])
def test_a_sweep_in_its_folder_works_with_other_launchers(workplace, monkeypatch, launcher):
    """The launchers themselves give hydra.run.dir to their jobs. Ours has the name of Hydra's, basic."""
    store = partial(ConfigStore.instance().store, "basic", BasicLauncherConf, "hydra/launcher")
    monkeypatch.setattr(process_launcher, "register", store)
    monkeypatch.setattr(AutoExecutor, "map_array", AutoExecutor.map_array)  # undo what conf/slurm.py replaces
    monkeypatch.setenv("PYTHONPATH", python_path())
    run("train.py", "-m", f"hydra/launcher={launcher}", *TINY, "hydra.sweep.dir=runs/a", "train.max_steps=1").ok()
    assert {path.name for path in workplace.iterdir()} == {"runs", "tokens"}
    assert (workplace / "runs/a/0_flash2/metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("--batch_size=12", "--batch_size=12 is not an option; write train.batch_size=12"),
        ("--block-size", "--block-size is not an option; write model.context_length=..."),
        (
            "--dtype=float16",
            "--dtype=float16 is not an option; write precision=... (docs/from-nanogpt.md has the values)",
        ),
        (
            "--attention=sdpa",
            "--attention=sdpa is not an option; write settings as key=value, without dashes (see --help)",
        ),
        ("--multi", "--multi is not an option; write settings as key=value, without dashes (see --help)"),
        ("-max_iters=5", "-max_iters=5 is not an option; write train.max_steps=5"),
    ],
    ids=["nanoGPT's name", "no value", "other values", "our name", "shortened", "one dash"],
)
def test_an_option_that_hydra_does_not_have_is_refused(workplace, argument, sentence):
    """Hydra printed eight lines of usage."""
    assert refused(argument) == sentence


def test_other_programs_have_no_settings_of_nanogpt():
    remedy = "write settings as key=value, without dashes (see --help)"
    assert slip_in(["--batch_size=12"], is_training=False) == f"--batch_size=12 is not an option; {remedy}"


@pytest.mark.parametrize(
    "argument",
    ["--cfg=job", "--multirun", "--config-name=config", "--info", "--", "prompt=--x=1", "-m", "-cn=x"],
)
def test_options_of_hydra_are_accepted(argument):
    assert slip_in([argument], is_training=True) is None


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("model.block_size=64", "model.context_length"),
        ("train.lr=1", "optimizer.lr"),
        ("+train.learning_rate=1", "optimizer.lr"),
        ("max_iters=5", "train.max_steps"),
        ("out_dir=runs", "hydra.run.dir"),
        ("dtype=float16", "precision"),
    ],
)
def test_a_name_of_nanogpt_leads_to_our_setting(workplace, override, meant):
    """The similar name vocab_size was suggested for block_size."""
    assert f"is not a setting (did you mean {meant}?); choose among" in refused(override)


def test_the_names_of_nanogpt_are_those_of_the_docs():
    page = (ROOT / "docs/from-nanogpt.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", page, re.MULTILINE)
    documented = {name: re.findall(r"[\w.]+(?==)", settings) for name, settings in rows}
    names = SETTINGS | OTHER_VALUES
    assert names.keys() == documented.keys() | {"lr"}
    assert [name for name in documented if names[name] not in documented[name]] == []


@pytest.mark.parametrize("setting", sorted({*SETTINGS.values(), *OTHER_VALUES.values()} - {"hydra.run.dir"}))
def test_the_settings_for_names_of_nanogpt_exist(setting):
    attrgetter(setting)(Config())


@pytest.mark.parametrize(("rank", "given", "exists"), [(0, [], True), (1, [], False), (1, ["hydra.run.dir=run"], True)])
def test_only_the_first_process_has_an_output_folder_of_its_own(workplace, monkeypatch, rank, given, exists):
    """Each process that torchrun started left an empty folder in outputs during the run, and forever if killed."""
    seen = []
    monkeypatch.setattr(cli, "started", lambda: (rank, 2))
    monkeypatch.setattr("sys.argv", ["train.py", *TINY, *given])
    cli.launch(lambda config: seen.append(cli.output_dir().exists()), "config", typed=False)
    assert seen == [exists]
