"""Rows that are not documents: the preparation stops at the first, or skips, counts and lists them."""

import json

import numpy as np
import pytest

from data import prepare as module
from data.prepare import prepare
from data.tokenizers import get_tokenizer
from data.tokens import open_tokens
from errors import UserError
from tests.data.test_prepare import TEXTS, config_of, hold_out, invalid_utf8, write_jsonl, write_parquet

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
    with pytest.raises(UserError, match=r"holds no text \(5 bad rows; .*a\.jsonl row 1 is not JSON"):
        prepare(config, log=lambda line: None)


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
