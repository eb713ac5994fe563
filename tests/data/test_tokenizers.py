import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data import tokenizers
from data.tokenizers import get_tokenizer, vocab_size
from errors import UserError

same_tokenizer = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@same_tokenizer
@given(text=st.text() | st.text(alphabet=" \n'sé語🙂<|endoftext>"))
def test_text_survives_the_round_trip_at_once_and_token_by_token(tokenizer, text):
    ids = tokenizer.encode(text)
    assert all(i < tokenizer.vocab_size and i != tokenizer.eot for i in ids)
    assert tokenizer.decode(ids) == text
    decoder = tokenizer.stream_decoder()
    assert "".join(decoder(i) for i in ids) == text


def test_the_name_of_end_of_text_is_ordinary_text(tokenizer):
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.eot not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_a_document_is_its_text_and_end_of_text(tokenizer):
    for text in ("", "one", "two words", "<|endoftext|>", "lone surrogate \ud800"):
        ids = tokenizer.encode_document(text)
        assert ids.dtype == np.uint16 and ids.tolist() == [*tokenizer.encode(text), tokenizer.eot]


def test_half_a_character_waits_for_the_rest(tokenizer):
    emoji = tokenizer.encode("🙂")
    assert len(emoji) > 1
    decoder = tokenizer.stream_decoder()
    assert [decoder(i) for i in emoji] == [""] * (len(emoji) - 1) + ["🙂"]


def test_sizes_are_known_without_the_vocabulary(tokenizer):
    assert vocab_size(tokenizer.name) == tokenizer.vocab_size == tokenizer.eot + 1


def test_gpt2_ids_are_the_published_ones(gpt2_tokenizer):
    assert gpt2_tokenizer.encode("Hello world, <|endoftext|>")[:3] == [15496, 995, 11]


def test_bytes_that_are_not_text_are_replaced():
    byte = get_tokenizer("byte")
    assert byte.decode([0xFF, 65, byte.eot, 66]) == "\ufffdAB"


def test_an_unknown_tokenizer_is_refused():
    with pytest.raises(UserError, match=r"data\.tokenizer=bert is unknown; choose one of byte, gpt2"):
        get_tokenizer("bert")


def test_a_document_that_tiktoken_cannot_encode_is_named(gpt2_tokenizer):
    """Rust's panic is not an Exception. It ended the run with a backtrace that did not name the document."""
    with pytest.raises(UserError, match=r"1000001 characters that begins with ' +'"):
        gpt2_tokenizer.encode(" " * 1_000_000 + "a")


def test_no_vocabulary_is_refused_with_the_remedy(monkeypatch):
    def unreachable(name):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tokenizers.tiktoken, "get_encoding", unreachable)
    with pytest.raises(UserError, match=r"no route to host.*TIKTOKEN_CACHE_DIR"):
        get_tokenizer("gpt2")


def test_a_network_that_drops_packets_is_given_up(monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(tokenizers.tiktoken, "get_encoding", lambda name: released.wait(60))
    monkeypatch.setattr(tokenizers, "LOAD_TIMEOUT_S", 0.1)
    start = time.monotonic()
    with pytest.raises(UserError, match=r"no answer within.*TIKTOKEN_CACHE_DIR"):
        get_tokenizer("gpt2")
    assert time.monotonic() - start < 10
    released.set()
