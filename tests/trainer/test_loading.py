"""model.pretrained=RUN: training on other data from the weights of a run of this trainer."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from model.attention import NaiveConfig, build_attention
from model.gpt2 import GPT2, ModelConfig
from tests.e2e import TINY, load, run, train, write_tokens
from trainer.checkpoint.config import CheckpointConfig
from trainer.checkpoint.files import write_file
from trainer.checkpoint.load import load_resumed
from trainer.distributed.world import ALONE, World
from trainer.loading import load_weights, read_shape

pytest_plugins = ["tests.e2e"]
STILL = ("optimizer.lr=0", "optimizer.min_lr=0", "train.max_steps=1", "data.dir=other")


@pytest.fixture
def other(workplace):
    """Write tokens of another length."""
    write_tokens(workplace / "other")
    path = workplace / "other/train.bin"
    path.write_bytes(path.read_bytes()[:-200])


def test_a_run_is_fine_tuned_on_other_data(trained, other):
    refused = train("tuned", f"checkpoint.resume={trained}", "train.max_steps=40", "data.dir=other")
    assert refused.code == 2 and "a new run from its weights with model.pretrained=CHECKPOINT" in refused.err
    train("tuned", f"model.pretrained={trained}", *STILL, "model.context_length=16").ok()
    start, tuned = load(trained / "checkpoints/step-00000030.pt"), load("tuned/checkpoints/step-00000001.pt")
    start["model"]["wpe.weight"] = start["model"]["wpe.weight"][:16]
    torch.testing.assert_close(tuned["model"], start["model"], rtol=0, atol=0)
    assert tuned["model_config"]["n_layer"] == 2 and tuned["best_loss"] > 0 == tuned["skipped"]
    resumed = run("train.py", "checkpoint.resume=tuned", "hydra.run.dir=tuned", "train.max_steps=2").ok()
    assert "changed     since the checkpoint: train.max_steps 1 -> 2\n" in resumed.out


def test_all_processes_take_the_weights_of_the_checkpoint_that_the_first_one_finds(trained, capsys):
    """The run is still saving: this process finds step 30, the first one found step 20."""
    newest, older = (load(trained / f"checkpoints/step-000000{step}.pt") for step in (30, 20))
    older_path = trained / "checkpoints/step-00000020.pt"

    class Second(World):
        def from_first(self, value):
            assert value == str(trained / "checkpoints/step-00000030.pt")
            return str(older_path)

    weights = []
    for world in (ALONE, Second(1, size=2)):
        model = GPT2(ModelConfig(**newest["model_config"]), build_attention(NaiveConfig()))
        load_weights(model, str(trained), world)
        weights.append(model.state_dict())
    torch.testing.assert_close(weights, [newest["model"], older["model"]], rtol=0, atol=0)
    assert "step-00000020.pt (step 20)" in capsys.readouterr().out


def test_a_preset_gives_way_to_the_sizes_of_the_weights(trained, other):
    """It still gives the context. The same line continues the run."""
    Path("mine/model").mkdir(parents=True)
    Path("mine/model/longer.yaml").write_text("n_layer: 7\nn_head: 4\nn_embd: 64\ncontext_length: 16\n")
    beside = [setting for setting in TINY if not setting.startswith("model.")]
    line = "--config-dir=mine", "model=longer", f"model.pretrained={trained}", *beside, "data.dir=other"
    for steps in (1, 2):
        run("train.py", *line, "hydra.run.dir=tuned", "checkpoint.resume=auto", f"train.max_steps={steps}").ok()
    expected = {"n_layer": 2, "n_head": 2, "n_embd": 32, "context_length": 16}
    state = load("tuned/checkpoints/step-00000002.pt")
    assert expected.items() <= state["model_config"].items() and expected.items() <= state["config"]["model"].items()


def test_a_size_on_the_command_line_is_not_passed_over(trained, other, exported):
    """The model took the sizes of the weights without a word. Equal sizes are no contradiction."""
    equal = "model.n_head=2", "model.n_kv_head=2", "model.vocab_size=257", "++model.n_layer=2"
    for source in (trained, exported):
        train("tuned", f"model.pretrained={source}", *STILL, *equal, "model.vocab_size=null").ok()
        for setting, found in (("n_layer=7", 2), ("n_head=1", 2), ("n_embd=64", 32), ("vocab_size=300", 257)):
            refused = train("new", f"model.pretrained={source}", *STILL, f"model.{setting}")
            in_braces = train("new", f"model.pretrained={source}", *STILL, f"model={{{setting.replace('=', ':')}}}")
            assert in_braces == refused
            sentence = f"model.{setting} contradicts model.pretrained={source}, which has {found}; leave"
            assert refused.code == 2
            assert refused.err == f"error: {sentence} model.{setting.partition('=')[0]} out\n"
        assert not Path("new").exists()
        continued = "checkpoint.resume=auto", "hydra.run.dir=tuned", "train.max_steps=2"
        refused = run("train.py", *continued, "++model.n_layer=7")
        assert refused.code == 2 and f"model.n_layer=7 contradicts model.pretrained={source}, which" in refused.err
        run("train.py", *continued, "model.n_layer=2").ok()
        shutil.rmtree("tuned")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.context_length=64", "exceeds the 32 positions of model.pretrained="),
        ("data.tokenizer=gpt2", "was trained on byte tokens, not on gpt2 tokens; prepare the data with data.tokenizer"),
    ],
)
def test_what_does_not_fit_a_run_is_refused(trained, other, setting, words):
    outcome = run("train.py", *TINY, f"model.pretrained={trained}", *STILL, setting)
    assert outcome.code == 2 and words in outcome.err


def test_a_new_run_from_the_weights_of_another_has_its_own_pattern(workplace):
    """The file has changed since the other run. A continued run keeps its matrix."""
    own = ("model.context_length=256", "attention=block_sparse", "attention.pattern=mine.npy")
    before, after = np.eye(2, dtype=bool), np.tri(2, dtype=bool)
    np.save("mine.npy", before)
    train("old", "train.max_steps=1", *own).ok()
    np.save("mine.npy", after)
    tuned = train("tuned", "train.max_steps=1", "model.pretrained=old", *own).ok()
    assert (load("tuned/checkpoints/step-00000001.pt")["pattern"].numpy() == after).all()
    assert "has changed" not in tuned.out
    continued = train("old", "train.max_steps=2", "checkpoint.resume=old", *own).ok()
    assert (load("old/checkpoints/step-00000002.pt")["pattern"].numpy() == before).all()
    assert "attention.pattern=mine.npy has changed; using the matrix in" in continued.out


@pytest.mark.parametrize(("rank", "lines"), [(0, 2), (1, 0)])
def test_only_the_first_process_tells_that_a_checkpoint_is_damaged(trained, tmp_path, monkeypatch, capsys, rank, lines):
    write_file(tmp_path / "step-00000030.pt", load(trained / "checkpoints/step-00000030.pt"))
    (tmp_path / "step-00000040.pt").write_bytes(b"")
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    read_shape(str(tmp_path), ModelConfig(context_length=32), "byte")
    load_resumed(CheckpointConfig(resume=str(tmp_path)), tmp_path, is_given=True)
    assert capsys.readouterr().out.count("step-00000040.pt is not a readable checkpoint") == lines
