"""Preparations that were killed, stopped or interrupted."""

import errno
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from data import prepare as module
from data.prepare import hold_out, prepare
from data.tokenizers import get_tokenizer
from data.tokens import open_tokens
from errors import UserError
from tests.data.corpora import (
    FILES,
    TEXTS,
    assert_prepared,
    config_of,
    in_memory,
    write_corpus,
    write_jsonl,
)
from tests.e2e import ROOT, at_call, python_path

KILLED = """
import sys
import data.prepare as module
from data.config import DataConfig
module.SAVE_INTERVAL_S = module.LOG_INTERVAL_S = 0.0
module.BATCH_DOCUMENTS = 7
config = DataConfig("text", sys.argv[2], "byte", source=sys.argv[1], val_fraction=0.2, workers=int(sys.argv[3]))
module.prepare(config, log=lambda line: print(line, flush=True))
"""


@pytest.mark.slow
def test_killed_at_any_moment_it_continues_to_the_same_bytes(tmp_path):
    """kill -9 after a random number of batches, each time with a different number of workers."""
    config = config_of(tmp_path)
    write_corpus(tmp_path / "in")
    prepare(config, log=lambda line: None)
    random, killed, said = np.random.default_rng(0), 0, []
    environment = {**os.environ, "PYTHONPATH": python_path()}
    for attempt in range(60):
        command = [sys.executable, "-c", KILLED, str(tmp_path / "in"), str(tmp_path / "again"), str(1 + attempt % 3)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, cwd=ROOT, text=True) as process:
            for _ in range(random.integers(3, 9)):
                said.append(process.stdout.readline())
            process.kill()
        killed += process.returncode == -signal.SIGKILL
        if (tmp_path / "again" / "meta.json").exists():
            break
    assert killed >= 3 and any("continuing after" in line for line in said)
    assert all((tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes() for name in FILES)


def test_a_file_renamed_while_it_was_unfinished_is_noticed(tmp_path, monkeypatch):
    """With files in another order, some documents would be written twice and others would be lost."""
    config = config_of(tmp_path)
    write_jsonl(tmp_path / "in" / "a.jsonl", TEXTS[:60])
    write_jsonl(tmp_path / "in" / "b.jsonl", TEXTS[60:])
    monkeypatch.setattr(module, "SAVE_INTERVAL_S", 0.0)
    monkeypatch.setattr(module, "BATCH_DOCUMENTS", 50)
    with monkeypatch.context() as patch:
        patch.setattr(module.TokenWriter, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(config, log=lambda line: None)
    (tmp_path / "in" / "a.jsonl").rename(tmp_path / "in" / "z.jsonl")
    with pytest.raises(UserError, match="was begun with other files or rows than those before .*; put the files back"):
        prepare(config, log=lambda line: None)


def rewritten(old, new):
    def change(folder):
        (folder / "b.jsonl").write_text((folder / "b.jsonl").read_text().replace(old, new))

    return change


def stopped_at_row_45_of_b(tmp_path, monkeypatch):
    """Return the settings of a preparation that a bad row stopped. Rows 1 to 40 of b.jsonl are saved."""
    monkeypatch.setattr(module, "SAVE_INTERVAL_S", 0.0)
    monkeypatch.setattr(module, "BATCH_DOCUMENTS", 10)
    config = config_of(tmp_path)
    for name, texts in (("a", TEXTS[:50]), ("b", TEXTS[50:110]), ("c", TEXTS[110:150])):
        write_jsonl(tmp_path / "in" / f"{name}.jsonl", texts)
    rewritten('"Document 94: ', "Document 94 ")(tmp_path / "in")
    with pytest.raises(UserError, match=r"b\.jsonl row 45 is not JSON"):
        prepare(config, log=lambda line: None)
    return config


def test_progress_survives_a_change_to_what_was_not_read_yet(tmp_path, monkeypatch):
    """The bad row is fixed and becomes longer, and a row of the next file changes."""
    config = stopped_at_row_45_of_b(tmp_path, monkeypatch)
    rewritten("Document 94 ", '"Longer than before: ')(tmp_path / "in")
    write_jsonl(tmp_path / "in" / "c.jsonl", ["another", *TEXTS[111:150]])
    said = []
    prepare(config, log=said.append)
    assert said[0].startswith("continuing after 90 documents")
    fresh = config_of(tmp_path, dir=str(tmp_path / "fresh"))
    prepare(fresh, log=lambda line: None)
    assert all((tmp_path / "out" / name).read_bytes() == (tmp_path / "fresh" / name).read_bytes() for name in FILES)


@pytest.mark.parametrize(
    "change",
    [
        rewritten("Document 60:", "Document 6O:"),
        rewritten("\n", "\n\n"),
        lambda folder: write_jsonl(folder / "b.jsonl", TEXTS[50:60]),
        lambda folder: write_jsonl(folder / "a.jsonl", TEXTS[:49]),
        lambda folder: write_jsonl(folder / "0.jsonl", TEXTS[:1]),
        lambda folder: [(folder / f"{name}.jsonl").unlink() for name in "bc"],
    ],
    ids=["row", "rows", "shorter", "earlier file", "new earlier file", "no file"],
)
def test_a_change_to_what_was_read_already_is_refused(tmp_path, monkeypatch, change):
    config = stopped_at_row_45_of_b(tmp_path, monkeypatch)
    change(tmp_path / "in")
    with pytest.raises(UserError, match="was begun with other files or rows than those before .*; put the files back"):
        prepare(config, log=lambda line: None)


def interrupted(*_, **__):
    raise KeyboardInterrupt


def test_a_full_disk_gives_one_sentence_and_loses_nothing(tmp_path, monkeypatch):
    config = config_of(tmp_path)
    write_corpus(tmp_path / "in")
    monkeypatch.setattr(module, "SAVE_INTERVAL_S", 0.0)
    monkeypatch.setattr(module, "BATCH_DOCUMENTS", 50)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", at_call(7, full_disk, os.fsync))
        with pytest.raises(UserError, match="cannot be written .*make room, and run the same command to continue"):
            prepare(config, log=lambda line: None)
    said = []
    prepare(config, log=said.append)
    assert any("continuing after" in line for line in said)
    assert_prepared(config, in_memory(TEXTS, get_tokenizer("byte"), config))


def full_disk():
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", [1, 2, 3, 4, 5, 6, 7])
def test_a_split_by_position_that_is_interrupted_is_repeated(tmp_path, monkeypatch, call):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("The only one." * 9)
    config = config_of(tmp_path, val_fraction=None)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", at_call(call, interrupted, os.fsync))
        with pytest.raises(KeyboardInterrupt):
            prepare(config, log=lambda line: None)
    prepare(config, log=lambda line: None)
    whole = [*b"The only one." * 9, 256]
    assert_prepared(config, {"train": whole[:-12], "val": whole[-12:]})


def test_a_bad_row_can_be_skipped_without_starting_again(tmp_path, monkeypatch):
    """A document that the tokenizer refuses is a bad row too."""
    monkeypatch.setattr(module, "SAVE_INTERVAL_S", 0.0)
    monkeypatch.setattr(module, "BATCH_DOCUMENTS", 10)
    byte = get_tokenizer("byte")

    def encode(text):
        if text == TEXTS[90]:
            raise UserError("too odd; remove it")
        return byte.__class__.encode_document(byte, text)

    monkeypatch.setattr(byte, "encode_document", encode)
    monkeypatch.setattr(module, "get_tokenizer", lambda *_: byte)
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "a.jsonl", TEXTS[:100])
    with pytest.raises(UserError, match=r"a\.jsonl row 91 cannot be encoded \(too odd.*data\.on_bad_row=skip"):
        prepare(config_of(tmp_path), log=lambda line: None)
    said, config = [], config_of(tmp_path, on_bad_row="skip")
    prepare(config, log=said.append)
    assert said[0].startswith("continuing after 90 documents")
    held_out = hold_out(100, 0.2, config.split_seed)
    rest = [byte.__class__.encode_document(byte, text) for i, text in enumerate(TEXTS[:100]) if i != 90 and held_out[i]]
    assert open_tokens(config).val.tolist() == np.concatenate(rest).tolist()
