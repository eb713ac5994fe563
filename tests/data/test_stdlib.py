import json
from pathlib import Path

import numpy as np
import pytest

from data import stdlib
from data.config import DataConfig
from data.token_files import TokenWriter
from data.tokenizers import get_tokenizer
from data.tokens import open_tokens
from errors import UserError


def config_of(folder, **settings):
    return DataConfig("stdlib", str(folder), **{"tokenizer": "byte", "val_fraction": 0.05} | settings)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    config = config_of(tmp_path_factory.mktemp("stdlib"))
    return config, open_tokens(config)


def test_is_about_twelve_megabytes_of_source_with_a_twentieth_held_out(built):
    _, tokens = built
    total = len(tokens.train) + len(tokens.val)
    assert 8e6 < total < 25e6
    assert 0.01 < len(tokens.val) / total < 0.12


def test_every_document_is_a_module_of_its_split(built):
    config, tokens = built
    byte = get_tokenizer("byte")
    documents = {"train": [], "val": []}
    for name, text in stdlib.read_files(stdlib.source_files()):
        documents[stdlib.split_of(name, config)] += [*byte.encode(text), byte.eot]
    assert np.array_equal(tokens.train, documents["train"])
    assert np.array_equal(tokens.val, documents["val"])


def test_no_tests_are_in_it():
    files = stdlib.source_files()
    assert "argparse.py" in files and "json/decoder.py" in files
    assert not [name for name in files if stdlib.SKIPPED_FOLDERS & set(name.split("/"))]
    assert files == sorted(files)


def test_building_twice_gives_the_same_files(built, tmp_path):
    config, _ = built
    again = config_of(tmp_path)
    stdlib.build(again)
    first, second = (json.loads(Path(c.dir, "meta.json").read_text()) for c in (config, again))
    assert first == second


@pytest.fixture
def few_files(monkeypatch):
    """Make the library small, and return its files."""
    files = ["argparse.py", "ast.py", "bisect.py", "cmd.py", "json/tool.py"]
    monkeypatch.setattr(stdlib, "source_files", lambda: files)
    return files


def test_is_rebuilt_only_if_a_file_is_missing(tmp_path, monkeypatch, few_files):
    config = config_of(tmp_path, val_fraction=0.5)

    def built_at():
        stdlib.build(config)
        return (tmp_path / "train.bin").stat().st_ino, (tmp_path / "train.bin").stat().st_mtime_ns

    first = built_at()
    assert built_at() == first
    monkeypatch.setattr(stdlib.platform, "python_version", lambda: "2.7.18")
    monkeypatch.setattr(stdlib, "source_files", lambda: few_files[1:])
    assert built_at() == first, "a run may be using the tokens of another Python"
    (tmp_path / "val.bin").unlink()
    second = built_at()
    assert second != first and (tmp_path / "val.bin").exists()
    (tmp_path / "unfinished").mkdir()
    for name in ("val.bin", "meta.json"):  # the process was killed after it had moved train.bin
        (tmp_path / name).rename(tmp_path / "unfinished" / name)
    assert built_at() == second and (tmp_path / "val.bin").exists()


@pytest.mark.parametrize("python", [stdlib.platform.python_version(), "2.7.18"])
@pytest.mark.parametrize("change", [{"split_seed": 8}, {"val_fraction": 0.6}], ids=str)
def test_another_split_is_not_overwritten(tmp_path, monkeypatch, few_files, python, change):
    """The rebuilt files once ended a run that was training on them."""
    stdlib.build(config_of(tmp_path, val_fraction=0.5, split_seed=7))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(stdlib.platform, "python_version", lambda: python)
    other = config_of(tmp_path, **{"val_fraction": 0.5, "split_seed": 7} | change)
    ((key, value),) = change.items()
    problem = rf"was prepared with data\.{key}=[\d.]+, not data\.{key}={value}"
    with pytest.raises(UserError, match=rf"{problem}; set data\.{key}=[\d.]+, or choose another data\.dir"):
        stdlib.build(other)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "val.bin").unlink()
    stdlib.build(other)
    assert json.loads((tmp_path / "meta.json").read_text())["source"].items() >= change.items()


def test_another_tokenizer_does_not_overwrite_the_tokens(tmp_path, few_files):
    stdlib.build(config_of(tmp_path, val_fraction=0.5))
    before = (tmp_path / "train.bin").read_bytes()
    problem = "data.val_fraction=0.5, data.tokenizer=byte, not data.val_fraction=0.05, data.tokenizer=gpt2"
    with pytest.raises(UserError, match=f"{problem}; set data.val_fraction=0.5 data.tokenizer=byte, or choose"):
        stdlib.build(config_of(tmp_path, tokenizer="gpt2"))
    assert (tmp_path / "train.bin").read_bytes() == before


def test_another_corpus_is_not_overwritten(tmp_path):
    meta = {"tokenizer": "byte", "source": {"name": "text"}, "counts": {s: {"tokens": 1} for s in ("train", "val")}}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match="holds another corpus than the standard library; choose another folder"):
        stdlib.build(config_of(tmp_path))


@pytest.mark.parametrize("tokenizer", ["gpt2", "byte"])
def test_complete_tokens_of_another_corpus_lead_to_their_choice(tmp_path, tokenizer):
    """A user who had prepared a text and forgot data=tokens was sent to another folder."""
    with TokenWriter(tmp_path, {"name": "text"}) as writer:
        for split in ("train", "val"):
            writer.write(split, np.arange(9, dtype=np.uint16).tobytes(), 1)
        writer.finish(tokenizer)
    with pytest.raises(UserError) as refused:
        open_tokens(config_of(tmp_path))
    choice = f"; set data=tokens data.tokenizer={tokenizer} to use it, or choose another folder"
    assert str(refused.value).endswith(choice)
    open_tokens(DataConfig("tokens", str(tmp_path), tokenizer))
