"""The checkpoints in a folder, by their names: step-00000100.pt (a file) or step-00000100 (a folder), and best.pt."""

import hashlib
import re
from contextlib import suppress
from pathlib import Path

from trainer.checkpoint.files import PARTIAL, REST, CheckpointError, State, read_file

NAME = re.compile(r"step-(\d{8})(\.pt|\.before)?")
BEFORE = ".before"  # suffix of a checkpoint folder that is about to be replaced
UNFINISHED = re.compile(rf"(step-\d{{8}}|best)(\.\w+)*\{PARTIAL}")
PARTS = "*.safetensors"


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(NAME.fullmatch(path.name)[1])


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder in the order of their steps: files that end in .pt, and folders."""
    named = (path for path in folder.glob("step-*") if NAME.fullmatch(path.name))
    found = (path for path in named if path.is_dir() == (path.suffix != ".pt"))
    return sorted(found, key=lambda path: (step_of(path), path.suffix != BEFORE, path.name))


def candidates(source: str | Path) -> list[Path]:
    """Return `source` if it is a checkpoint, else the checkpoints in it or in its `checkpoints`, newest first.

    best.pt comes last: it can be older than the newest, but it may be all that a short run left.
    """
    source = Path(source)
    if source.name == REST:
        source = source.parent
    if source.is_file() or is_checkpoint_folder(source) or (source.is_dir() and NAME.fullmatch(source.name)):
        return [source]
    for folder in (source, source / "checkpoints"):
        if found := [*checkpoints_in(folder)[::-1], *folder.glob("best.pt")]:
            return found
    return []


def find(source: str | Path) -> Path | None:
    """Return the first of `candidates`, or None."""
    return next(iter(candidates(source)), None)


def newest_before(folder: Path, step: int) -> Path | None:
    """Return the newest checkpoint from before `step` was taken; if there is none, the oldest one, or None."""
    found = checkpoints_in(folder)[::-1]
    return next((path for path in found if step_of(path) < step), found[-1] if found else None)


def newest_complete_after(folder: Path, step: int, with_best: bool) -> Path | None:
    """Return the newest undamaged checkpoint of a later step than `step`, or None.

    If there is none, `with_best` also accepts the best checkpoint, of any step: it may be all that a short run left.
    """
    found = [path for path in checkpoints_in(folder)[::-1] if step_of(path) > step]
    if with_best:
        found += [path for path in (folder / "best.pt", folder / "best") if path.exists()]
    for path in found:
        with suppress(CheckpointError):
            read_checked(path)
            return path
    return None


def outdated(folder: Path, step: int, keep: int) -> list[Path]:
    """Return what the complete checkpoint of `step` makes outdated, and what killed runs left half-written.

    Other files in the folder may be the user's.
    """
    checkpoints = checkpoints_in(folder)
    replaced = [path for path in checkpoints if path.suffix == BEFORE and path.with_suffix("").exists()]
    found = [path for path in checkpoints if step_of(path) <= step and path not in replaced]
    unfinished = [path for path in folder.glob(f"*{PARTIAL}") if UNFINISHED.fullmatch(path.name)]
    best = (folder / "best").resolve()  # a link to one of the folders
    return [path for path in (*found[:-keep], *replaced, *unfinished) if path.resolve() != best]


def is_checkpoint_folder(path: Path) -> bool:
    """Return whether a folder holds a checkpoint. One named `best` may also be a run of the user."""
    return (path / REST).is_file()


def read_checked(path: Path) -> State:
    """Return the content of a checkpoint's file, or of rest.pt of a folder after checking all parts.

    A damaged or foreign file or part raises a CheckpointError.
    """
    if not path.is_dir():
        return read_file(path)
    state = read_file(path / REST)
    parts = state.get("parts")
    if not isinstance(parts, dict):
        raise CheckpointError(f"{path} is not a checkpoint of this trainer")
    for name in sorted({*parts, *(part.name for part in path.glob(PARTS))}):
        try:
            with open(path / name, "rb") as file:
                matches = hashlib.file_digest(file, "sha256").hexdigest() == parts.get(name)
        except OSError as error:
            raise CheckpointError(f"{path} is not a readable checkpoint ({name}: {error.strerror})") from error
        if not matches:
            raise CheckpointError(f"{path} is not a readable checkpoint ({name} does not match its checksum)")
    return state
