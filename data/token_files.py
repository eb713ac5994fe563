"""Token files on disk: flat little-endian uint16 train.bin and val.bin (nanoGPT's format), described by meta.json.

meta.json is written last. It holds `tokenizer`, `vocab_size`, `counts` (tokens and documents of each split), `source`
(the settings that the files were made with), `sha256` (of each file) and, if any, `bad_rows` (which were skipped).
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import BinaryIO

import numpy as np
from filelock import FileLock, Timeout

from data.config import DataConfig
from data.tokenizers import vocab_size
from errors import UserError, assigned

SPLITS = ("train", "val")
DTYPE = np.dtype("<u2")


def read_meta(folder: Path) -> dict | None:
    """Return the content of `folder`/meta.json, or None if there is no such file. `sha256` is {} if it is missing."""
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        types = [(meta["tokenizer"], str), (meta["source"], dict)]
        types += [(meta["counts"][split]["tokens"], int) for split in SPLITS]
        checksums = meta.get("sha256") or {}
        types += [(checksums[f"{split}.bin"], str) for split in SPLITS if checksums]
        if all(isinstance(value, kind) for value, kind in types):
            return meta | {"sha256": checksums}
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise UserError(f"data.dir={folder} is a file; give the folder of the token files") from error
    except (ValueError, LookupError, TypeError):
        pass
    raise UserError(f"{path} does not describe token files; delete it, or set another data.dir")


def has_files(folder: Path) -> bool:
    """Return whether both token files are in `folder`."""
    return all((folder / f"{split}.bin").is_file() for split in SPLITS)


class TokenWriter(AbstractContextManager):
    """Write train.bin and val.bin in `folder`/unfinished, so that a killed process can be continued.

    The files depend on `settings`. Each `save` makes the tokens so far durable. The next process cuts
    off tokens written after the last `save`. `finish` moves the files to `folder`, meta.json last.

    Raises:
        UserError: another process writes there, the unfinished files were begun with other settings, or `folder`
            holds token files without a meta.json.
    """

    def __init__(self, folder: Path, settings: dict):
        if read_meta(folder) is None and any((folder / f"{split}.bin").exists() for split in SPLITS):
            raise UserError(f"{folder} holds token files without a meta.json; delete them, or choose another data.dir")
        self.folder, self.scratch, self.settings = folder, folder / "unfinished", settings
        self.counts = {split: {"tokens": 0, "documents": 0} for split in SPLITS}
        self.position: Sequence | None = None
        """Where the next process continues to read; None at the start."""
        self.skipped, self.bad_rows = 0, []
        """The number of empty documents, and what is wrong with each row that was left out."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.scratch)
        if (saved := self.scratch / "progress.json").exists():
            progress = json.loads(saved.read_text(encoding="utf-8"))
            if differing := differences(progress["settings"], settings):
                remedy = "finish that preparation, delete its folder, or choose another data.dir"
                raise UserError(f"{self.scratch} was begun with {differing}; {remedy}")
            self.counts, self.position = progress["counts"], progress["position"]
            self.skipped, self.bad_rows = progress["skipped"], progress["bad_rows"]
        self._files = {split: self._open(split) for split in SPLITS}

    def _open(self, split: str) -> BinaryIO:
        file = open(self.scratch / f"{split}.bin", "ab")  # noqa: SIM115 (closed by `close`)
        size = self.counts[split]["tokens"] * DTYPE.itemsize
        if file.tell() < size:
            raise UserError(f"{file.name} has {file.tell()} of the {size} bytes written; delete {self.scratch}")
        file.truncate(size)
        return file

    def write(self, split: str, block: bytes, documents: int) -> None:
        """Append whole documents, each followed by end of text."""
        with self._disk():
            self._files[split].write(block)
        self.counts[split]["tokens"] += len(block) // DTYPE.itemsize
        self.counts[split]["documents"] += documents

    def total(self, key: str) -> int:
        """Return the tokens or documents of both splits."""
        return sum(count[key] for count in self.counts.values())

    def hold_out_tail(self, share: float, eot: int) -> None:
        """Move the last `share` of train.bin's tokens to val.bin, which is empty. Documents end with `eot`."""
        self.save()
        tokens = np.memmap(self.scratch / "train.bin", dtype=DTYPE, mode="r")
        cut = max(1, len(tokens) - max(1, round(share * len(tokens))))
        self.write("val", tokens[cut:].tobytes(), int((tokens[cut:] == eot).sum()))
        # A document that is cut in two counts in both files.
        self.counts["train"] = {"tokens": cut, "documents": int((tokens[: cut - 1] == eot).sum()) + 1}
        self.save()  # before the tail is cut off, so that a killed process can continue
        self._files["train"].truncate(cut * DTYPE.itemsize)

    def save(self) -> None:
        """Make everything written so far durable, with `position`, if set, as the place to continue."""
        progress = {"settings": self.settings, "counts": self.counts, "position": self.position}
        progress |= {"skipped": self.skipped, "bad_rows": self.bad_rows}
        with self._disk():
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
            if self.position:
                self._write_json("progress.json", progress)

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remedy = "make room, and run the same command to continue"
            raise UserError(f"{self.scratch} cannot be written ({error.strerror}); {remedy}") from error

    def finish(self, tokenizer: str, **source: object) -> None:
        """Move the files to `folder`, with `source` added to the settings in meta.json.

        Raises:
            UserError: a split has no documents. The unfinished files are deleted.
        """
        self._check_splits()
        self.save()
        sha256 = {f"{split}.bin": checksum(self.scratch / f"{split}.bin") for split in SPLITS}
        meta = {"tokenizer": tokenizer, "vocab_size": vocab_size(tokenizer), "source": self.settings | source}
        meta |= {"counts": self.counts, "sha256": sha256}
        with self._disk():
            self._write_json("meta.json", meta | ({"bad_rows": self.bad_rows} if self.bad_rows else {}))
        _move(self.folder)
        self.close()

    def _check_splits(self) -> None:
        if all(count["documents"] for count in self.counts.values()):
            return
        _clear(self.scratch)
        self.close()
        total = self.total("documents")
        if not total:
            bad = f" ({len(self.bad_rows)} bad rows, the first: {self.bad_rows[0]})" if self.bad_rows else ""
            raise UserError(f"the corpus holds no text{bad}; set data.source or data.text_column to text")
        empty = "val" if self.counts["train"]["documents"] else "train"
        raise UserError(f"none of the {total} documents is for {empty}.bin; set data.val_files or data.val_fraction")

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

    def __exit__(self, *_) -> None:
        self.close()


def publish(folder: Path) -> None:
    """Move finished token files out of `folder`/unfinished, if there are any. A killed call can be repeated.

    Raises:
        UserError: another process writes or moves these files.
    """
    scratch = folder / "unfinished"
    if not scratch.is_dir() or read_meta(scratch) is None:  # a damaged one is refused, before it replaces a good one
        return
    lock = _locked(scratch)
    _move(folder)
    lock.release()


def _locked(scratch: Path) -> FileLock:
    lock = FileLock(scratch / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(f"{scratch} is in use by another process; wait for it, or stop it") from error
    return lock


def _move(folder: Path) -> None:
    """Do what `publish` says, with the lock held."""
    scratch = folder / "unfinished"
    if read_meta(scratch) is not None:  # Another process may have moved the files before this one had the lock.
        (scratch / "progress.json").unlink(missing_ok=True)
        # Remove the old meta.json first and move the new one last, so that a meta.json always describes its files.
        (folder / "meta.json").unlink(missing_ok=True)
        for name in ("train.bin", "val.bin", "meta.json"):
            if (scratch / name).exists():
                os.replace(scratch / name, folder / name)
    _clear(scratch)


def _clear(scratch: Path) -> None:
    """Delete the files of a preparation, and the folder if the user has no files in it."""
    for name in ("train.bin", "val.bin", "meta.json", "progress.json", "lock"):
        (scratch / name).unlink(missing_ok=True)
        (scratch / f"{name}.partial").unlink(missing_ok=True)
    with suppress(OSError):  # The folder is not empty.
        scratch.rmdir()


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _as_typed(key: str, value: object) -> str:
    """Return an entry of meta.json as key=value. The key of a setting is written as on the command line."""
    if key == "name":
        return assigned("data", value)
    return assigned(f"data.{key}" if key in {field.name for field in fields(DataConfig)} else key, value)


def differences(before: dict, now: dict) -> str:
    """Return what differs as text, "data.split_seed=1, not data.split_seed=2", or an empty string."""
    keys = [key for key in now if before.get(key) != now[key]]
    was, wanted = (", ".join(_as_typed(key, side.get(key)) for key in keys) for side in (before, now))
    return f"{was}, not {wanted}" if keys else ""
