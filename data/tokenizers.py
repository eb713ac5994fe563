"""Text to token ids and back: UTF-8 bytes, or GPT-2's byte-pair encoding."""

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np
import tiktoken

from data.patience import within
from errors import UserError, check_choice, described

LOAD_TIMEOUT_S = 10.0
LONG_RUN = 2**16  # characters; tiktoken's regex overflows its stack on about a million of white space
WHITE_SPACE = r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"  # Rust's \s, Python's has more


class Tokenizer(ABC):
    """The interface of a tokenizer. Its ids are below `vocab_size`, which is at most 65536 (uint16)."""

    name: str
    vocab_size: int
    eot: int
    """Id of the end-of-text token. It follows every document, and no text contains it."""

    @abstractmethod
    def encode_document(self, text: str) -> np.ndarray:
        """Return the ids of `text` followed by end of text, uint16.

        "<|endoftext|>" is ordinary text. Lone surrogates are replaced.
        """

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, see encode_document."""
        return self.encode_document(text)[:-1].tolist()

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def stream_decoder(self) -> Callable[[int], str]:
        """Return a function of one id after another that returns the text each id completes, in whole characters."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda token: decoder.decode(self.token_bytes(token))


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255. Id 256 is end of text, which decodes to an empty string."""

    name, vocab_size, eot = "byte", 257, 256

    def encode_document(self, text: str) -> np.ndarray:
        ids = np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)
        return np.append(ids.astype(np.uint16), np.uint16(self.eot))

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""


class GPT2Tokenizer(Tokenizer):
    """tiktoken's GPT-2 encoding.

    Raises:
        UserError: the vocabulary is not cached and cannot be downloaded within `LOAD_TIMEOUT_S`.
    """

    name, vocab_size, eot = "gpt2", 50257, 50256

    def __init__(self):
        try:
            # tiktoken downloads without a time-out. On a network that drops packets it would hang for minutes.
            self._encoding = within(LOAD_TIMEOUT_S, lambda: tiktoken.get_encoding("gpt2"))
        except Exception as error:
            raise UserError(
                f"GPT-2's vocabulary is not cached and cannot be downloaded ({described(error)}); set "
                "TIKTOKEN_CACHE_DIR to a folder that holds it"
            ) from error

    def encode_document(self, text: str) -> np.ndarray:
        cuts = [0, *_cuts(text), len(text)]
        try:
            parts = [self._encoding.encode_to_numpy(text[i:j], disallowed_special=()) for i, j in pairwise(cuts)]
        except UnicodeEncodeError:  # lone surrogates
            return self.encode_document(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        except BaseException as error:
            # Rust's panic is not an Exception.
            if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
                raise
            raise UserError(
                f"tiktoken cannot encode the document of {len(text)} characters that begins with {text[:60]!r}; "
                "remove it"
            ) from error
        return np.concatenate([*parts, [self.eot]]).astype(np.uint16)

    def token_bytes(self, token: int) -> bytes:
        return self._encoding.decode_single_token_bytes(token)


def _cuts(text: str) -> list[int]:
    """Return where GPT-2's pattern cuts `text` around its long runs of white space.

    It cuts before a run, and before the last character of the run, which belongs to the word that follows. A run at
    the end of the text is one piece.
    """
    step = LONG_RUN // 2  # a long run holds one of these pieces as a whole, which is a quick test
    if not any(text[i : i + step // 8].isspace() for i in range(0, len(text), step)):
        return []
    runs = (run for run in re.finditer(f"{WHITE_SPACE}{{{LONG_RUN},}}", text) if run.end() < len(text))
    return [cut for run in runs for cut in (run.start(), run.end() - 1)]


TOKENIZERS = {"byte": ByteTokenizer, "gpt2": GPT2Tokenizer}


def get_tokenizer(name: str, alternative: str = "") -> Tokenizer:
    """Return the tokenizer called `name`.

    Raises:
        UserError: the name is unknown, or the vocabulary cannot be loaded. The message then ends with `alternative`,
            another remedy.
    """
    tokenizer = _tokenizer_class(name)
    try:
        return tokenizer()
    except UserError as error:
        raise UserError(f"{error}{alternative}") from error


def vocab_size(name: str) -> int:
    """Return the number of tokens of the tokenizer called `name`, without loading its vocabulary."""
    return _tokenizer_class(name).vocab_size


def end_of_text(name: str) -> int:
    """Return the end-of-text id of the tokenizer called `name`, without loading its vocabulary."""
    return _tokenizer_class(name).eot


def _tokenizer_class(name: str) -> type[Tokenizer]:
    check_choice("data.tokenizer", name, TOKENIZERS)
    return TOKENIZERS[name]
