"""The perplexities of table gpt2: runs of train.py that continue after their time limit, and their Markdown."""

import os
import signal

import numpy as np
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

import train
from bench.common.timing import Cpu
from bench.paper import perplexities
from bench.paper.perplexities import OTHER_SEED, SEED
from bench.paper.settings import PaperSettings
from bench.paper.tables import gpt2_training
from bench.paper.training_steps import speed_cell
from errors import UserError
from tests.e2e import at_call

STEPS = 4


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Make tokens that a model can learn, and a new current folder."""
    ids = np.random.default_rng(0).integers(0, 4, 200).astype(np.uint16)
    (tmp_path / "web").mkdir()
    for split in ("train", "val"):
        ids.tofile(tmp_path / "web" / f"{split}.bin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["worker"])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield PaperSettings(size="smoke", tokens="web", steps=STEPS)
    torch.set_num_threads(threads)


def measured(settings, attention="flash2", seed=SEED, **changes):
    GlobalHydra.instance().clear()
    timed = speed_cell("ours", attention, "gpt2-nano", 16, 1, settings)
    cell = perplexities.perplexity_cell(timed, settings, seed) | changes
    [row] = perplexities.measure(cell, Cpu(), settings)
    assert row["status"] == "ok"
    return row["perplexity"]


@pytest.mark.slow
def test_a_run_that_reaches_its_time_limit_continues_where_it_stopped(settings, monkeypatch, tmp_path):
    """The perplexity is the same, bit for bit. The limit leaves time to save, and train.py has the recipe."""
    alarms, configs, step, run, alarm = [], [], train.train_step, train.train, signal.alarm
    monkeypatch.setattr(train, "train", lambda config, *args: configs.append(config) or run(config, *args))
    whole = measured(settings)
    assert 4 < whole < 40_000, "below the vocabulary's size, the perplexity of an untrained model"
    [config] = configs
    assert (config.train.sequences, config.train.batch_size, config.model.dropout) == (2, 1, 0.1)
    assert (config.optimizer.lr, config.train.max_steps, config.train.seed) == (1e-3, STEPS, SEED)
    monkeypatch.setattr(signal, "alarm", lambda seconds: alarms.append(seconds) or alarm(seconds))
    monkeypatch.setattr(train, "train_step", at_call(3, lambda: os.kill(os.getpid(), signal.SIGALRM), step))
    with pytest.raises(TimeoutError, match=r"^step 3 of 4 at timeout_s=600; the same command continues from there$"):
        measured(settings)
    assert alarms == [540, 0]
    monkeypatch.setattr(train, "train_step", at_call(2, lambda: pytest.fail("it began again"), step))
    assert measured(settings) == whole
    assert not any((tmp_path / perplexities.FOLDER).iterdir())


@pytest.mark.slow
def test_attentions_learn_the_same_and_seeds_do_not(settings):
    """Without dropout, which each attention draws in its own way."""
    plain, other = measured(settings, "naive", dropout=0.0), measured(settings, seed=OTHER_SEED, dropout=0.0)
    assert measured(settings, dropout=0.0) == pytest.approx(plain, rel=1e-3)
    assert other != pytest.approx(plain, rel=1e-3)


def test_a_mistake_in_the_tokens_names_the_setting(settings):
    settings.tokens = "nowhere"
    with pytest.raises(UserError, match="tokens=nowhere cannot be used"):
        measured(settings)


FULL = PaperSettings()


def row(attention, **values):
    cell = speed_cell("ours", attention, "gpt2", 1024, 32, FULL) | {"status": "ok"}
    if values:
        return cell | {"measured": "perplexity"} | values
    return cell | {"tokens_per_second": 299_900, "tflops": 123.6, "peak_gib": 5.04}


NEW = {"tokens": "web", "steps": 1000, "seed": 1, "global_batch_size": 128, "dropout": 0.1, "lr": 1e-3}
OLD = NEW | {"steps": 300}


def test_the_cells_are_all_attentions_of_gpt2_and_a_second_seed(settings):
    cells = gpt2_training.cells(PaperSettings(tokens=settings.tokens))
    runs = [cell for cell in cells if cell["measured"] == "perplexity"]
    names = [name for name in gpt2_training.NAMES if name != "huggingface"]
    assert [(cell["attention"], cell["seed"]) for cell in runs] == [*((name, 1) for name in names), ("flash2", 2)]
    assert {cell["model"] for cell in runs} == {"gpt2"}
    assert all(NEW.items() <= (cell | {"seed": 1}).items() and cell["batch_size"] == 32 for cell in runs)


def test_perplexities_of_different_recipes_are_not_mixed():
    """The recipe of the newest row counts."""
    rows = [row("naive"), row("flash2"), row("naive", **OLD, perplexity=421.0)]
    made = gpt2_training.markdown(rows)
    assert "421.00" in made and "Perplexity: validation, on `web` after 300 steps of 128 x 1,024 tokens, " in made
    made = gpt2_training.markdown([*rows, row("flash2", **NEW, perplexity=65.04)])
    assert "65.04" in made and "421.00" not in made
    assert "on `web` after 1,000 steps of 128 x 1,024 tokens, dropout 0.1, learning rate 0.001. Each attention" in made


def test_perplexities_of_other_seeds_have_lines_of_their_own():
    learned = row("flash2", **NEW, perplexity=100.0), row("flash2", **NEW | {"seed": 2}, perplexity=98.75)
    made = gpt2_training.markdown([row("naive"), row("flash2"), row("naive", **NEW, perplexity=99.0), *learned])
    assert "| gpt2 | `flash2`, seed 2 | - | - | - | - | - | 98.75 | - | - | - | - |" in made
    assert "Seeds 1 and 2 of `flash2` differ by 1.25. Each attention draws its own dropout masks. " in made
    failed = learned[1] | {"perplexity": None, "status": "failed"}
    assert "Seeds 1 and 2" not in gpt2_training.markdown([row("flash2"), learned[0], failed])


def test_the_note_has_the_cost_of_the_papers_perplexity():
    """400,000 x 512 x 1024 tokens at 299,900 a second are 8.094 days, which are rounded up."""
    made = gpt2_training.markdown([row("flash2")])
    assert "its 400k steps: 210 billion tokens, 8.10 days of one such device with `flash2`" in made
