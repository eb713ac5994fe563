"""The short description of a report."""

import pytest
from omegaconf import OmegaConf

from bench.report.headline import facts, headline, shared
from bench.report.runs import read_runs


@pytest.fixture
def runs_of(write_run):
    """Return runs with these settings, one mapping of dotted keys per run."""

    def make(*settings: dict):
        folders = []
        for number, of_run in enumerate(settings):
            folder = write_run(str(number), {1: {"train/loss": 3.0}}, of_run.get("attention.name", "flash2"))
            config = OmegaConf.load(folder / "config.yaml")
            for key, value in of_run.items():
                OmegaConf.update(config, key, value)
            OmegaConf.save(config, folder / "config.yaml")
            folders.append(str(folder))
        return read_runs(folders)

    return make


def test_the_headline_has_what_differs_and_the_rest_is_shared(runs_of):
    """Settings that only one variant has, such as attention.backend, are left out. A context has a comma."""
    runs = runs_of(*({"attention.name": name} for name in ("naive", "sdpa", "flash2")))
    assert headline(runs) == "attention: naive, sdpa, flash2"
    assert shared(runs) == "model gpt2 · context 1,024 · data tokens"
    runs = runs_of({"model.context_length": 1024}, {"model.context_length": 4096})
    assert headline(runs) == "context: 1,024, 4,096"
    assert shared(runs) == "attention flash2 · model gpt2 · data tokens"


def test_models_and_functions_are_named(runs_of):
    wide = {"model.n_layer": 24, "model.n_head": 16, "model.n_embd": 1024}
    own = {"attention.name": "custom", "attention.function": "mine:fast", "model.n_layer": 7}
    runs = runs_of({}, wide, own)
    assert headline(runs).startswith("attention: flash2, mine:fast · model: gpt2, gpt2-medium, layers 7, heads 12")


def test_a_long_headline_is_cut_and_says_so(runs_of):
    keys = "optimizer.lr", "optimizer.beta1", "optimizer.beta2", "train.seed", "train.batch_size"
    runs = runs_of(*({key: number for key in keys} | {"wandb.name": f"run {number}"} for number in range(8)))
    parts = headline(runs).split(" · ")
    assert len(parts) == 4 and parts[-1] == "2 more settings"
    assert all(part.endswith(", ... (8 values)") for part in parts[:3]) and "run 1" not in headline(runs)


def test_runs_that_do_not_differ_and_runs_without_settings_have_no_headline(runs_of, write_run):
    assert headline(runs_of({}, {})) == ""
    bare = write_run("bare", {1: {"train/loss": 3.0}})
    (bare / "config.yaml").unlink()
    runs = read_runs([str(bare)])
    assert (facts(runs[0]), headline(runs), shared(runs)) == ({}, "", "")
