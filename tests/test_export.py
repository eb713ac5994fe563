"""export.py writes folders that Hugging Face loads as GPT-2."""

import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from model import huggingface
from model.attention import NaiveConfig, build_attention
from model.gpt2 import GPT2, ModelConfig
from tests.e2e import load, run
from trainer.checkpoint.files import write_file

pytest_plugins = ["tests.e2e"]


def test_exported_model_gives_the_same_logits_in_transformers(trained, exported):
    transformers = pytest.importorskip("transformers")
    state = load(trained / "checkpoints" / "step-00000030.pt")
    ours = GPT2(ModelConfig(**state["model_config"]), build_attention(NaiveConfig())).eval()
    ours.load_state_dict(state["model"])
    theirs, report = transformers.GPT2LMHeadModel.from_pretrained(exported, output_loading_info=True)
    assert not any(report.values())
    tokens = torch.arange(64).view(2, 32) * 4
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(tokens).logits, ours(tokens), rtol=1e-5, atol=1e-5)
    assert theirs.config.eos_token_id == 256 and theirs.config.n_positions == 32


def test_exported_model_of_bytes_has_a_tokenizer(exported):
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(exported)
    text = "Hello, 語\n \x00"
    assert tokenizer(text)["input_ids"] == list(text.encode()) and tokenizer.decode(list(text.encode())) == text
    assert tokenizer.eos_token_id == 256 and tokenizer.model_max_length == 32


def test_exported_files_follow_the_umask(trained, tmp_path):
    before = os.umask(0o027)
    try:
        run("export.py", f"checkpoint={trained}", f"to={tmp_path / 'model'}").ok()
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()} == {0o640}


def test_folder_with_something_in_it_is_refused_and_left_as_it_is(trained, tmp_path):
    (tmp_path / "config.json").write_text("mine")
    outcome = run("export.py", f"checkpoint={trained}", f"to={tmp_path}")
    assert outcome.code == 2
    (sentence,) = outcome.err.splitlines()
    assert f"to={tmp_path}" in sentence and "give a new one" in sentence
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == "mine"


def test_a_checkpoint_that_lacks_a_weight_is_refused_and_nothing_is_written(trained, tmp_path):
    state = load(trained / "checkpoints" / "step-00000030.pt")
    del state["model"]["h.0.mlp.c_fc.weight"]
    write_file(tmp_path / "step-00000030.pt", state)
    outcome = run("export.py", f"checkpoint={tmp_path}", f"to={tmp_path / 'model'}")
    (sentence,) = outcome.err.splitlines()
    assert outcome.code == 2 and "step-00000030.pt is not from this version" in sentence and "c_fc.weight" in sentence
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("place", ["/proc/model", "config.json/model"])  # each gives a different error
def test_a_folder_that_cannot_be_made_is_refused(trained, tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    Path("config.json").touch()
    outcome = run("export.py", f"checkpoint={trained}", f"to={place}")
    (sentence,) = outcome.err.splitlines()
    assert outcome.code == 2 and f"to={place} cannot be written (" in sentence


def test_a_full_disk_is_reported_and_leaves_no_files(trained, tmp_path, monkeypatch):
    place = tmp_path / "model"

    def full(weights, path, metadata):
        path.write_bytes(b"half of it")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(huggingface, "save_file", full)
        outcome = run("export.py", f"checkpoint={trained}", f"to={place}")
    (sentence,) = outcome.err.splitlines()
    assert outcome.code == 2 and f"to={place} cannot be written (" in sentence and "No space left" in sentence
    assert not list(place.iterdir())
    run("export.py", f"checkpoint={trained}", f"to={place}").ok()


def test_destination_is_asked_for(trained):
    outcome = run("export.py", f"checkpoint={trained}")
    assert outcome.code == 2 and "to=..." in outcome.err
