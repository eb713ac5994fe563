import re
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


spaces = st.text(alphabet=" \n\t\r\xa0\u3000\u2028\x1c\x85\ufeff\u200b", max_size=40)


@same_tokenizer
@given(parts=st.lists(spaces | st.text(alphabet="a1'é語s.", max_size=3), max_size=9))
def test_long_runs_of_white_space_do_not_change_the_ids(gpt2_tokenizer, parts):
    text = "".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizers, "LONG_RUN", 16)
        assert gpt2_tokenizer.encode(text) == gpt2_tokenizer._encoding.encode_ordinary(text)


def test_white_space_is_rusts():
    """Python counts four control characters more."""
    found = {chr(i) for i in range(2**14) if re.match(tokenizers.WHITE_SPACE, chr(i))}
    assert found == {chr(i) for i in range(2**14) if chr(i).isspace()} - set("\x1c\x1d\x1e\x1f")


@pytest.mark.parametrize("run", [" " * 1_200_000, " \n\u3000\xa0" * 300_000], ids=["blanks", "mixed"])
def test_a_million_blanks_in_a_row_are_encoded(gpt2_tokenizer, run):
    """They overflow the stack of tiktoken's regex, but not at the end of a text, so the ids to expect are known."""
    encode = gpt2_tokenizer._encoding.encode_ordinary
    expected = [*encode("It's"), *encode(run[:-1]), *encode(run[-1] + "fine.")]
    assert gpt2_tokenizer.encode(f"It's{run}fine.") == expected


def test_a_document_that_tiktoken_cannot_encode_is_named(gpt2_tokenizer, monkeypatch):
    """Rust's panic is not an Exception. It ended the run with a backtrace that did not name the document."""

    class PanicException(BaseException):
        pass

    class Panicking:
        def encode_to_numpy(self, text, **options):
            raise PanicException

    monkeypatch.setattr(gpt2_tokenizer, "_encoding", Panicking())
    with pytest.raises(UserError, match=r"document of 3 characters that begins with 'abc'"):
        gpt2_tokenizer.encode("abc")


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
