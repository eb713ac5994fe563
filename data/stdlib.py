"""A corpus that every machine has: the source text of Python's standard library."""

import hashlib
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from data.config import HELD_OUT_DOCUMENTS, SPLIT_KEYS, DataConfig
from data.folders import real_files
from data.token_files import TokenWriter, differences, has_files, publish, read_meta
from data.tokenizers import get_tokenizer
from errors import UserError, assigned

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}


def build(config: DataConfig) -> None:
    """Tokenize the standard library into `config.dir`, one document per file.

    Do nothing if the folder already holds the library with the same tokenizer and split. The tokens may come from
    another Python, because a run may be using them. Raise UserError if the folder holds another corpus, tokenizer or
    split.
    """
    folder = Path(config.dir).expanduser()
    files = source_files()
    split = {key: getattr(config, key) for key in SPLIT_KEYS}
    source = {"name": "stdlib", "python": platform.python_version(), "files": len(files)} | split
    publish(folder)
    meta = read_meta(folder)
    if meta and meta["source"].get("name") != "stdlib":
        use = f"set data=tokens data.tokenizer={meta['tokenizer']} to use it, or " if has_files(folder) else ""
        raise UserError(f"data.dir={folder} holds another corpus than the standard library; {use}choose another folder")
    if meta and has_files(folder):
        before, now = meta["source"] | {"tokenizer": meta["tokenizer"]}, split | {"tokenizer": config.tokenizer}
        if differing := differences(before, now):
            same = " ".join(assigned(f"data.{key}", before.get(key)) for key in now if before.get(key) != now[key])
            raise UserError(f"data.dir={folder} was prepared with {differing}; set {same}, or choose another data.dir")
        return
    tokenizer = get_tokenizer(config.tokenizer, ", or data.tokenizer=byte")
    with TokenWriter(folder, source) as writer:
        for name, text in read_files(files):
            writer.write(split_of(name, config), tokenizer.encode_document(text).tobytes(), 1)
        writer.finish(tokenizer.name)


def split_of(document: str, config: DataConfig) -> str:
    """Return train or val for the document of that name: a seeded hash, so the order of documents does not matter."""
    digest = hashlib.sha256(f"{config.split_seed}:{document}".encode(errors="replace")).digest()
    share = config.val_fraction or HELD_OUT_DOCUMENTS
    return "val" if int.from_bytes(digest[:8]) < share * 2**64 else "train"


def source_files() -> list[str]:
    """Return the sorted paths of the library's modules relative to its folder, with forward slashes, without tests."""
    files, _ = real_files([LIBRARY], (".py",), SKIPPED_FOLDERS)
    return sorted(path.relative_to(LIBRARY).as_posix() for path in files)


def read_files(files: list[str]) -> Iterator[tuple[str, str]]:
    """Yield path and text of each file that can be decoded with the encoding it declares."""
    for name in files:
        try:
            with tokenize.open(LIBRARY / name) as file:
                yield name, file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue
