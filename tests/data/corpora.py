"""Small corpora in every format, for the tests of the preparation."""

import json

import pyarrow as pa
import pyarrow.parquet as pq

from data.config import DataConfig
from data.prepare import hold_out
from data.tokens import open_tokens

FILES = "train.bin", "val.bin", "meta.json"
TEXTS = [f"Document {i}: " + "naïve 語 🙂 " * (i % 7) for i in range(300)]


def write_parquet(path, texts, column="text"):
    pq.write_table(pa.table({column: texts, "id": list(range(len(texts)))}), path, row_group_size=40)


def write_jsonl(path, texts):
    lines = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts).encode()
    path.write_bytes(pack(lines, path.suffix) if path.suffix in (".gz", ".zst") else lines)


def config_of(tmp_path, **settings):
    (tmp_path / "in").mkdir(exist_ok=True)
    defaults = {"dir": str(tmp_path / "out"), "source": str(tmp_path / "in"), "tokenizer": "byte"}
    defaults["val_fraction"] = None if settings.get("val_files") else 0.2
    return DataConfig(**{"name": "text"} | defaults | settings)


def in_memory(texts, tokenizer, config):
    """Return the tokens of both splits, encoded one document after the other."""
    splits = {"train": [], "val": []}
    held_out = hold_out(len(texts), config.val_fraction, config.split_seed)
    for text, out in zip(texts, held_out, strict=True):
        splits["val" if out else "train"] += [*tokenizer.encode(text), tokenizer.eot]
    return splits


def assert_prepared(config, expected):
    tokens = open_tokens(config)
    assert tokens.train.tolist() == expected["train"]
    assert tokens.val.tolist() == expected["val"]


def pack(data, ending):
    codec = {".gz": "gzip", ".zst": "zstd"}[ending]
    return pa.compress(data, codec=codec, asbytes=True)


def write_corpus(folder):
    """Write TEXTS in every format, and a file that is not part of the corpus."""
    write_parquet(folder / "a.parquet", TEXTS[:100])
    write_jsonl(folder / "b.jsonl", TEXTS[100:200])
    write_jsonl(folder / "c.jsonl.gz", TEXTS[200:250])
    write_jsonl(folder / "d.jsonl.zst", TEXTS[250:297])
    (folder / "e.txt").write_text(TEXTS[297], encoding="utf-8")
    (folder / "f.txt.gz").write_bytes(pack(TEXTS[298].encode(), ".gz"))
    (folder / "g.raw.zst").write_bytes(pack(TEXTS[299].encode(), ".zst"))
    (folder / "notes.md").write_text("not text of the corpus")


def invalid_utf8():
    """Return parquet strings. The third one is not valid UTF-8."""
    return pa.array([b"a", b"b", b"\xff", b"d"]).view(pa.string())
