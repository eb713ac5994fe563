import json
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from omegaconf import OmegaConf

from data import hub, readers
from data import prepare as module
from data.config import DataConfig
from data.prepare import hold_out, prepare
from data.readers import Corpus
from data.tokens import open_tokens
from errors import UserError
from tests.data.corpora import (
    TEXTS,
    assert_prepared,
    config_of,
    in_memory,
    invalid_utf8,
    pack,
    write_corpus,
    write_jsonl,
    write_parquet,
)
from tests.e2e import ROOT


@pytest.mark.parametrize(("batch", "workers"), [(1, 3), (7, 1), (1024, None)])
def test_all_formats_equal_a_straightforward_encoding(tmp_path, tokenizer, batch, workers, monkeypatch):
    """The result does not depend on the batch size or on the number of threads."""
    monkeypatch.setattr(module, "BATCH_DOCUMENTS", batch)
    config = config_of(tmp_path, tokenizer=tokenizer.name, workers=workers)
    monkeypatch.setattr(module, "get_tokenizer", lambda *_: tokenizer)
    write_corpus(tmp_path / "in")
    prepare(config, log=lambda line: None)
    assert_prepared(config, in_memory(TEXTS, tokenizer, config))


def test_the_documents_that_nanogpt_holds_out_are_held_out():
    datasets = pytest.importorskip("datasets")
    rows = 8013
    split = datasets.Dataset.from_dict({"row": list(range(rows))}).train_test_split(test_size=0.0005, seed=2357)
    assert np.flatnonzero(hold_out(rows, 0.0005, 2357)).tolist() == sorted(split["test"]["row"])


def test_rows_that_are_lines_are_joined_to_documents(tmp_path):
    lines = [" \n", " = One = \n", "", " a line \n", " = = Part = = \n", " more \n", " = Two = \n", " last \n", None]
    joined = ["".join(lines[1:6]), "".join(lines[6:8])]
    config = config_of(tmp_path, document_start="^ = [^=\n]+ = \n$", train_files="*train*", val_files="*valid*")
    write_parquet(tmp_path / "in" / "train-0.parquet", lines)
    (tmp_path / "in" / "wiki.valid.raw").write_text("".join(lines[1:8]))
    write_parquet(tmp_path / "in" / "test-0.parquet", lines)  # in neither split
    said = []
    prepare(config, log=said.append)
    assert "4 documents (1 empty ones skipped)" in said[-1]
    expected = [token for text in joined for token in [*text.encode(), 256]]
    assert_prepared(config, {"train": expected, "val": expected})


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl"])
def test_a_byte_order_mark_is_not_text(tmp_path, name):
    for split in ("train", "val"):
        content = "\ufeffOne.\n" if "txt" in name else '\ufeff{"text": "One.\\n"}\n'
        packed = pack(content.encode(), ".gz") if name.endswith("gz") else content.encode()
        (tmp_path / f"{split}-{name}").write_bytes(packed)
    config = config_of(tmp_path, source=str(tmp_path / f"*-{name}"), val_files="val*")
    prepare(config, log=lambda line: None)
    assert_prepared(config, {split: [*b"One.\n", 256] for split in ("train", "val")})


def test_the_start_of_a_document_is_found_in_lines_of_windows(tmp_path):
    config = config_of(tmp_path, document_start="^[A-Z]+$", val_files="val*")
    for split in ("train", "val"):
        (tmp_path / "in" / f"{split}.txt").write_bytes(b"\xef\xbb\xbfONE\r\nand on\r\nTWO\r\nand on\r\n")
    prepare(config, log=lambda line: None)
    expected = [*b"ONE\r\nand on\r\n", 256, *b"TWO\r\nand on\r\n", 256]
    assert_prepared(config, {split: expected for split in ("train", "val")})


def test_files_for_a_split_must_be_there(tmp_path):
    config = config_of(tmp_path, val_files="*valid*")
    write_parquet(tmp_path / "in" / "train-0.parquet", TEXTS)
    with pytest.raises(UserError, match=r"data\.val_files=\*valid\* matches no file"):
        prepare(config, log=lambda line: None)


@pytest.mark.parametrize("corpus", ["openwebtext", "wikitext-2", "wikitext-103", "fineweb-edu-10bt", "tinystories"])
def test_a_corpus_of_the_hub_comes_from_its_cache_or_fails_at_once(tmp_path, monkeypatch, corpus):
    """Without a network: one sentence within ten seconds, or success if all shards are cached."""
    settings = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "data" / f"{corpus}.yaml"))
    settings |= {"dir": str(tmp_path / "out"), "tokenizer": "byte", "expected_documents": None}
    config = DataConfig(**settings)
    cached = tmp_path / "snapshot"
    shards = {"openwebtext": 2}.get(corpus, 1)
    offline(monkeypatch, cached)
    started = time.monotonic()
    with pytest.raises(UserError, match=r"is not in the hub's cache .*data\.source.*HF_HOME.*HF_HUB_OFFLINE"):
        prepare(config, log=lambda line: None)
    assert time.monotonic() - started < 10
    for i in range(shards):
        names = [f"{split}-{i:05}-of-{shards:05}.parquet" for split in ("train", "validation")]
        for name in names[: 1 if config.val_files is None else 2]:
            path = cached / config.hub_files.replace("train-*", "*").replace("*.parquet", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_parquet(path, [" = Title = \n", *TEXTS])
        if i + 1 < shards:  # an incomplete download is noticed
            with pytest.raises(UserError, match="is not in the hub's cache"):
                prepare(config, log=lambda line: None)
    prepare(config, log=lambda line: None)
    assert open_tokens(config).train.size > 1000
    shutil.rmtree(cached)  # prepared token files do not need their source
    said = []
    prepare(config, log=said.append)
    assert "is prepared already" in said[0]


def offline(monkeypatch, cached):
    """Make the hub unreachable, with the folder `cached` as its cache."""

    def snapshot(*args, local_files_only=False, **kwargs):
        if not cached.exists():
            raise hub.LocalEntryNotFoundError("no snapshot")
        return str(cached)

    def unreachable(*args, **kwargs):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    monkeypatch.setattr(hub.HfApi, "dataset_info", unreachable)


def test_a_wrong_number_of_documents_of_a_hub_corpus_is_refused(tmp_path, monkeypatch):
    names = {"hub_id": "a/b", "hub_revision": "c", "hub_files": "*.parquet"}
    config = config_of(tmp_path, source=None, expected_documents=301, **names)
    (tmp_path / "snapshot").mkdir()
    write_parquet(tmp_path / "snapshot" / "a.parquet", TEXTS)
    offline(monkeypatch, tmp_path / "snapshot")
    with pytest.raises(UserError, match="a/b has 300 documents in the hub's cache, but 301 in revision c; delete"):
        prepare(config, log=lambda line: None)
    assert not (tmp_path / "out" / "train.bin").exists()


@pytest.mark.parametrize(
    ("fraction", "val", "documents"),
    [(None, b"t", (2, 1)), (0.8, b"of two.|The last", (1, 2)), (0.001, b"", (2, 1)), (0.49, b"|The last", (1, 2))],
)
def test_few_documents_are_split_by_position(tmp_path, fraction, val, documents):
    (tmp_path / "in").mkdir()
    for name, text in (("a", "One of two."), ("b", "The last")):
        (tmp_path / "in" / f"{name}.txt").write_text(text)
    said, config = [], config_of(tmp_path, val_fraction=fraction)
    prepare(config, log=said.append)
    whole = [256 if byte == ord("|") else byte for byte in b"One of two.|The last|"]
    cut = len(whole) - len(val) - 1
    assert_prepared(config, {"train": whole[:cut], "val": whole[cut:]})
    counts = json.loads((tmp_path / "out" / "meta.json").read_text())["counts"]
    assert tuple(counts[split]["documents"] for split in ("train", "val")) == documents
    share = 100 * (fraction or 0.1)
    assert any(f"too few to hold out whole documents, so val.bin gets the last {share:g} %" in line for line in said)


def test_a_held_out_row_without_text_does_not_empty_a_split(tmp_path):
    """The one row that is held out is empty, so the split is by position."""
    config = config_of(tmp_path, val_fraction=0.01)
    (held_out,) = np.flatnonzero(hold_out(100, 0.01, config.split_seed))
    write_jsonl(tmp_path / "in" / "a.jsonl", ["" if i == held_out else "text" for i in range(100)])
    prepare(config, log=lambda line: None)
    tokens = open_tokens(config)
    assert (len(tokens.train), len(tokens.val)) == (99 * 5 - 5, 5)


def test_null_and_empty_texts_are_skipped_and_counted(tmp_path):
    config = config_of(tmp_path)
    write_parquet(tmp_path / "in" / "a.parquet", [*TEXTS[:50], None, ""])
    lines = []
    prepare(config, log=lines.append)
    assert "50 documents (2 empty ones skipped)" in lines[-1]


def test_the_same_preparation_is_recognised_and_another_refused(tmp_path, monkeypatch):
    config = config_of(tmp_path)
    write_parquet(tmp_path / "in" / "a.parquet", TEXTS)
    prepare(config, log=lambda line: None)
    before = (tmp_path / "out" / "train.bin").stat()
    lines = []
    with monkeypatch.context() as patch:
        patch.delattr(module, "get_tokenizer")  # no vocabulary is needed
        prepare(config, log=lines.append)
    assert lines[0].endswith("is prepared already, with the same settings and from files of the same names and sizes")
    assert (tmp_path / "out" / "train.bin").stat() == before
    for value, typed in ((0.5, "0.5"), (None, "null")):
        problem = f"was prepared with data.val_fraction=0.2, not data.val_fraction={typed}; choose another data.dir"
        with pytest.raises(UserError, match=re.escape(problem)):
            prepare(config_of(tmp_path, val_fraction=value))
    write_parquet(tmp_path / "in" / "b.parquet", TEXTS)
    with pytest.raises(UserError, match="was prepared with files=1, bytes=.*, not files=2, bytes="):  # not settings
        prepare(config)


def test_progress_is_logged_without_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOG_INTERVAL_S", 0.0)
    monkeypatch.setattr(module, "BATCH_DOCUMENTS", 100)
    config = config_of(tmp_path)
    write_parquet(tmp_path / "in" / "a.parquet", TEXTS)
    lines = []
    prepare(config, log=lines.append)
    assert len(lines) == 4
    assert "100 documents" in lines[0] and "33% read at" in lines[0] and "s to go" in lines[0]


def truncated_parquet(folder):
    write_parquet(folder / "a.parquet", TEXTS)
    content = (folder / "a.parquet").read_bytes()
    (folder / "a.parquet").write_bytes(content[:-100])


def broken(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def test_a_file_that_disappears_is_named(tmp_path):
    with pytest.raises(UserError, match=r"a\.txt cannot be read .*No such file"):
        Corpus([tmp_path / "a.txt"], DataConfig("text", str(tmp_path / "out"), "byte", source=str(tmp_path)))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda folder: None, r"data\.source=.* matches no file"),
        (
            lambda folder: write_parquet(folder / "a.parquet", TEXTS, "body"),
            r"data\.text_column=text is not in .*a\.parquet; set one of body, id",
        ),
        (lambda folder: write_parquet(folder / "a.parquet", [1, 2]), r"a\.parquet row 1 holds int in text"),
        (broken("a.parquet", b"PAR1 and nothing more"), r"a\.parquet cannot be read from row 1 on"),
        (broken("a.jsonl", b'{"text": "a"}\n{"text": \n'), r"a\.jsonl row 2 is not JSON.*or set data.on_bad_row=skip"),
        (
            broken("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n'),
            r"a\.jsonl row 2 has no key text; set .* to one of body",
        ),
        (broken("a.jsonl", b'{"text": "a"}\n{"text": ' + b"1" * 5000 + b"}\n"), r"a\.jsonl row 2 is not JSON"),
        (broken("a.jsonl", b"[1]\n"), r"a\.jsonl row 1 is not a JSON object"),
        (broken("a.jsonl", b'{"text": 3}\n'), r"a\.jsonl row 1 holds int in text"),
        (
            broken("a.jsonl.gz", pa.compress(b'{"text": "a"}\n' * 99, codec="gzip", asbytes=True)[:-9]),
            r"a\.jsonl\.gz cannot be read from row",
        ),
        (broken("a.txt", b"\xff\xff"), r"a\.txt row 1 is not UTF-8"),
        (
            broken("a.jsonl.zst", pa.compress(b"[]\n" * 99, codec="zstd", asbytes=True)[:-9]),
            r"a\.jsonl\.zst .*cannot be",
        ),
        (broken("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n'), r"a\.jsonl row 2 is not UTF-8"),
        (
            lambda folder: write_parquet(folder / "a.parquet", invalid_utf8()),
            r"a\.parquet row 3 is not UTF-8",
        ),
        (truncated_parquet, r"a\.parquet cannot be read"),
        (broken("a.txt", b""), r"the corpus holds no text; set data\.source"),
    ],
    ids=[
        "no file",
        "no such column",
        "numbers for text",
        "broken parquet",
        "broken json",
        "endless number",
        "no such key",
        "no object",
        "a number for text",
        "truncated gzip",
        "no utf-8",
        "truncated zstd",
        "no utf-8 in json",
        "no utf-8 in parquet",
        "truncated parquet",
        "no text",
    ],
)
def test_unreadable_corpora_are_named(tmp_path, write, message):
    config = config_of(tmp_path)
    write(tmp_path / "in")
    with pytest.raises(UserError, match=message):
        prepare(config, log=lambda line: None)
    assert not (tmp_path / "out" / "train.bin").exists()


BAD_LINES = [b"{", b'{"text": "\xff"}', b'{"body": "b"}', b'{"text": 3}', b"[]"]


def test_bad_rows_are_skipped_counted_and_listed(tmp_path):
    config = config_of(tmp_path, on_bad_row="skip", val_fraction=0.5)
    good = [f'{{"text": "{i}"}}'.encode() for i in range(5)]
    lines = [line for pair in zip(good, BAD_LINES, strict=True) for line in pair]
    (tmp_path / "in" / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "in" / "b.txt").write_bytes(b"\xff")
    write_parquet(tmp_path / "in" / "c.parquet", invalid_utf8())
    said = []
    prepare(config, log=said.append)
    assert "8 documents (7 bad rows skipped)" in said[-2]
    bad = json.loads((tmp_path / "out" / "meta.json").read_text())["bad_rows"]
    assert said[-1] == f"skipped {bad[0]}; {tmp_path / 'out' / 'meta.json'} lists all 7 bad rows"
    places = [f"a.jsonl row {i}" for i in (2, 4, 6, 8, 10)] + ["b.txt row 1", "c.parquet row 3"]
    assert all(f"{place} " in row for place, row in zip(places, bad, strict=True))
    tokens = open_tokens(config)
    assert sorted([*tokens.train, *tokens.val]) == sorted([*b"01234abd", *[256] * 8])


def test_a_corpus_of_bad_rows_is_refused_with_the_first(tmp_path):
    config = config_of(tmp_path, on_bad_row="skip")
    (tmp_path / "in" / "a.jsonl").write_bytes(b"\n".join(BAD_LINES))
    with pytest.raises(UserError, match=r"holds no text \(5 bad rows, the first: .*a\.jsonl row 1 is not JSON"):
        prepare(config, log=lambda line: None)


def test_other_corpora_need_no_preparation(tmp_path):
    with pytest.raises(UserError, match="data=tokens needs no preparation"):
        prepare(config_of(tmp_path, name="tokens"))


def test_a_text_without_a_source_is_refused_before_the_vocabulary_is_loaded(tmp_path, monkeypatch):
    """Without a network, the message was about GPT-2's vocabulary."""
    monkeypatch.delattr(module, "get_tokenizer")
    with pytest.raises(UserError, match=r"data\.source=null names no text; give a file"):
        prepare(config_of(tmp_path, source=None, tokenizer="gpt2"))


@pytest.mark.parametrize(
    ("name", "is_text"), [("about.jsonl.1.txt", True), ("a.txt.gz", True), ("a.jsonl.gz", False), ("a.parquet", False)]
)
def test_the_ending_of_a_name_decides_the_format(name, is_text):
    assert readers._is_text(Path(name)) is is_text


def test_a_share_to_hold_out_is_refused_beside_validation_files(tmp_path):
    """The share was ignored without a word."""
    config = config_of(tmp_path, val_fraction=0.5, val_files="f3*")
    with pytest.raises(UserError, match=r"data\.val_fraction=0\.5 has no effect beside data\.val_files=f3\*; set one"):
        prepare(config)
    assert not (tmp_path / "out").exists()
