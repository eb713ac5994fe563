import json

import numpy as np
import pytest

from data import inspect as module
from data.config import DataConfig
from data.inspect import document_lengths, inspect
from data.token_files import TokenWriter
from errors import UserError

TEXTS = ["One.", "", "Three is longer than a hundred bytes: " + "and on " * 20]


@pytest.fixture
def corpus(tmp_path):
    with TokenWriter(tmp_path / "corpus", {"name": "text"}) as writer:
        for split in ("train", "val"):
            for text in TEXTS:
                writer.write(split, np.array([*text.encode(), 256], dtype="<u2").tobytes(), 1)
        writer.finish("byte")
    return DataConfig("tokens", str(tmp_path / "corpus"), "byte")


def test_counts_lengths_and_first_documents(corpus):
    lines = []
    inspect(corpus, log=lines.append)
    total = sum(len(text) + 1 for text in TEXTS)
    for split, line in zip(("train", "val"), lines, strict=False):
        assert line.startswith(f"{split}.bin: {total} tokens in 3 documents") and "SHA-256 as in meta.json" in line
        assert f"50% 5, 75% {round((5 + len(TEXTS[2]) + 1) / 2)}" in line and f"longest {len(TEXTS[2]) + 1})" in line
    assert [line.partition(": ")[2] for line in lines[2:5]] == ["'One.'", "''", repr(TEXTS[2][:100]) + " ..."]


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_documents_are_measured_across_chunks(chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    assert document_lengths(np.array([1, 2, 9, 9, 3, 9]), 9).tolist() == [3, 1, 2]
    assert document_lengths(np.array([1, 2, 9, 3]), 9).tolist() == [3, 1]


def test_a_damaged_file_is_refused(corpus, tmp_path):
    path = tmp_path / "corpus" / "val.bin"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        UserError, match=r"val\.bin has the SHA-256 .*, but its meta\.json promises .*; prepare it again"
    ):
        inspect(corpus, log=lambda line: None)


def test_files_without_checksums_are_inspected_too(corpus, tmp_path):
    path = tmp_path / "corpus" / "meta.json"
    meta = json.loads(path.read_text())
    lines = []
    for checksums in (None, {}):
        path.write_text(json.dumps(meta | {"sha256": checksums}))
        inspect(corpus, log=lines.append)
    path.unlink()
    inspect(corpus, log=lines.append)
    assert len([line for line in lines if line.endswith("no meta.json with checksums")]) == 3 * 2


def test_tokens_of_another_tokenizer_are_refused(corpus, tmp_path):
    (tmp_path / "corpus" / "meta.json").unlink()
    np.array([1, 2, 60000], dtype="<u2").tofile(tmp_path / "corpus" / "train.bin")
    with pytest.raises(UserError, match="train.bin holds token 60000 in document 1, and the byte tokenizer has 257"):
        inspect(corpus, log=lambda line: None)
