"""sample.py on checkpoints of this trainer and on a Hugging Face folder."""

import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch

from model import generate as generation
from model.attention import BUILT_IN
from tests.e2e import load, run, train
from trainer.checkpoint.files import write_file

pytest_plugins = ["tests.e2e"]


def sample(*overrides: str):
    return run("sample.py", "device=cpu", "max_tokens=40", *overrides)


def test_same_seed_gives_the_same_text(trained):
    texts = [
        sample(f"checkpoint={trained}", "prompt=1 + 1", "temperature=1", f"seed={seed}").ok().out for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("1 + 1") and len(texts[0]) > 20


def test_several_samples_differ_and_each_starts_with_the_prompt(trained):
    samples = sample(f"checkpoint={trained}", "prompt=7", "num_samples=3", "temperature=1").ok().out.split("-" * 80)
    assert len(set(samples)) == 3
    assert all(text.strip().startswith("7") for text in samples)


def test_temperature_zero_is_deterministic_and_goes_past_the_context(trained):
    """100 tokens with a context of 32 are the same for every attention and every seed."""
    options = (f"checkpoint={trained}", "prompt=12 + ", "temperature=0", "max_tokens=100")
    texts = {sample(*options, f"attention={name}", f"seed={i}").ok().out for i, name in enumerate(BUILT_IN)}
    assert len(texts) == 1
    assert len(texts.pop()) > 100


PROMPTS = (
    "def main(",
    "Once upon a time, there was",
    "x = 1",
    "naïve 語",
    "don't",
    "1e5",
    "null",
    "[a]",
    "$" + "{a}",
    "~/1",
)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompt_is_taken_as_it_is_written(trained, prompt):
    """A shell passes these prompts on unchanged. Hydra's grammar refused some of them, and changed 1e5."""
    assert sample(f"checkpoint={trained}", f"prompt={prompt}", "max_tokens=1").ok().out.startswith(prompt)


def test_examples_of_help_run(trained):
    lines = [line for line in run("sample.py", "--help").ok().out.splitlines() if "prompt=" in line]
    assert len(lines) >= 2
    for line in lines:
        options = [option for option in shlex.split(line)[2:] if not option.startswith("checkpoint=")]
        sample(f"checkpoint={trained}", *options).ok()


def test_a_pattern_belongs_to_the_checkpoint_and_not_to_its_file(workplace):
    """The file may be moved, deleted or changed. Another matrix is refused."""
    shape = ("model.context_length=256", "attention=block_sparse", "attention.pattern=mine.npy")
    options = ("checkpoint=run", "attention=block_sparse", "temperature=0", "max_tokens=3")
    np.save("mine.npy", np.eye(2, dtype=bool))
    train("run", "train.max_steps=1", *shape).ok()
    Path("mine.npy").rename("moved.npy")
    train("run", "train.max_steps=2", "checkpoint.resume=run", *shape).ok()
    text = sample(*options, "attention.pattern=moved.npy").ok().out
    assert sample(*options, "attention.pattern=mine.npy").ok().out == text
    np.save("mine.npy", np.ones((2, 2), dtype=bool))
    changed = sample(*options, "attention.pattern=mine.npy").ok().out
    assert changed.endswith(text) and "attention.pattern=mine.npy has changed; using the matrix in" in changed
    for other in ("butterfly", "other.npy"):
        np.save("other.npy", np.ones((2, 2), dtype=bool))
        refused = sample(*options, f"attention.pattern={other}")
        assert refused.code == 2 and "was trained with attention=block_sparse attention.pattern=mine.npy" in refused.err


def test_a_missing_vocabulary_names_only_what_helps_here(trained, tmp_path, monkeypatch):
    def unreachable(name):
        raise OSError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    state = load(trained / "checkpoints" / "step-00000030.pt") | {"tokenizer": "gpt2"}
    write_file(tmp_path / "step-00000030.pt", state)
    place = tmp_path / "model"
    for outcome in (sample(f"checkpoint={tmp_path}"), run("export.py", f"checkpoint={tmp_path}", f"to={place}")):
        (sentence,) = outcome.err.splitlines()
        assert outcome.code == 2 and sentence.endswith("set TIKTOKEN_CACHE_DIR to a folder that holds it")
    assert not place.exists()


def test_text_streams_token_by_token(trained, monkeypatch):
    lengths = []
    generate = generation.generate

    def watched(*args, **kwargs):
        for token in generate(*args, **kwargs):
            yield token
            lengths.append(len(sys.stdout.getvalue()))

    monkeypatch.setattr(generation, "generate", watched)
    sample(f"checkpoint={trained}", "prompt=ab", "max_tokens=5", "temperature=0").ok()
    assert lengths == [3, 4, 5, 6, 7]


def test_checkpoint_is_a_file_or_a_folder(trained):
    newest = trained / "checkpoints" / "step-00000030.pt"
    places = (trained, trained / "checkpoints", newest)
    assert len({sample(f"checkpoint={place}", "temperature=0").ok().out for place in places}) == 1
    sample(f"checkpoint={trained / 'checkpoints' / 'best.pt'}").ok()


def test_the_checkpoint_behind_a_link_is_printed_beside_the_text(trained, workplace):
    """outputs/latest had moved to another run, and nothing said so. The text stays alone on stdout."""
    Path("runs").symlink_to(trained)
    outcome = sample("checkpoint=runs", "prompt=1", "max_tokens=3", "num_samples=2").ok()
    assert outcome.err == f"using {trained / 'checkpoints' / 'step-00000030.pt'} (step 30)\n"
    assert outcome.out.startswith("1")
    best = load(trained / "checkpoints" / "best.pt")["step"]
    shutil.copy(trained / "checkpoints" / "best.pt", "mine.pt")
    assert sample("checkpoint=mine.pt", "max_tokens=1").ok().err == f"using mine.pt (step {best})\n"


def test_hugging_face_folder_is_sampled_with_gpt2s_vocabulary(tmp_path, gpt2_tokenizer):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, n_positions=64)
    model = transformers.GPT2LMHeadModel(shape).eval()
    model.save_pretrained(tmp_path / "gpt2", max_shard_size="1MB")
    assert len(list((tmp_path / "gpt2").glob("*.safetensors"))) > 1
    prompt = "Once upon a time"
    expected = gpt2_tokenizer.encode(prompt)
    for _ in range(10):
        expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
    outcome = sample(f"checkpoint={tmp_path / 'gpt2'}", f"prompt={prompt}", "temperature=0", "max_tokens=10").ok()
    assert outcome.out.rstrip("\n") == gpt2_tokenizer.decode(expected).rstrip("\n")


@pytest.mark.parametrize("name", ["config.json", "pytorch_model.bin"])
def test_an_incomplete_hugging_face_folder_is_told_what_it_lacks(tmp_path, name):
    (tmp_path / name).write_text("{}")
    (sentence,) = sample(f"checkpoint={tmp_path}").err.splitlines()
    lacks = {"config.json": "model.safetensors or pytorch_model.bin", "pytorch_model.bin": "config.json"}[name]
    assert f"checkpoint={tmp_path} has no {lacks}" in sentence and "save_pretrained" in sentence


def test_exported_model_of_bytes_is_not_sampled_with_gpt2s_vocabulary(trained, exported, gpt2_tokenizer):
    """Its ids below 257 were decoded as GPT-2's."""
    options = ("prompt=1", "temperature=0")
    outcome = sample(f"checkpoint={exported}", *options)
    refused = outcome.code == 2 and "257" in outcome.err
    assert refused or outcome.ok().out == sample(f"checkpoint={trained}", *options).out


def damage(trained: Path, folder: Path) -> dict[str, tuple[Path, str]]:
    """Return broken checkpoints, with the words of the message for each."""
    folder.joinpath("empty").mkdir()
    folder.joinpath("notes.pt").write_text("not a checkpoint")
    torch.save({"weights": torch.zeros(3)}, folder / "foreign.pt")
    whole = (trained / "checkpoints" / "step-00000030.pt").read_bytes()
    folder.joinpath("torn.pt").write_bytes(whole[: len(whole) // 2])
    return {
        "empty": (folder / "empty", "neither a checkpoint nor a folder of checkpoints"),
        "text": (folder / "notes.pt", "not a readable checkpoint"),
        "foreign": (folder / "foreign.pt", "another program wrote it"),
        "torn": (folder / "torn.pt", "not a readable checkpoint"),
    }


@pytest.mark.parametrize("kind", ["empty", "text", "foreign", "torn"])
def test_bad_checkpoint_is_refused_in_one_sentence(trained, tmp_path, kind):
    path, words = damage(trained, tmp_path)[kind]
    for script, more in (("sample.py", ()), ("export.py", (f"to={tmp_path / 'out'}",))):
        outcome = run(script, f"checkpoint={path}", *more)
        assert outcome.code == 2 and outcome.out == ""
        (sentence,) = outcome.err.splitlines()
        assert words in sentence and str(path) in sentence and "checkpoint" in sentence and "give" in sentence
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("temperature=-1", ["temperature=-1", "at least 0"]),
        ("top_k=0", ["top_k=0", "null"]),
        ("top_p=1.5", ["top_p=1.5", "at most 1"]),
        ("num_samples=0", ["num_samples=0", "at least 1"]),
        ("attention=flash9", ["attention=flash9", "did you mean flash2?"]),
        ("temprature=1", ["temprature", "did you mean temperature?"]),
        ("max_tokens=many", ["max_tokens", "many"]),
    ],
)
def test_bad_setting_is_refused_in_one_sentence(trained, override, words):
    outcome = sample(f"checkpoint={trained}", override)
    assert outcome.code == 2 and outcome.out == ""
    (sentence,) = outcome.err.splitlines()
    assert all(word in sentence for word in words)


def test_missing_checkpoint_is_asked_for():
    outcome = sample()
    assert outcome.code == 2
    assert "checkpoint=..." in outcome.err and len(outcome.err.splitlines()) == 1
