"""The file format of checkpoints, atomic writes and deletes.

A file is torch's archive followed by a seal: the SHA-256 of the archive. Readers of archives ignore the seal.
"""

import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from errors import UserError, first_line

State = dict[str, Any]
REST = "rest.pt"  # the file of a sharded checkpoint that holds everything except weights and moments
PARTIAL = ".partial"  # suffix of a file or folder that is being written or deleted
SEAL = b"\nSHA-256:"  # before the digest
SEAL_SIZE = len(SEAL) + hashlib.sha256().digest_size


class CheckpointError(UserError):
    """A checkpoint cannot be written, or is damaged."""


def write_file(path: Path, state: State) -> None:
    """Write `state` atomically: a kill or a full disk (OSError) leaves the old file or the new one."""
    partial = path.with_suffix(PARTIAL)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove(partial)  # from a killed run: a folder, or a second name of a good file
        try:
            torch.save(state, partial)  # given a path, torch does not hold the interpreter's lock
        except RuntimeError:
            with open(partial, "ab") as file:  # raises the OSError of the disk, which torch does not name
                file.write(bytes(2**20))
            raise
        with open(partial, "r+b") as file:
            file.write(SEAL + _digest(file, partial.stat().st_size))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def link(source: Path, path: Path) -> bool:
    """Give the file `source` a second name atomically. Return False if the disk refuses."""
    partial = path.with_suffix(PARTIAL)
    try:
        if not (path.exists() and path.samefile(source)):
            remove(partial)
            os.link(source, partial)
            os.replace(partial, path)
            sync_folder(path.parent)
    except OSError:
        return False
    return True


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk. Otherwise a power failure can undo a rename."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def remove(path: Path) -> None:
    """Delete a checkpoint, if it exists. After a kill, it is either complete or no longer named as a checkpoint."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if path.suffix != PARTIAL:  # rename the folder, so that it no longer counts as a checkpoint
        aside = path.with_name(f"{path.name}.old{PARTIAL}")
        shutil.rmtree(aside, ignore_errors=True)
        path = path.rename(aside)
    shutil.rmtree(path)


def read_file(path: Path) -> State:
    """Return the content of a checkpoint file, on the CPU. A damaged or foreign file raises a CheckpointError."""
    if damage := _damage_of(path):
        raise CheckpointError(f"{path} is not a readable checkpoint ({damage})")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a foreign file raises anything from EOFError to UnpicklingError
        raise CheckpointError(f"{path} is not a readable checkpoint ({first_line(error)})") from error
    known = isinstance(state, dict) and {"model", "model_config", "tokenizer", "step"} <= state.keys()
    if not (known and isinstance(state["step"], int) and isinstance(state["tokenizer"], str)):
        raise CheckpointError(f"{path} is not a checkpoint of this trainer")
    return state


def _damage_of(path: Path) -> str | None:
    try:
        with open(path, "rb") as file:
            size = max(0, path.stat().st_size - SEAL_SIZE)
            digest, seal = _digest(file, size), file.read()
    except OSError as error:
        return error.strerror
    if not seal.startswith(SEAL):
        return "it does not end in a checksum: it is cut off, or another program wrote it"
    return None if seal == SEAL + digest else "its checksum does not match: it is damaged"


def _digest(file: BinaryIO, size: int) -> bytes:
    """Return the SHA-256 of the first `size` bytes and leave the file's position after them."""
    digest = hashlib.sha256()
    file.seek(0)
    while size > 0 and (block := file.read(min(size, 2**20))):
        digest.update(block)
        size -= len(block)
    return digest.digest()
