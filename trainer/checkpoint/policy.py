"""When a run saves its state, what happens if the disk refuses, and agreement among processes."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from data.loader import DataError
from errors import UserError, assigned
from model.gpt2 import GPT2
from trainer.checkpoint.background import BackgroundStore
from trainer.checkpoint.config import CheckpointConfig
from trainer.checkpoint.files import CheckpointError, State
from trainer.checkpoint.folder import newest_before, newest_complete_after
from trainer.checkpoint.sharded import ShardedStore
from trainer.checkpoint.single import SingleFileStore
from trainer.distributed.world import World, local_part
from trainer.layout import paragraph, shown
from trainer.loggers.base import describe_changes
from trainer.precision import Compute
from trainer.state import TrainState

EVALUATION = ("train", "eval_tokens"), ("data", "document_mask")
"""The settings that decide over which tokens, and how, a model is evaluated."""


class Checkpoints:
    """Saves a run's state. All processes call every method together, and an error of one is raised in all."""

    def __init__(self, store: SingleFileStore, on_error: str, world: World):
        self.newest: Path | None = None  # the last regular checkpoint that this run saved
        self._store, self._on_error, self._world = store, on_error, world
        self._saved_step: int | None = None

    @contextmanager
    def saving(self, state: TrainState, tell: Callable[[str], None]) -> Iterator[None]:
        """Finish pending saves at the end of the context. If damaged data end the run, save its state."""
        self._store.tell = tell
        try:
            yield
            self._store.settle()
        except DataError as error:
            raise UserError(f"{error}. {self.save_at_failure(state)}") from error
        except BaseException:
            with suppress(Exception):  # the error of the run matters more than the error of a pending save
                self._store.settle()
            raise
        finally:
            self._store.close()

    def save(self, state: TrainState) -> None:
        """Save the state, or start to if the store writes in the background.

        With checkpoint.on_error=stop, this raises a CheckpointError if weights are not finite or the disk refuses.
        """
        if path := self._attempt(state, self._store.save):
            self.newest, self._saved_step = path, state.step

    def save_if_best(self, state: TrainState, row: dict[str, float]) -> None:
        """Save the state as the best one if the row has the lowest validation loss so far. Raises like `save`.

        Losses of evaluations with other settings do not count, nor does a loss whose state is not saved with
        checkpoint.on_error=continue. A store that writes in the background learns only at its next `settle` that the
        disk refuses, and then the loss still counts. Call this after the row is logged: a run that is resumed from the
        checkpoint does not log the row again.
        """
        loss = row.get("val/loss", math.inf)
        if loss < (math.inf if begins_new_best(state) else state.best_loss):
            saved = state.best_loss, state.best_step, state.best_evaluation
            state.best_loss, state.best_step, state.best_evaluation = loss, state.step, evaluation_of(state)
            if self._attempt(state, partial(self._store.save, best=True)) is None:
                state.best_loss, state.best_step, state.best_evaluation = saved

    def check_best(self, state: TrainState, is_branch: bool) -> None:
        """Forget the best loss if it is another run's, so that this run gets a best checkpoint of its own.

        Print a note if the next evaluation begins a new best, because its settings have changed.
        """
        if is_branch:
            state.best_loss, state.best_step, state.best_evaluation = math.inf, 0, {}
        if begins_new_best(state):
            now = evaluation_of(state)
            changes = {key: [old, now.get(key)] for key, old in state.best_evaluation.items() if old != now.get(key)}
            old = f"the best validation loss so far ({state.best_loss:.4f} at step {state.best_step})"
            why = f"{describe_changes(changes)}: {old} does not compare with the next ones and no longer counts"
            self._store.tell(paragraph("note", f"{why}; to keep the old best.pt, copy it before the next evaluation"))

    def save_last(self, state: TrainState) -> None:
        """Save the state and wait until the checkpoint is complete. Raises like `save`, whatever on_error says."""
        if self._saved_step == state.step:
            self._world.agreed(self._store.settle)
        else:
            self._world.agreed(lambda: self._save_now(state))

    def before(self, step: int) -> Path | None:
        """Return the checkpoint to rerun `step` from; see folder.newest_before."""
        return newest_before(self._store.folder, step)

    def _attempt(self, state: TrainState, write: Callable[[State], Path]) -> Path | None:
        self._agreed(lambda: self._store.settle(before=state.step))
        return self._agreed(lambda: write(self._sound(state)))

    def _agreed(self, act: Callable[[], Path | None]) -> Path | None:
        """Call `act` in all processes. With checkpoint.on_error=continue, print a CheckpointError and return None."""
        try:
            return self._world.agreed(act)
        except CheckpointError as error:
            if self._on_error == "stop":
                raise
            self._store.tell(f"{error}; training continues (checkpoint.on_error=continue)")

    def _save_now(self, state: TrainState) -> None:
        try:
            self._store.settle()
        except CheckpointError as error:  # an earlier save failed; that does not stop this one
            self._store.tell(str(error))
        self.newest = self._store.save(self._sound(state))
        self._store.settle()

    def save_at_failure(self, state: TrainState) -> str:
        """Save the state of a run that cannot go on. Return a sentence that says where, or why not."""
        try:
            self.save_last(state)
            return f"The state is saved in {self.newest}."
        except CheckpointError as error:
            return f"The state is lost: {error}."

    def _sound(self, state: TrainState) -> State:
        """Return the state to save. All processes raise a CheckpointError if weights are not finite."""
        finite = torch.stack([local_part(parameter).isfinite().all() for parameter in state.model.parameters()]).all()
        if self._world.sum(torch.tensor(0 if finite else 1)):
            raise CheckpointError(
                f"the weights are not finite after step {state.step} and are not saved; lower optimizer.lr, and "
                f"{self._store.how_to_continue()}"
            )
        return state.state_dict()


def evaluation_of(state: TrainState) -> State:
    """Return the settings of a run's evaluations by their dotted keys."""
    return {f"{group}.{key}": state.config.get(group, {}).get(key) for group, key in EVALUATION}


def begins_new_best(state: TrainState) -> bool:
    """Return whether the best loss is of an evaluation with other settings. Older checkpoints do not say which."""
    return state.best_evaluation not in ({}, evaluation_of(state))


def check_folder(folder: Path, resumed: State | None) -> None:
    """Refuse to save to a folder that holds another run's checkpoints, or later ones than this run starts from.

    A run that is resumed from a checkpoint in the folder may replace best.pt: after a kill, best.pt can be of a later
    step than the newest checkpoint.
    """
    first_step = resumed["step"] if resumed else 0
    if later := newest_complete_after(folder, first_step, with_best=resumed is None):
        raise UserError(
            f"{later} is past step {first_step}, from which this run starts; continue it with "
            f"{assigned('checkpoint.resume', later)}, or choose another hydra.run.dir or checkpoint.dir"
        )
    is_elsewhere = resumed is not None and not _is_in(Path(resumed["path"]), folder)
    if is_elsewhere and (other := newest_complete_after(folder, -1, with_best=True)):
        raise UserError(
            f"{folder} has checkpoints of another run ({other.name}), and checkpoint.resume={resumed['path']} is not "
            f"among them; continue the other run with {assigned('checkpoint.resume', other)}, or choose another "
            "hydra.run.dir or checkpoint.dir"
        )


def is_branch(output: Path, folder: Path, resumed: State | None) -> bool:
    """Return whether a run continues another run.

    Its own checkpoints are in `folder`, or in `output`/checkpoints if it had another checkpoint.dir.
    """
    return resumed is not None and not any(_is_in(Path(resumed["path"]), x) for x in (folder, output / "checkpoints"))


def _is_in(path: Path, folder: Path) -> bool:
    """Return whether a checkpoint, or the file that a link leads to, is in the folder, under any name of the folder."""
    return folder.exists() and any(place.samefile(folder) for place in (path.parent, path.resolve().parent))


def open_checkpoints(
    output: Path,
    settings: CheckpointConfig,
    model: GPT2,
    optimizer: torch.optim.Optimizer,
    compute: Compute,
    timeout_s: int,
) -> Checkpoints:
    """Return the checkpoints of a run in the folder `output`. check_folder has accepted their folder."""
    folder = settings.folder(output)
    options = {"keep": settings.keep, "writes": compute.world.is_first}
    parts = {"model": model, "optimizer": optimizer}
    asynchronous = compute.device.type == "cuda" if settings.asynchronous is None else settings.asynchronous
    if compute.world.is_sharded:
        store = ShardedStore(folder, timeout_s=timeout_s, **parts, **options)
    elif asynchronous:
        store = BackgroundStore(folder, **parts, **options)
    else:
        store = SingleFileStore(folder, **options)
    store.places = [assigned("hydra.run.dir", shown(output))]
    store.places += [assigned("checkpoint.dir", settings.dir)] if settings.dir else []
    return Checkpoints(store, settings.on_error, compute.world)
