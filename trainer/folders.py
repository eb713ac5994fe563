"""The output folders of runs, and text files in them. While a run lasts, no other run can write to its folders."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from filelock import FileLock, Timeout

from errors import UserError
from trainer.distributed.world import ALONE, World
from trainer.layout import paragraph, shown


def check_writable(folder: Path, setting: str = "hydra.run.dir") -> None:
    """Make an output folder, the value of a setting. Refuse one that this process cannot write to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _not_writable(setting, folder, error) from error


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: a kill or a full disk (OSError) leaves the old file or the new one."""
    path = path.resolve()  # replace the file that a link leads to, not the link
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def keep_previous(path: Path) -> None:
    """Rename the file that an earlier run left, if there is one, to NAME.previous.SUFFIX, or NAME.previous-2.SUFFIX."""
    names = itertools.chain(("previous",), (f"previous-{number}" for number in itertools.count(2)))
    kept = (path.with_suffix(f".{name}{path.suffix}") for name in names)
    if path.exists():
        path.rename(next(free for free in kept if not free.exists()))


@contextmanager
def claimed(folders: dict[Path, str], world: World = ALONE) -> Iterator[None]:
    """Make these folders, each the value of a setting, and lock them for this run."""
    distinct = {folder.resolve(): setting for folder, setting in folders.items()} if world.is_first else {}
    with ExitStack() as stack:
        world.agreed(lambda: [stack.enter_context(_claimed(*item)) for item in distinct.items()])
        yield


@contextmanager
def _claimed(folder: Path, setting: str) -> Iterator[None]:
    path = folder / ".lock"
    lock = FileLock(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(f"{setting}={folder} is used by another run; wait for it, or choose another folder") from error
    except OSError as error:
        raise _not_writable(setting, folder, error) from error
    try:
        yield
    finally:
        # Delete the lock file before the release: filelock notices that the file is gone and opens a new one. An error
        # of the disk here must not hide the error that ended the run.
        with suppress(OSError):
            path.unlink(missing_ok=True)
        lock.release()
        with suppress(OSError):  # the folder is not empty
            folder.rmdir()


def _not_writable(setting: str, folder: Path, error: OSError) -> UserError:
    return UserError(f"{setting}={folder} is not writable ({error.strerror}); choose another folder")


def link_latest(folder: Path, tell: Callable[[str], None]) -> None:
    """Let outputs/latest be a link to `folder`, if that is in outputs. `tell` reports a real folder in its place."""
    folder = folder.resolve()
    link, latest = folder.parent / ".latest", folder.parent / "latest"
    if folder.parent.name != "outputs" or folder == latest:
        return
    if latest.is_dir() and not latest.is_symlink():
        tell(paragraph("note", f"{shown(latest)} is a folder, not a link to the newest run; delete or rename it"))
        return
    with suppress(OSError):  # The file system has no links.
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(latest)
