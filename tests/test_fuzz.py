"""Any input gives a result or one sentence, never a traceback or a hang."""

import gzip
import hashlib
import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass
from functools import reduce
from pathlib import Path

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from conf.cli import launch
from conf.resume import run_settings
from conf.schema import Config
from data.config import DataConfig
from data.loader import TrainLoader, validation_batches
from data.prepare import prepare
from data.tokens import open_tokens
from errors import UserError
from tests.e2e import train
from trainer.checkpoint.files import SEAL, write_file
from trainer.checkpoint.load import load

pytest_plugins = ["tests.e2e"]
# Use the same examples every time, and one temporary folder for all examples of a test.
fuzz = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), max_examples=50)


def keys(config: type = Config, prefix: str = "") -> list[str]:
    """Return every key of the configuration, including groups."""
    below = [(field.type, f"{prefix}{field.name}") for field in fields(config)]
    return [key for kind, name in below for key in (name, *(keys(kind, f"{name}.") if is_dataclass(kind) else ()))]


NASTY = [
    "",
    "null",
    "nan",
    "inf",
    "-1",
    "0",
    "1e400",
    "true",
    "[]",
    "{}",
    "[",
    "{a:1}",
    "${x}",
    "${data.dir}",
    "???",
    "'",
]
NASTY += ["\x00", "a\nb", "1,2", "é", "~", "=", "a=b", "9" * 20, "9" * 400, "../..", "range(3)", "-", "@", "\\", '"']
VALUES = st.one_of(st.sampled_from(NASTY), st.text(max_size=8), st.integers().map(str), st.floats().map(str))
KEYS = st.one_of(st.sampled_from(keys()), st.from_regex(r"[a-z~+]{1,3}[a-z.@/]{0,8}", fullmatch=True))


@given(overrides=st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=3))
@example(overrides=[("attention", "null")])  # a ValueError of Hydra's
@example(overrides=[("optimizer.warmup_steps", "a[=\x85b")])  # a sentence of two lines
@example(overrides=[("wandb", "${data.dir}")])  # text where settings of their own belong
@settings(fuzz, max_examples=15)
def test_any_command_line_is_taken_or_refused_in_one_sentence(tmp_path, overrides):
    arguments = [f"{key}={value}" for key, value in overrides]
    taken, out, err = [], io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["train.py", f"hydra.run.dir={tmp_path / 'run'}", *arguments])
        GlobalHydra.instance().clear()
        try:
            launch(lambda composed: taken.append(run_settings(composed)[0]), "config", typed=False)
        except SystemExit as ended:
            assert ended.code == 2
    if taken:
        (config,) = taken
        assert all(isinstance(getattr(config, x.name), x.type) for x in fields(config) if is_dataclass(x.type))
    else:
        (sentence,) = err.getvalue().splitlines()
        assert sentence.startswith("error: ") and len(sentence) > len("error: ") + 5


def or_refused(function, *args, **kwargs):
    """Return the function's result, or None if it refuses its input in one sentence."""
    try:
        return function(*args, **kwargs)
    except UserError as error:
        assert len(str(error).splitlines()) == 1
        return None


META = {"tokenizer": "byte", "vocab_size": 257, "source": {}, "counts": {"train": {"tokens": 3}, "val": {"tokens": 2}}}
METAS = st.one_of(
    st.none(),
    st.binary(max_size=30),
    st.recursive(
        st.none() | st.integers() | st.text(max_size=4),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ).map(lambda value: json.dumps(value).encode()),
    st.dictionaries(
        st.sampled_from(list(META)), st.one_of(st.none(), st.text(max_size=3), st.just({}), st.integers())
    ).map(lambda change: json.dumps(META | change).encode()),
)


@given(train=st.binary(max_size=80), val=st.binary(max_size=40), meta=METAS, context=st.integers(1, 9))
@fuzz
def test_any_token_files_are_read_or_refused_in_one_sentence(tmp_path, train, val, meta, context):
    for name, content in (("train.bin", train), ("val.bin", val), ("meta.json", meta)):
        (tmp_path / name).unlink(missing_ok=True)
        if content is not None:
            (tmp_path / name).write_bytes(content)
    tokens = or_refused(open_tokens, DataConfig("tokens", str(tmp_path), "byte"))
    if tokens is None:
        return
    sizes = {"batch_size": 2, "context_length": context, "device": torch.device("cpu"), "vocab_size": 257, "name": "x"}
    if loader := or_refused(TrainLoader, tokens.train, seed=1, **sizes):
        with loader:
            assert (batch := or_refused(loader.next_batch)) is None or batch[0].shape == (2, context)
    or_refused(lambda: list(validation_batches(tokens.val, max_tokens=50, **sizes)))


@given(content=st.binary(max_size=200), sealed=st.booleans())
@fuzz
def test_any_file_is_refused_as_a_checkpoint_in_one_sentence(tmp_path, content, sealed):
    path = tmp_path / "step-00000001.pt"
    path.write_bytes(content + SEAL + hashlib.sha256(content).digest() if sealed else content)
    assert or_refused(load, tmp_path) is None


def places(state: dict, depth: int = 2) -> list[tuple]:
    """Return the paths of keys to all entries of a nested state, down to `depth`."""
    inner = [(key, *place) for key in state if isinstance(state[key], dict) for place in places(state[key], depth - 1)]
    return [(key,) for key in state] + inner if depth else []


@pytest.mark.slow
@given(data=st.data(), junk=st.sampled_from(["nothing", None, "x", -1, [], {}]))
@settings(fuzz, max_examples=12)
def test_a_checkpoint_of_another_form_is_continued_or_refused_in_one_sentence(trained, tmp_path_factory, data, junk):
    """Remove one entry or replace it by another type, as if another version had written the checkpoint."""
    folder = tmp_path_factory.mktemp("other")
    state = load(trained)
    *outer, last = data.draw(st.sampled_from(places(state)))
    inside = reduce(dict.__getitem__, outer, state)
    if junk == "nothing":
        del inside[last]
    else:
        inside[last] = junk
    write_file(folder / "step-00000030.pt", state)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(trained.parent)
        outcome = train(folder / "run", f"checkpoint.resume={folder}", "train.max_steps=31")
    assert outcome.code == 0 or (outcome.code, len(outcome.err.splitlines())) == (2, 1)


LINES = st.lists(st.one_of(st.text(max_size=9).map(lambda text: json.dumps({"text": text})), st.text(max_size=9)))
CORPORA = st.one_of(st.binary(max_size=60), LINES.map(lambda lines: "\n".join(lines).encode(errors="replace")))


@given(
    content=CORPORA,
    kind=st.sampled_from(["txt", "jsonl", "parquet", "txt.gz", "jsonl.zst", "jsonl.gz"]),
    pack=st.booleans(),
)
@fuzz
def test_any_corpus_is_prepared_or_refused_in_one_sentence(tmp_path_factory, content, kind, pack):
    folder: Path = tmp_path_factory.mktemp("corpus")
    (folder / f"a.{kind}").write_bytes(gzip.compress(content) if pack and kind.endswith("gz") else content)
    (folder / f"b.{kind}").write_bytes(content)
    config = DataConfig(
        "text", str(folder / "tokens"), "byte", source=str(folder / f"*.{kind}"), val_fraction=0.5, workers=1
    )
    or_refused(prepare, config, log=lambda _: None)
    assert or_refused(open_tokens, config) is None or (folder / "tokens" / "meta.json").exists()
