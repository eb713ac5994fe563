import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import prepare as module
from data.config import DataConfig
from data.prepare import prepare
from data.tokens import open_tokens, split_of
from errors import UserError

TEXTS = [f"Document {i}: " + "naïve 語 🙂 " * (i % 7) for i in range(300)]


def write_parquet(path, texts, column="text"):
    pq.write_table(pa.table({column: texts, "id": list(range(len(texts)))}), path, row_group_size=40)


def write_jsonl(path, texts):
    lines = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)


def config_of(tmp_path, **settings):
    (tmp_path / "in").mkdir(exist_ok=True)
    defaults = {"dir": str(tmp_path / "out"), "source": str(tmp_path / "in"), "tokenizer": "byte", "val_fraction": 0.2}
    return DataConfig(**{"name": "text"} | defaults | settings)


def in_memory(named_texts, tokenizer, config):
    """Both splits' tokens, encoded one document after the other."""
    splits = {"train": [], "val": []}
    for name, text in named_texts:
        splits[split_of(name, config)] += [*tokenizer.encode(text), tokenizer.eot]
    return splits


def assert_prepared(config, expected):
    tokens = open_tokens(config)
    assert tokens.train.tolist() == expected["train"]
    assert tokens.val.tolist() == expected["val"]


@pytest.mark.parametrize("batch", [1, 7, 1024], ids="batches of {}".format)
def test_all_formats_equal_a_straightforward_encoding(tmp_path, tokenizer, batch, monkeypatch):
    monkeypatch.setattr(module, "BATCH_DOCUMENTS", batch)
    config = config_of(tmp_path, tokenizer=tokenizer.name)
    monkeypatch.setattr(module, "get_tokenizer", lambda name: tokenizer)
    folder = tmp_path / "in"
    write_parquet(folder / "a.parquet", TEXTS[:100])
    write_jsonl(folder / "b.jsonl", TEXTS[100:200])
    write_jsonl(folder / "c.jsonl.gz", TEXTS[200:298])
    (folder / "d.txt").write_text(TEXTS[298], encoding="utf-8")
    (folder / "e.txt.gz").write_bytes(gzip.compress(TEXTS[299].encode()))
    (folder / "notes.md").write_text("not text of the corpus")
    prepare(config, log=lambda line: None)
    rows = [("a.parquet", 100), ("b.jsonl", 100), ("c.jsonl.gz", 98), ("d.txt", 1), ("e.txt.gz", 1)]
    names = [f"{file}:{row + 1}" for file, count in rows for row in range(count)]
    assert_prepared(config, in_memory(zip(names, TEXTS, strict=True), tokenizer, config))


def test_about_the_wanted_share_is_held_out(tmp_path):
    config = config_of(tmp_path)
    held_out = np.mean([split_of(f"file:{i}", config) == "val" for i in range(10_000)])
    assert held_out == pytest.approx(config.val_fraction, abs=0.02)
    assert [split_of(f"file:{i}", config) for i in range(99)] != [
        split_of(f"file:{i}", config_of(tmp_path, split_seed=1)) for i in range(99)
    ]


def test_null_and_empty_texts_are_skipped_and_counted(tmp_path):
    config = config_of(tmp_path)
    write_parquet(tmp_path / "in" / "a.parquet", [*TEXTS[:50], None, ""])
    lines = []
    prepare(config, log=lines.append)
    assert "50 documents (2 empty ones skipped)" in lines[-1]


def test_the_same_preparation_is_recognised_and_another_refused(tmp_path):
    config = config_of(tmp_path)
    write_parquet(tmp_path / "in" / "a.parquet", TEXTS)
    prepare(config, log=lambda line: None)
    before = (tmp_path / "out" / "train.bin").stat()
    lines = []
    prepare(config, log=lines.append)
    assert "prepared already" in lines[0] and (tmp_path / "out" / "train.bin").stat() == before
    with pytest.raises(
        UserError, match=r"was prepared with val_fraction=0\.2, not val_fraction=0\.5: choose another data"
    ):
        prepare(config_of(tmp_path, val_fraction=0.5))


def test_progress_is_logged_where_no_terminal_is(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOG_INTERVAL_S", 0.0)
    monkeypatch.setattr(module, "BATCH_DOCUMENTS", 100)
    config = config_of(tmp_path)
    write_parquet(tmp_path / "in" / "a.parquet", TEXTS)
    lines = []
    prepare(config, log=lines.append)
    assert len(lines) == 4
    assert "100 documents" in lines[0] and "33% read at" in lines[0] and "s to go" in lines[0]


def broken(name, content):
    return lambda folder: (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda folder: None, r"data\.source=.* matches no file"),
        (lambda folder: write_parquet(folder / "a.parquet", TEXTS, "body"), r"a\.parquet has no column text.*body, id"),
        (lambda folder: write_parquet(folder / "a.parquet", [1, 2]), r"a\.parquet row 1 holds a int in text"),
        (broken("a.parquet", b"PAR1 and nothing more"), r"a\.parquet cannot be read from row 1 on"),
        (broken("a.jsonl", b'{"text": "a"}\n{"text": \n'), r"a\.jsonl row 2 is no JSON"),
        (broken("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n'), r"a\.jsonl row 2 has no key text, only body"),
        (broken("a.jsonl", b"[1]\n"), r"a\.jsonl row 1 has no key text, no object"),
        (broken("a.jsonl", b'{"text": 3}\n'), r"a\.jsonl row 1 holds a int in text"),
        (broken("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:-9]), r"a\.jsonl\.gz cannot be read from row"),
        (broken("a.txt", b"\xff\xff"), r"a\.txt cannot be read from row 1 on"),
        (broken("a.txt", b"the only one"), r"None of the 1 documents fell into (val|train)\.bin"),
    ],
    ids=[
        "no file",
        "no such column",
        "numbers for text",
        "broken parquet",
        "broken json",
        "no such key",
        "no object",
        "a number for text",
        "truncated gzip",
        "no utf-8",
        "one document",
    ],
)
def test_what_cannot_be_prepared_is_named(tmp_path, write, message):
    config = config_of(tmp_path)
    write(tmp_path / "in")
    with pytest.raises(UserError, match=message):
        prepare(config, log=lambda line: None)
    assert not (tmp_path / "out" / "train.bin").exists()


def test_other_corpora_need_no_preparation(tmp_path):
    with pytest.raises(UserError, match="data=tokens needs no preparation"):
        prepare(config_of(tmp_path, name="tokens"))
    with pytest.raises(UserError, match=r"data\.source is not set"):
        prepare(config_of(tmp_path, source=None))
