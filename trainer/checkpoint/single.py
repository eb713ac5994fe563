"""Checkpoints of one file each: step-00000100.pt, ..., and best.pt."""

import errno
from collections.abc import Callable
from pathlib import Path

from errors import assigned
from trainer.checkpoint.files import CheckpointError, State, link, remove, write_file
from trainer.checkpoint.folder import find, is_checkpoint_folder, outdated
from trainer.layout import shown


class SingleFileStore:
    """Writes a run's checkpoints to `folder` and keeps the newest `keep`. Processes call every method together, in the
    same order; only the one that `writes` touches the disk."""

    def __init__(self, folder: Path, keep: int, writes: bool = True):
        self.folder, self.keep, self.writes = folder, keep, writes
        self.tell: Callable[[str], None] = print
        self.places: list[str] = []  # settings that name the run's folders on a command line
        self._best: int | None = None  # the step of the best.pt that this run wrote

    def path_of(self, step: int, best: bool) -> Path:
        return self.folder / ("best.pt" if best else f"step-{step:08d}.pt")

    def save(self, state: State, *, best: bool = False) -> Path:
        """Write the state, as best.pt or under its step; the latter also deletes outdated checkpoints.

        If the disk refuses, this raises a CheckpointError, and all earlier checkpoints are unchanged.
        """
        path = self.path_of(state["step"], best)
        if self.writes:
            self._write(path, state, best)
        return path

    def settle(self, before: int | None = None) -> None:
        """Wait for a pending save, unless it is of step `before`. Raises CheckpointError if that save failed."""

    def close(self) -> None:
        """Release what the store holds. No save is possible afterwards."""

    def _write(self, path: Path, state: State, best: bool) -> None:
        is_written = not best and state["step"] == self._best and link(self.folder / "best.pt", path)
        if not is_written:
            try:
                write_file(path, state)
            except OSError as error:
                raise self.refusal(path, error) from error
        if best:
            self._best = state["step"]
            folder = self.folder / "best"  # a link, or the copy of a link, from a run with sharded weights
            if folder.is_symlink() or is_checkpoint_folder(folder):
                remove(folder)
        else:
            self.prune(state["step"])

    def prune(self, step: int) -> None:
        """Delete outdated checkpoints. If the disk refuses, say so; the next save tries again."""
        for path in outdated(self.folder, step, self.keep):
            try:
                remove(path)
            except OSError as error:
                self.tell(f"{path} is outdated and cannot be deleted ({error.strerror}); delete it by hand")

    def refusal(self, path: Path, error: OSError) -> CheckpointError:
        """Return the error to raise if the disk refuses the checkpoint `path`."""
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "free some space" if is_full else "correct that"
        reason = error.strerror or error
        return CheckpointError(f"{path} cannot be written ({reason}); {remedy}, then {self.how_to_continue()}")

    def how_to_continue(self) -> str:
        """Return the advice for a run whose present state cannot be saved."""
        if newest := find(self.folder):
            return f"continue with {' '.join([assigned('checkpoint.resume', shown(newest)), *self.places])}"
        return "start again: there is no earlier checkpoint"
