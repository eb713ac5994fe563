"""Token files on disk: flat little-endian uint16 train.bin and val.bin (nanoGPT's format), described by meta.json.

meta.json is written last and holds `tokenizer`, `vocab_size`, `counts` (tokens and documents of each split), `source`
(the settings the files were made with) and `sha256` (of each file).
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from filelock import FileLock, Timeout

from data.config import DataConfig
from data.tokenizers import vocab_size
from errors import UserError

SPLITS = ("train", "val")
DTYPE = np.dtype("<u2")
PROGRESS = "settings", "position", "counts", "skipped"  # of a TokenWriter, as progress.json has it


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
    remedy = _remedy(config, path.parent)
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


def _remedy(config: DataConfig, folder: Path) -> str:
    """What gives `folder` whole token files; nothing that a preparation has done is to be lost."""
    source = " data.source=..." if config.name == "text" else ""
    command = f"`python -m data.prepare data={config.name}{source} data.dir={config.dir}`"
    if (folder / "unfinished").is_dir() and config.name != "stdlib":
        return "its preparation has not ended; run `python -m data.prepare` as before, which goes on, or set data.dir"
    if config.name == "stdlib":
        return f"delete {config.dir} and it is built again"
    if config.name == "tokens":
        return "set data.dir to a folder of whole token files"
    delete = f"delete what {config.dir} holds and " if folder.is_dir() and any(folder.iterdir()) else ""
    return f"{delete}run {command}, or set data.dir"


def read_meta(folder: Path) -> dict | None:
    """What `folder`/meta.json holds, None where there is none. Raises UserError where it is not of our making."""
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        ours = isinstance(meta["tokenizer"], str) and isinstance(meta["source"], dict)
        ours = ours and all(isinstance(meta["counts"][split]["tokens"], int) for split in SPLITS)
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise UserError(f"data.dir={folder} is a file: name the folder of the token files.") from error
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


class TokenWriter:
    """train.bin and val.bin in the making, in `folder`/unfinished, from where a killed process can be continued.

    What is written counts from the next `save` on; whatever a process wrote after its last one is cut off when another
    continues. `finish` moves the files to `folder`, meta.json last. Raises UserError where another process is at it,
    where unfinished files were begun with other settings, or where token files of unknown origin are in the way.
    """

    def __init__(self, folder: Path, settings: dict, *, resume: bool = True):
        if read_meta(folder) is None and any((folder / f"{split}.bin").exists() for split in SPLITS):
            raise UserError(f"{folder} holds token files without a meta.json: choose another data.dir or delete them.")
        self.folder, self.scratch, self.settings = folder, folder / "unfinished", settings
        self.counts = {split: {"tokens": 0, "documents": 0} for split in SPLITS}
        self.position: list[int] | None = None
        """Where to read on: what was last given to `save`, None at the start."""
        self.skipped = 0
        self.scratch.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.scratch / "lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise UserError(f"Another process is writing to {self.scratch}: wait for it, or stop it.") from error
        if resume:
            self._continue()
        self._files = {split: self._open(split) for split in SPLITS}

    def _continue(self) -> None:
        path = self.scratch / "progress.json"
        if not path.exists():
            return
        progress = json.loads(path.read_text(encoding="utf-8"))
        if differing := differences(progress["settings"], self.settings):
            raise UserError(
                f"{self.scratch} was begun with {differing}: finish that first, delete it, or choose another data.dir."
            )
        self.counts, self.position, self.skipped = progress["counts"], progress["position"], progress["skipped"]

    def _open(self, split: str) -> BinaryIO:
        file = open(self.scratch / f"{split}.bin", "ab")  # noqa: SIM115 (closed by `close`)
        size = self.counts[split]["tokens"] * DTYPE.itemsize
        if file.tell() < size:
            raise UserError(f"{file.name} holds {file.tell()} bytes of the {size} written: delete {self.scratch}.")
        file.truncate(size)
        return file

    def write(self, split: str, block: bytes, documents: int) -> None:
        """Appends whole documents, each followed by end of text."""
        with self._disk():
            self._files[split].write(block)
        self.counts[split]["tokens"] += len(block) // DTYPE.itemsize
        self.counts[split]["documents"] += documents

    def save(self, position: list[int]) -> None:
        """Makes everything written so far last, and `position` the place from which to go on."""
        self.position = position
        with self._disk():
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
            self._write_json("progress.json", {name: getattr(self, name) for name in PROGRESS})

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self.scratch} cannot be written ({error.strerror}): make room, and run the same command to continue."
            ) from error

    def finish(self, tokenizer: str, source: dict) -> dict:
        """Moves the files to where they are read, and returns what meta.json says of them.

        Raises UserError where a split got no document.
        """
        for split, change in (("train", "lower"), ("val", "raise")):
            if not self.counts[split]["documents"]:
                total = sum(count["documents"] for count in self.counts.values())
                self.close()
                shutil.rmtree(self.scratch)
                if total < len(SPLITS):
                    found = "one document" if total else "no document"
                    raise UserError(
                        f"There is {found}, and train.bin and val.bin need one each (a .txt file "
                        "is one, a line of .jsonl, a row of .parquet): give more, or data.document_start, where one "
                        "begins."
                    )
                raise UserError(f"None of the {total} documents fell into {split}.bin: {change} data.val_fraction.")
        self.save(self.position)
        meta = {"tokenizer": tokenizer, "vocab_size": vocab_size(tokenizer), "source": source, "counts": self.counts}
        meta["sha256"] = {f"{split}.bin": checksum(self.scratch / f"{split}.bin") for split in SPLITS}
        self._write_json("meta.json", meta)
        self.close()
        publish(self.folder)
        return meta

    def _write_json(self, name: str, content: dict) -> None:
        partial = self.scratch / f"{name}.partial"
        with open(partial, "w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.scratch / name)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._lock.release()

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def publish(folder: Path) -> None:
    """Moves finished token files out of `folder`/unfinished, if there are any; may be killed and called again."""
    scratch = folder / "unfinished"
    if not (scratch / "meta.json").exists():
        return
    (scratch / "progress.json").unlink(missing_ok=True)
    # An old description must not vouch for new files, nor a new one for old files.
    (folder / "meta.json").unlink(missing_ok=True)
    for name in ("train.bin", "val.bin", "meta.json"):
        if (scratch / name).exists():
            os.replace(scratch / name, folder / name)
    shutil.rmtree(scratch)


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def differences(before: dict, now: dict) -> str:
    """What of two settings differs, as text: "a=1, not a=2"; empty where nothing does."""
    keys = [key for key in now if before.get(key) != now[key]]
    was, wanted = (", ".join(f"{key}={side.get(key)}" for key in keys) for side in (before, now))
    return f"{was}, not {wanted}" if keys else ""
