"""Opening the token files of a corpus for training."""

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from data import stdlib
from data.config import SPLIT_KEYS, DataConfig
from data.folders import LFS_POINTER
from data.token_files import DTYPE, SPLITS, differences, read_meta
from data.tokenizers import vocab_size
from errors import UserError, assigned

# The first bytes of files that would train as tokens of 16 bits but are not.
FOREIGN = {
    struct.pack("<i", 20240520): "has llm.c's header of 1,024 bytes; cut it off with `tail -c +1025`",
    struct.pack("<i", 20240801): "holds llm.c's tokens of Llama 3; prepare its text again",
    b"\x93NUMPY": "is a file of NumPy's; write its uint16 array with ndarray.tofile",
    LFS_POINTER: "is a Git LFS pointer, not the file itself; run `git lfs pull` there",
}

TEXT_KEYS = "source", "text_column", "document_start", "train_files", "val_files"  # only data.prepare reads them


@dataclass(frozen=True)
class TokenSet:
    """The opened token files of a corpus."""

    train: np.ndarray
    """Read-only memory map of train.bin, uint16, one dimension."""
    val: np.ndarray
    """Read-only memory map of val.bin, uint16, one dimension."""
    tokenizer: str
    vocab_size: int
    dir: Path
    sha256: str | None
    """Checksum of train.bin from meta.json, or None if meta.json or its checksum is missing."""


def open_tokens(config: DataConfig) -> TokenSet:
    """Map the token files of `config.dir`. With name=stdlib, build them first if needed.

    Files without a meta.json (nanoGPT's own) are accepted; their tokens are checked when batches are loaded.

    Raises:
        UserError: a file is missing, empty, truncated, in a foreign format, or does not match meta.json; or a setting
            names a text that the files were not made from.
    """
    if config.name in ("stdlib", "tokens"):
        _refuse_text(config)
    if config.name == "stdlib":
        stdlib.build(config)
    folder = Path(config.dir).expanduser()
    meta = read_meta(folder)
    made = meta["source"].get("name") if meta else None
    if made not in (None, config.name) and config.name != "tokens":
        problem = f"does not match {folder / 'meta.json'}, whose tokens were made with data={made}"
        raise UserError(f"data={config.name} {problem}; set data={made} or another data.dir")
    if config.source is not None and meta and "source" in meta["source"]:
        _refuse_other_source(config.source, meta["source"]["source"], folder)
    if meta and config.name not in ("stdlib", "tokens"):
        _refuse_other_settings(config, meta["source"], folder)
    if meta and meta["tokenizer"] != config.tokenizer:
        problem = f"does not match {folder / 'meta.json'}, whose tokens are {meta['tokenizer']}'s"
        remedy = f"set data.tokenizer={meta['tokenizer']} or another data.dir"
        raise UserError(f"data.tokenizer={config.tokenizer} {problem}; {remedy}")
    if meta is None and (folder / "meta.pkl").exists():
        raise UserError(
            f"data.dir={folder} holds nanoGPT's tokens of single characters (meta.pkl), which no data.tokenizer reads; "
            "prepare the text again with `python -m data.prepare data=text data.tokenizer=byte data.source=input.txt`"
        )
    maps = {split: _open_split(folder / f"{split}.bin", meta, config) for split in SPLITS}
    return TokenSet(
        **maps,
        tokenizer=config.tokenizer,
        vocab_size=vocab_size(config.tokenizer),
        dir=folder,
        sha256=meta["sha256"].get("train.bin") if meta else None,
    )


def _refuse_text(config: DataConfig) -> None:
    """Raise UserError if a setting is given that only data.prepare reads. Training itself splits the stdlib."""
    given = _given(config, TEXT_KEYS if config.name == "stdlib" else (*TEXT_KEYS, *SPLIT_KEYS))
    if not given:
        return
    unused = assigned(f"data.{next(iter(given))}", next(iter(given.values())))
    words = [assigned(f"data.{key}", value) for key, value in ({"source": "TEXT"} | given).items()]
    remedy = f"prepare it with `python -m data.prepare data=text {' '.join(words)} data.dir=FOLDER`"
    rest = ", or set data.source=null" if "source" in given else ", or leave it out"
    raise UserError(f"{unused} is not used by data={config.name}; {remedy}{rest}")


def _refuse_other_source(source: str, made: object, folder: Path) -> None:
    """Raise UserError if the tokens in `folder` were not made from `source`. Two paths to the same place are equal."""
    if made is None:
        problem = "from the files of the Hugging Face hub; leave data.source out"
    elif _is_same_place(str(made), source):
        return
    else:
        problem = f"from {made}; prepare it in another data.dir, or leave data.source out"
    raise UserError(f"{assigned('data.source', source)}, but {folder} was made {problem}")


def _given(config: DataConfig, keys: Iterable[str]) -> dict:
    """Return the settings of these keys that differ from their defaults."""
    defaults = {field.name: field.default for field in fields(DataConfig)}
    return {key: getattr(config, key) for key in keys if getattr(config, key) != defaults[key]}


def _refuse_other_settings(config: DataConfig, made: dict, folder: Path) -> None:
    """Raise UserError if a setting of the text is given, except the source, and another value made the tokens."""
    known = [key for key in (*TEXT_KEYS, *SPLIT_KEYS) if key in made and key != "source"]
    if differing := differences(made, _given(config, known)):
        remedy = "leave the setting out, or prepare the text in another data.dir"
        raise UserError(f"data.dir={folder} was prepared with {differing}; {remedy}")


def _is_same_place(*sources: str) -> bool:
    """Return whether two sources can be the same text. A relative one may have been written in another folder."""
    short, long = sorted((Path(source).expanduser() for source in sources), key=Path.is_absolute)
    is_end = not short.is_absolute() and long.is_absolute() and long.parts[-len(short.parts) :] == short.parts
    return is_end or os.path.realpath(short) == os.path.realpath(long)


def _open_split(path: Path, meta: dict | None, config: DataConfig) -> np.ndarray:
    remedy = _remedy(config, path.parent)
    if not path.is_file():
        raise UserError(f"{path} does not exist; {remedy}")
    size = path.stat().st_size
    if size == 0:
        raise UserError(f"{path} is empty (0 bytes); {remedy}")
    if meta is None:
        _refuse_foreign(path)
    if size % DTYPE.itemsize:
        raise UserError(f"{path} ends in half a token at byte {size - 1}; {remedy}")
    if meta and (promised := meta["counts"][path.stem]["tokens"] * DTYPE.itemsize) != size:
        raise UserError(f"{path} holds {size} bytes, but its meta.json promises {promised}; {remedy}")
    return np.memmap(path, dtype=DTYPE, mode="r")


def _refuse_foreign(path: Path) -> None:
    """Raise UserError if the file is in another format than flat tokens of 16 bits."""
    with open(path, "rb") as file:
        head = file.read(4096)
    for first, problem in FOREIGN.items():
        if head.startswith(first):
            raise UserError(f"{path} {problem}")
    tokens = np.frombuffer(head[: len(head) // 8 * 8], dtype=DTYPE)
    if len(tokens) >= 64 and tokens[0::2].any() and not tokens[1::2].any():
        raise UserError(f"{path} holds tokens of 32 or 64 bits; write them as uint16")


def _remedy(config: DataConfig, folder: Path) -> str:
    """Return how the user gets complete token files without losing the work of an unfinished preparation."""
    if config.name == "stdlib":
        return f"delete {config.dir} and start again to build it"
    if (folder / "unfinished").is_dir():
        return "its preparation is unfinished, so run the same `python -m data.prepare` again, or set data.dir"
    has_files = folder.is_dir() and any(folder.iterdir())
    if config.name == "tokens":  # The files may be the user's own, so do not advise to delete them.
        preparation = "" if has_files else f", or run {_preparation(config)}"
        return f"set data.dir to a folder of complete token files{preparation}"
    delete = f"delete the files in {config.dir} and " if has_files else ""
    return f"{delete}run {_preparation(config)}, or set data.dir"


def _preparation(config: DataConfig) -> str:
    """Return the command that makes the token files."""
    corpus = "text" if config.name == "tokens" else config.name
    words = [f"data={corpus}", assigned("data.dir", config.dir)]
    if config.source or corpus == "text":
        words.append(assigned("data.source", config.source or "..."))
    if config.tokenizer != "gpt2":  # the default of all corpora that are prepared
        words.append(assigned("data.tokenizer", config.tokenizer))
    return f"`python -m data.prepare {' '.join(words)}`"
