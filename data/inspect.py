"""Show the content of token files: python -m data.inspect data=openwebtext

Print counts, document lengths and the first documents as text, and verify the checksums of meta.json.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from data.config import DataConfig
from data.token_files import SPLITS, checksum, read_meta
from data.tokenizers import Tokenizer, get_tokenizer
from data.tokens import open_tokens
from errors import UserError

CHUNK = 2**24  # tokens searched at a time
SHOWN_DOCUMENTS, SHOWN_TOKENS = 3, 100
QUANTILES = 0.01, 0.25, 0.5, 0.75, 0.99


def inspect(config: DataConfig, *, log: Callable[[str], None] = print) -> None:
    """Log the content of `config.dir`. Raise UserError if files are missing or differ from meta.json's checksums."""
    tokens = open_tokens(config)
    tokenizer = get_tokenizer(tokens.tokenizer)
    verdict = _verify(tokens.dir)
    for split in SPLITS:
        lengths = document_lengths(getattr(tokens, split), tokenizer.eot)
        log(f"{split}.bin: {_describe(lengths)}; {verdict}")
    for number, text in enumerate(first_documents(tokens.train, tokenizer), start=1):
        log(f"document {number} of train.bin: {text}")


def document_lengths(tokens: np.ndarray, eot: int) -> np.ndarray:
    """Return the tokens of each document, including its end of text. The last document may lack an end of text."""
    ends = [np.flatnonzero(tokens[i : i + CHUNK] == eot) + i + 1 for i in range(0, len(tokens), CHUNK)]
    return np.diff(np.unique(np.concatenate([[0], *ends, [len(tokens)]])))


def first_documents(tokens: np.ndarray, tokenizer: Tokenizer) -> list[str]:
    """Return the beginnings of the first documents as text, quoted like Python strings."""
    texts, start = [], 0
    for number, length in enumerate(document_lengths(tokens[:CHUNK], tokenizer.eot)[:SHOWN_DOCUMENTS], start=1):
        document = tokens[start : start + length]
        document = document[document != tokenizer.eot]
        shown = document[:SHOWN_TOKENS].tolist()
        if max(shown, default=0) >= tokenizer.vocab_size:
            raise UserError(
                f"train.bin holds token {max(shown)} in document {number}, and the {tokenizer.name} tokenizer has "
                f"{tokenizer.vocab_size} tokens; set the data.tokenizer that the files were made with"
            )
        texts.append(repr(tokenizer.decode(shown)) + (" ..." if len(document) > SHOWN_TOKENS else ""))
        start += length
    return texts


def _verify(folder: Path) -> str:
    meta = read_meta(folder)
    if not (meta and meta["sha256"]):
        return "no meta.json with checksums"
    for split in SPLITS:
        path = folder / f"{split}.bin"
        found, promised = checksum(path)[:16], meta["sha256"][path.name][:16]
        if found != promised:
            raise UserError(
                f"{path} has the SHA-256 {found}..., but its meta.json promises {promised}...; prepare it again"
            )
    return "SHA-256 as in meta.json"


def _describe(lengths: np.ndarray) -> str:
    quantiles = ", ".join(f"{quantile:.0%} {np.quantile(lengths, quantile):,.0f}" for quantile in QUANTILES)
    documents = f"{len(lengths):,} documents of {lengths.mean():,.0f} tokens on average"
    return f"{lengths.sum():,} tokens in {documents} ({quantiles}, longest {lengths.max():,})"


if __name__ == "__main__":
    from conf.cli import launch  # conf imports data, so data imports it only as a program

    launch(lambda config: inspect(config.data), "inspect")
