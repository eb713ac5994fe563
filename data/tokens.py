"""Token files on disk: flat little-endian uint16 train.bin and val.bin (nanoGPT's format), described by meta.json.

meta.json is written last and holds `tokenizer`, `vocab_size`, `counts` (tokens and documents of each split), `source`
(the settings the files were made with) and `sha256` (of each file).
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.config import DataConfig
from data.tokenizers import Tokenizer, vocab_size
from errors import UserError

SPLITS = ("train", "val")
DTYPE = np.dtype("<u2")
REMEDIES = {
    "stdlib": "delete {dir} and it is built again",
    "tokens": "set data.dir to a folder of whole token files",
    "text": "delete what {dir} holds and run `python -m data.prepare data=text data.source=... data.dir={dir}`, "
    "or set data.dir",
}


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


def open_tokens(config: DataConfig) -> TokenSet:
    """Map the token files of `config.dir`, building them first where name=stdlib needs it.

    Raises UserError where a file is missing, empty, truncated, or not what meta.json says. Files without a meta.json
    (nanoGPT's own) are taken as they are; their tokens are checked when batches are loaded.
    """
    if config.name == "stdlib":
        from data import stdlib  # it writes through this module

        stdlib.build(config)
    folder = Path(config.dir).expanduser()
    meta = read_meta(folder)
    if meta and meta["tokenizer"] != config.tokenizer:
        raise UserError(
            f"{folder / 'meta.json'} says that its tokens are {meta['tokenizer']}'s, not {config.tokenizer}'s: "
            f"set data.tokenizer={meta['tokenizer']} or another data.dir."
        )
    maps = {split: _open_split(folder / f"{split}.bin", meta, config) for split in SPLITS}
    return TokenSet(**maps, tokenizer=config.tokenizer, vocab_size=vocab_size(config.tokenizer), dir=folder)


def _open_split(path: Path, meta: dict | None, config: DataConfig) -> np.ndarray:
    remedy = REMEDIES[config.name].format(dir=config.dir)
    if not path.is_file():
        raise UserError(f"{path} does not exist: {remedy}.")
    size = path.stat().st_size
    if size == 0:
        raise UserError(f"{path} is empty (0 bytes): {remedy}.")
    if size % DTYPE.itemsize:
        raise UserError(f"{path} ends in half a token at byte {size - 1}, so it is no whole uint16 file: {remedy}.")
    if meta and (promised := meta["counts"][path.stem]["tokens"] * DTYPE.itemsize) != size:
        raise UserError(f"{path} holds {size} bytes, but its meta.json promises {promised}: {remedy}.")
    return np.memmap(path, dtype=DTYPE, mode="r")


def read_meta(folder: Path) -> dict | None:
    """What `folder`/meta.json holds, None where there is none. Raises UserError where it is not of our making."""
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        ours = isinstance(meta["tokenizer"], str) and isinstance(meta["source"], dict)
        ours = ours and all(isinstance(meta["counts"][split]["tokens"], int) for split in SPLITS)
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError):
        ours = False
    if not ours:
        raise UserError(f"{path} does not describe token files: delete it, or set another data.dir.")
    return meta


def has_files(folder: Path) -> bool:
    """Whether both token files are in `folder`."""
    return all((folder / f"{split}.bin").is_file() for split in SPLITS)


def split_of(document: str, config: DataConfig) -> str:
    """train or val for the document of that name: a seeded hash, so whatever order documents come in."""
    digest = hashlib.sha256(f"{config.split_seed}:{document}".encode(errors="replace")).digest()
    return "val" if int.from_bytes(digest[:8]) < config.val_fraction * 2**64 else "train"


def write_tokens(
    folder: Path, documents: Iterable[tuple[str, Sequence[int]]], tokenizer: Tokenizer, source: dict
) -> dict:
    """Write `documents`, pairs of a split and token ids, as train.bin and val.bin, and return what meta.json says.

    End of text follows each document. Streams into a scratch folder inside `folder` and moves the files out when all
    are whole. Raises UserError where a split got no document, or where token files of unknown origin are in the way.
    """
    if read_meta(folder) is None and any((folder / f"{split}.bin").exists() for split in SPLITS):
        raise UserError(f"{folder} holds token files without a meta.json: choose another data.dir or delete them.")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder) as scratch:
        scratch = Path(scratch)
        meta = {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size, "source": source}
        meta |= _write_splits(scratch, documents, tokenizer.eot)
        (scratch / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        # An old description must not vouch for new files, nor a new one for old files.
        (folder / "meta.json").unlink(missing_ok=True)
        for name in ("train.bin", "val.bin", "meta.json"):
            os.replace(scratch / name, folder / name)
    return meta


def _write_splits(scratch: Path, documents: Iterable[tuple[str, Sequence[int]]], eot: int) -> dict:
    counts = {split: {"tokens": 0, "documents": 0} for split in SPLITS}
    hashes = {split: hashlib.sha256() for split in SPLITS}
    with open(scratch / "train.bin", "wb") as train, open(scratch / "val.bin", "wb") as val:
        files = {"train": train, "val": val}
        for split, ids in documents:
            block = np.array([*ids, eot], dtype=DTYPE).tobytes()
            files[split].write(block)
            hashes[split].update(block)
            counts[split]["tokens"] += len(ids) + 1
            counts[split]["documents"] += 1
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    for split, change in (("train", "lower"), ("val", "raise")):
        if not counts[split]["documents"]:
            total = sum(count["documents"] for count in counts.values())
            raise UserError(f"None of the {total} documents fell into {split}.bin: {change} data.val_fraction.")
    return {"counts": counts, "sha256": {f"{split}.bin": hashes[split].hexdigest() for split in SPLITS}}
