"""Text to token ids and back: UTF-8 bytes, or GPT-2's byte-pair encoding."""

import codecs
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import tiktoken

from data.patience import within
from errors import UserError

LOAD_TIMEOUT_S = 10.0


class Tokenizer(Protocol):
    """What every tokenizer offers; its ids are below `vocab_size`, which is at most 65536 (uint16)."""

    name: str
    vocab_size: int
    eot: int
    """Id of the end-of-text token, which follows every document and which no text encodes to."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; "<|endoftext|>" in it is ordinary text, lone surrogates are replaced."""

    def encode_document(self, text: str) -> np.ndarray:
        """`encode` of a text and end of text, uint16; releases the GIL where the work is worth a thread."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""

    def stream_decoder(self) -> Callable[[int], str]:
        """A function to call with one id after another: the text each completes, never half a character."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and end of text as 256, which decodes to nothing."""

    name = "byte"
    vocab_size = 257
    eot = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def encode_document(self, text: str) -> np.ndarray:
        ids = np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)
        return np.append(ids.astype(np.uint16), np.uint16(self.eot))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def stream_decoder(self) -> Callable[[int], str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda i: decoder.decode(bytes([i]) if i < 256 else b"")


class GPT2Tokenizer:
    """tiktoken's GPT-2 encoding.

    Raises UserError where its vocabulary is neither cached nor downloaded within `LOAD_TIMEOUT_S`.
    """

    name = "gpt2"
    vocab_size = 50257
    eot = 50256

    def __init__(self):
        self._encoding = _load_gpt2()

    def encode(self, text: str) -> list[int]:
        return self.encode_document(text)[:-1].tolist()

    def encode_document(self, text: str) -> np.ndarray:
        try:
            ids = self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # lone surrogates
            return self.encode_document(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        except BaseException as error:
            # tiktoken's regex overflows on about a million blanks in a row. Rust's panic is no Exception.
            if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
                raise
            raise UserError(
                f"tiktoken cannot encode the document of {len(text)} characters that begins with {text[:60]!r}: "
                "remove it, or shorten its runs of white space."
            ) from error
        return np.append(ids.astype(np.uint16), np.uint16(self.eot))

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoding.decode(list(ids), errors="replace")

    def stream_decoder(self) -> Callable[[int], str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda i: decoder.decode(self._encoding.decode_single_token_bytes(i))


TOKENIZERS = {"byte": ByteTokenizer, "gpt2": GPT2Tokenizer}


def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `name`. Raises UserError for an unknown name, or a vocabulary that cannot be loaded."""
    return _tokenizer_class(name)()


def vocab_size(name: str) -> int:
    """Number of tokens of the tokenizer called `name`, known without loading its vocabulary."""
    return _tokenizer_class(name).vocab_size


def end_of_text(name: str) -> int:
    """Id of the end-of-text token of the tokenizer called `name`."""
    return _tokenizer_class(name).eot


def _tokenizer_class(name: str) -> type:
    if name not in TOKENIZERS:
        raise UserError(f"data.tokenizer={name} is unknown: choose one of {', '.join(TOKENIZERS)}.")
    return TOKENIZERS[name]


def _load_gpt2() -> tiktoken.Encoding:
    # tiktoken downloads without a timeout: on a network that swallows packets it would hang for minutes.
    try:
        return within(LOAD_TIMEOUT_S, lambda: tiktoken.get_encoding("gpt2"))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise UserError(
            "GPT-2's vocabulary is not cached and could not be downloaded: set TIKTOKEN_CACHE_DIR to a folder where "
            f"tiktoken has cached it on a machine with a network, or choose data.tokenizer=byte ({reason})."
        ) from error
