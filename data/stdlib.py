"""The corpus that every machine has: the source text of the running Python's standard library."""

import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from data.config import DataConfig
from data.tokenizers import get_tokenizer
from data.tokens import TokenWriter, has_files, read_meta, split_of
from errors import UserError

SKIPPED_FOLDERS = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}


def build(config: DataConfig) -> None:
    """Tokenize the standard library into `config.dir`, unless this very Python did so with the same settings.

    A document is a file. Raises UserError where `config.dir` holds another corpus.
    """
    folder = Path(config.dir).expanduser()
    files = source_files()
    source = {
        "name": "stdlib",
        "python": platform.python_version(),
        "files": len(files),
        "val_fraction": config.val_fraction,
        "split_seed": config.split_seed,
    }
    meta = read_meta(folder)
    if meta and meta["source"].get("name") != "stdlib":
        raise UserError(f"{folder} holds another corpus than the standard library: choose another data.dir.")
    if meta and meta["source"] == source and meta["tokenizer"] == config.tokenizer and has_files(folder):
        return
    tokenizer = get_tokenizer(config.tokenizer)
    with TokenWriter(folder, source, resume=False) as writer:
        for name, text in read_files(files):
            writer.write(split_of(name, config), tokenizer.encode_document(text).tobytes(), 1)
        writer.finish(tokenizer.name, source)


def library_folder() -> Path:
    """Where the standard library of the running Python lies."""
    return Path(sysconfig.get_paths()["stdlib"])


def source_files() -> list[str]:
    """Paths of the library's modules relative to its folder, with forward slashes, sorted; no tests among them."""
    root = library_folder()
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in names if name.endswith(".py")]
    return sorted(found)


def read_files(files: list[str]) -> Iterator[tuple[str, str]]:
    """Path and text of each file that decodes by the encoding it declares."""
    for name in files:
        try:
            with tokenize.open(library_folder() / name) as file:
                yield name, file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue
