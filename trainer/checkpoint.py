"""Checkpoints: one file each, written whole or not at all, read without running any code from them.

A file is torch's archive and after it a seal, the SHA-256 of the archive: readers of archives pass over it.

Where weights are split over processes a checkpoint is a folder instead, written by trainer/sharded.py: one such file,
rest.pt, with all but the weights and moments, and the checksums of the other files, which hold a part of those each.
"""

import errno
import hashlib
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from errors import UserError, first_line, is_of_memory

State = dict[str, Any]
NAME = re.compile(r"step-(\d{8})(\.pt|\.before)?")
BEFORE = ".before"  # suffix of a folder whose name another is about to get
REST = "rest.pt"  # of a folder: all that is not in its parts
PARTS = "*.safetensors"
SEAL = b"\nSHA-256:"  # before the digest
SEAL_SIZE = len(SEAL) + hashlib.sha256().digest_size


class CheckpointError(UserError):
    """A checkpoint that could not be written, or is not as it was written."""


@dataclass
class CheckpointConfig:
    """When and where the state of a run is kept."""

    dir: str | None = None
    """Folder of the checkpoints; null is `checkpoints` in the run's output folder."""
    interval: int = 100
    """Steps between two checkpoints; one more is written at the end."""
    keep: int = 2
    """How many of the newest stay; the one with the best validation loss stays besides, as best.pt (as best, where
    weights are split)."""
    resume: str | None = None
    """null starts afresh; auto continues the newest in checkpoint.dir, or starts where there is none; else a path. Of
    a folder the newest that is whole is taken. For auto, checkpoint.dir or hydra.run.dir (hydra.sweep.dir with -m) has
    to be given, but not to a job that submitit puts back into the queue."""
    asynchronous: bool | None = None
    """Write beside training, which then waits only for a copy in the host's memory, of 12 bytes a parameter; null is
    true on a GPU, false on a CPU, where both want the same cores. Always so with parallel=fsdp and hsdp."""
    on_error: str = "stop"
    """When the disk takes no checkpoint: stop, or continue until the next; without the last one a run stops as well."""
    load: str | None = None
    """For eval_only and replay: a checkpoint, a run's folder, or a Hugging Face GPT-2 (folder or hub id).
    `checkpoint=...` on the command line is short for it."""

    def __post_init__(self):
        for key in ("interval", "keep"):
            if getattr(self, key) < 1:
                raise UserError(f"checkpoint.{key}={getattr(self, key)} must be at least 1")
        if self.on_error not in ("stop", "continue"):
            raise UserError(f"checkpoint.on_error={self.on_error} is unknown; choose stop or continue")


class Checkpoints:
    """The checkpoints of one run: step-00000100.pt, ..., and best.pt; of several processes only one `writes`."""

    def __init__(self, folder: Path, keep: int, writes: bool = True):
        self.folder, self.keep, self.writes = folder, keep, writes
        self._best: int | None = None  # the step that this run's best.pt is of
        self._tell: Callable[[str], None] = print
        self._undeletable: set[Path] = set()

    @contextmanager
    def saving(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Context of all saves, at whose end none is under way; `tell` is told what ends no save."""
        self._tell = tell
        yield

    def settle(self, before: int | None = None) -> None:
        """Waits for the save that is under way, but not for one of the step `before`.

        Raises:
            CheckpointError: the disk refused it, as by `save`.
        """

    def refuse_later_than(self, step: int) -> None:
        """A run that starts after `step` steps must not mix its checkpoints with later ones of another run.

        Raises:
            UserError: the folder holds a whole checkpoint of a later step.
        """
        later = next((path for path in _all(self.folder)[::-1] if _step(path) > step and _is_whole(path)), None)
        if later is not None:
            raise UserError(
                f"{later} is of a later step than the {step} this run starts from; continue it with "
                f"checkpoint.resume={later}, or choose another checkpoint.dir"
            )

    def before(self, step: int) -> Path | None:
        """The newest from before that step was taken; where there is none the oldest, or None."""
        found = _all(self.folder)[::-1]
        return next((path for path in found if _step(path) < step), found[-1] if found else None)

    def path_of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.pt"

    def save(self, step: int, state: State) -> Path:
        """Writes the state after `step` steps, then deletes all older ones but the newest `keep` - 1.

        A state that was just saved as the best one is not written again: the file gets a second name. What a killed run
        has left of a file goes too.

        Raises:
            CheckpointError: the disk refused it; all earlier ones are as they were.
        """
        path = self.path_of(step)
        if not self.writes:
            return path
        if step != self._best or not _link(self.folder / "best.pt", path):
            self._write(path, state)
        self.prune(step)
        return path

    def prune(self, step: int) -> None:
        """Deletes what `step`, which was just saved, makes outdated, and what killed runs have left half-written.

        What the disk does not let go of is told once, and tried again after the next save.
        """
        best = (self.folder / "best").resolve()  # a link to one of the folders
        replaced = [path for path in self.folder.glob(f"*{BEFORE}") if path.with_suffix("").exists()]
        found = [path for path in _all(self.folder) if _step(path) <= step and path not in replaced]
        for old in (*found[: -self.keep], *replaced, *self.folder.glob("*.partial")):
            if old.resolve() == best:
                continue
            try:
                remove(old)
            except OSError as error:
                if old not in self._undeletable:
                    self._tell(f"{old} is outdated and cannot be deleted ({error.strerror}); delete it by hand")
                self._undeletable.add(old)

    def save_best(self, state: State) -> Path:
        """Replaces best.pt. Raises CheckpointError as `save` does."""
        path = self.folder / "best.pt"
        if self.writes:
            self._write(path, state)
            self._best = state["step"]
            remove(self.folder / "best")  # of a run whose weights were split; a copy of a run has a folder for the link
        return path

    def _write(self, path: Path, state: State) -> None:
        try:
            write_file(path, state)
        except OSError as error:
            raise self.refusal(path, error) from error

    def refusal(self, path: Path, error: OSError) -> CheckpointError:
        """What to raise when the disk did not take `path`."""
        first = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "mend that"
        reason = error.strerror or error
        return CheckpointError(f"{path} could not be written ({reason}); {first}, and {self.remedy()}")

    def remedy(self) -> str:
        """How to go on where the state itself cannot be kept."""
        newest = find(self.folder)
        return f"continue with checkpoint.resume={newest}" if newest else "start again: there is no earlier checkpoint"


def write_file(path: Path, state: State) -> None:
    """Under another name first, and to the disk, so that a kill or a full disk leaves the old file or the new one.

    Given a path, not an open file, torch writes without holding the interpreter's lock, which a save beside training
    would take from it.
    """
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove(partial)  # a killed run may have left it, as a folder, or as another name of a good one
        try:
            torch.save(state, partial)
        except RuntimeError:
            _ask_disk(partial)
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


def _link(source: Path, path: Path) -> bool:
    """Gives a file another name, atomically; not on a disk that knows no links, or takes none."""
    partial = path.with_suffix(".partial")
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
    """Brings the names in a folder to the disk, without which a power failure could undo a rename."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _ask_disk(partial: Path) -> None:
    """Raises the OSError for which a file was not written whole: torch's own error does not say."""
    with open(partial, "ab") as file:
        file.write(bytes(2**20))


def put_aside(folder: Path) -> Path:
    """Takes a checkpoint its name, by which it counts as one; what is left goes when the next is saved."""
    aside = folder.with_name(f"{folder.name}.old.partial")
    shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)


def remove(path: Path) -> None:
    """Deletes a checkpoint if it is there; a kill leaves the whole of it, or nothing that counts as one."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path if path.suffix == ".partial" else put_aside(path))


def _digest(file: BinaryIO, size: int) -> bytes:
    """SHA-256 of the first `size` bytes; the file stands after them."""
    digest = hashlib.sha256()
    file.seek(0)
    while size > 0 and (block := file.read(min(size, 2**20))):
        digest.update(block)
        size -= len(block)
    return digest.digest()


def _damage(path: Path) -> str | None:
    """What is wrong with a file, by its seal; None where it is as it was written."""
    if not path.is_file():
        return "it is missing"
    try:
        with open(path, "rb") as file:
            size = max(0, path.stat().st_size - SEAL_SIZE)
            digest, seal = _digest(file, size), file.read()
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if not seal.startswith(SEAL):
        return "it does not end in a checksum, so it is cut off or not of this trainer"
    return None if seal == SEAL + digest else "its checksum does not match, so it was damaged"


def _check(path: Path) -> State:
    """What a checkpoint's one file, or rest.pt of its folder, holds.

    Raises:
        CheckpointError: that file, or a part of the folder, is not as it was written, or not of this trainer.
    """
    if not path.is_dir():
        return _read_file(path)
    state = _read_file(path / REST)
    parts = state.get("parts")
    if not isinstance(parts, dict):
        raise CheckpointError(f"{path} is not a checkpoint of this trainer")
    for name in sorted({*parts, *(part.name for part in path.glob(PARTS))}):
        if damage := _damage_of_part(path / name, parts.get(name)):
            raise CheckpointError(f"{path} is no readable checkpoint ({name} {damage})")
    return state


def _damage_of_part(path: Path, digest: str | None) -> str | None:
    """What is wrong with a part of a folder, by its checksum; None where it is as it was written."""
    if digest is None:
        return "does not belong to it"
    if not path.is_file():
        return "is missing"
    try:
        with open(path, "rb") as file:
            matches = hashlib.file_digest(file, "sha256").hexdigest() == digest
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if matches else "does not match its checksum, so it was damaged"


def _is_whole(path: Path) -> bool:
    if path.is_file():
        return not _damage(path)
    try:
        _check(path)
    except CheckpointError:
        return False
    return True


def _all(folder: Path) -> list[Path]:
    """The folder's checkpoints by step: files that end in .pt, and folders that do not; of a step the latest last."""
    named = (path for path in folder.glob("step-*") if NAME.fullmatch(path.name))
    found = (path for path in named if path.is_dir() == (path.suffix != ".pt"))
    return sorted(found, key=lambda path: (_step(path), path.suffix != BEFORE, path.name))


def _step(path: Path) -> int:
    return int(NAME.fullmatch(path.name)[1])


def candidates(source: str | Path) -> list[Path]:
    """A checkpoint itself, or those in a folder or in its `checkpoints`, the newest first; none where none is.

    best.pt comes last: it may be older than the newest, but is all there is of a run that ended before its first.
    """
    source = Path(source)
    if source.name == REST:
        source = source.parent
    if source.is_file() or (source / REST).is_file() or (source.is_dir() and NAME.fullmatch(source.name)):
        return [source]
    return next((found for folder in (source, source / "checkpoints") if (found := _kept(folder))), [])


def _kept(folder: Path) -> list[Path]:
    best = folder / "best.pt"
    return _all(folder)[::-1] + ([best] if best.is_file() else [])


def find(source: str | Path) -> Path | None:
    """The first of `candidates`, None where there is none."""
    return next(iter(candidates(source)), None)


def load(source: str | Path, key: str = "checkpoint", tell: Callable[[str], None] = print, whole: bool = True) -> State:
    """The state in a checkpoint or in the newest whole one of a folder, on the CPU.

    Its "path" is added, for messages. `key` names the setting in them, and `tell` is told which newer ones were passed
    over. Without `whole`, weights and moments that lie in parts stay there, and the state has their "folder":
    load_state_dict of a TrainState reads of them what its process is to hold.

    Raises:
        UserError: there is none, or none that is whole.
    """
    refused: list[CheckpointError] = []
    for path in candidates(source):
        try:
            state = _read(path, whole)
        except CheckpointError as error:
            refused.append(error)
            continue
        if refused:
            tell(f"{'; '.join(map(str, refused))}; {path} is taken instead")
        return state | {"path": str(path)}
    if refused:
        raise UserError(f"{'; '.join(map(str, refused))}; give another with {key}=")
    raise UserError(f"{key}={source} is neither a checkpoint nor a folder of them; give a step-*.pt or its folder")


def _read(path: Path, whole: bool) -> State:
    state = _check(path)
    if "parts" not in state:
        return state
    state |= {"folder": path}
    if not whole:
        return state
    from trainer.sharded import read_parts  # DCP takes seconds to import

    return read_parts(state)


def _read_file(path: Path) -> State:
    if damage := _damage(path):
        raise CheckpointError(f"{path} is no readable checkpoint ({damage})")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a foreign file raises anything from EOFError to UnpicklingError
        raise CheckpointError(f"{path} is no readable checkpoint ({first_line(error)})") from error
    known = isinstance(state, dict) and {"model", "model_config", "tokenizer", "step"} <= state.keys()
    if not (known and isinstance(state["step"], int) and isinstance(state["tokenizer"], str)):
        raise CheckpointError(f"{path} is not a checkpoint of this trainer")
    return state


@contextmanager
def of_this_version(state: State) -> Iterator[None]:
    """Around what takes apart the state that `load` returned.

    Raises:
        CheckpointError: it lacks something, or has it in another form, as one of another version would.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if is_of_memory(error) or (isinstance(error, RuntimeError) and type(error) is not RuntimeError):
            raise  # not of the state: a GPU or another process failed
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(
            f"{state['path']} is not of this version of the trainer ({why}); use the one that wrote it"
        ) from error


def rng_state() -> State:
    """The state of every random generator a run draws from."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: State) -> None:
    """Puts back what rng_state returned; GPU generators only where there are as many GPUs as then."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
