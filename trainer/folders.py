"""The folders that a run writes to are its own for as long as it lasts."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from errors import UserError


@contextmanager
def claimed(folders: dict[Path, str]) -> Iterator[None]:
    """Context in which no other run can write to these folders, each the value of a setting; they are made if need be.

    Raises:
        UserError: another run holds one, or it cannot be written to.
    """
    with ExitStack() as stack:
        for folder, setting in {folder.resolve(): setting for folder, setting in folders.items()}.items():
            stack.enter_context(_claimed(folder, setting))
        yield


_of_jobs: dict[Path, Path] = {}


def refuse_another_jobs(folder: Path, outputs: Path) -> None:
    """A job of a sweep must not continue another's checkpoints, which checkpoint.resume=auto would take for its own.

    `outputs` is the job's folder, in that of the sweep.

    Raises:
        UserError: another job of the sweep, in this process, had the checkpoints in `folder`.
    """
    earlier = _of_jobs.setdefault(folder.resolve(), outputs)
    if earlier != outputs and earlier.parent == outputs.parent:
        raise UserError(
            f"checkpoint.dir={folder} has the checkpoints of the job {earlier.name}, which checkpoint.resume=auto "
            "would go on from; give each job of the sweep its own, such as 'checkpoint.dir=runs/${hydra:job.num}'"
        )


@contextmanager
def _claimed(folder: Path, setting: str) -> Iterator[None]:
    path = folder / ".lock"
    lock = FileLock(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(f"another run writes to {folder}; wait for it, or choose another {setting}") from error
    except OSError as error:
        raise UserError(f"{folder} cannot be written to ({error.strerror}); choose another {setting}") from error
    try:
        yield
    finally:
        # Before the release: whoever has opened the file meanwhile finds, by filelock, that it is gone, and opens anew.
        # What the disk refuses here must not hide for what the run ended.
        with suppress(OSError):
            path.unlink(missing_ok=True)
        lock.release()
        with suppress(OSError):  # it is not empty
            folder.rmdir()
