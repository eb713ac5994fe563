"""Checkpoints: one file each, written whole or not at all, read without running any code from them."""

import os
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from errors import UserError

State = dict[str, Any]
NAME = re.compile(r"step-(\d{8})\.pt")


@dataclass
class CheckpointConfig:
    """When and where the state of a run is kept."""

    dir: str | None = None
    """Folder of the checkpoints; null is `checkpoints` in the run's output folder."""
    interval: int = 100
    """Steps between two checkpoints; one more is written at the end."""
    keep: int = 2
    """How many of the newest stay; the one with the best validation loss stays besides, as best.pt."""
    resume: str | None = None
    """null starts afresh; auto continues the newest in checkpoint.dir, or starts where there is none; else a path."""
    load: str | None = None
    """For eval_only: a checkpoint file, a run's folder, or a Hugging Face GPT-2 (folder or hub id). `checkpoint=...` on
    the command line is short for it."""

    def __post_init__(self):
        for key in ("interval", "keep"):
            if getattr(self, key) < 1:
                raise UserError(f"checkpoint.{key}={getattr(self, key)} must be at least 1")


class Checkpoints:
    """The checkpoints of one run: step-00000100.pt, ..., and best.pt; of several processes only one `writes`."""

    def __init__(self, folder: Path, keep: int, writes: bool = True):
        self.folder, self.keep, self.writes = folder, keep, writes

    def refuse_later_than(self, step: int) -> None:
        """A run that starts after `step` steps must not mix its checkpoints with later ones of another run.

        Raises:
            UserError: the folder holds a checkpoint of a later step.
        """
        newest = find(self.folder)
        if newest is not None and _step(newest) > step:
            raise UserError(
                f"{newest} is of a later step than the {step} this run starts from; continue it with "
                f"checkpoint.resume={newest}, or choose another checkpoint.dir"
            )

    def save(self, step: int, state: State) -> Path:
        """Writes the state after `step` steps, then deletes all older ones but the newest `keep` - 1."""
        path = self.folder / f"step-{step:08d}.pt"
        if not self.writes:
            return path
        _write(path, state)
        for old in [old for old in _all(self.folder) if _step(old) <= step][: -self.keep]:
            old.unlink()
        return path

    def save_best(self, state: State) -> Path:
        """Replaces best.pt."""
        path = self.folder / "best.pt"
        if self.writes:
            _write(path, state)
        return path


def _write(path: Path, state: State) -> None:
    """Under another name first, and to the disk, so that a kill leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _all(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*.pt") if NAME.fullmatch(path.name))


def _step(path: Path) -> int:
    return int(NAME.fullmatch(path.name)[1])


def find(source: str | Path) -> Path | None:
    """A checkpoint file itself, or the newest in a folder or in its `checkpoints`; None where there is none."""
    source = Path(source)
    if source.is_file():
        return source
    return next((found[-1] for folder in (source, source / "checkpoints") if (found := _all(folder))), None)


def load(source: str | Path, key: str = "checkpoint") -> State:
    """The state in a checkpoint file or in the newest of a folder, on the CPU; `key` names the setting in messages.

    Raises:
        UserError: there is none, or it is broken.
    """
    path = find(source)
    if path is None:
        raise UserError(f"{key}={source} is neither a checkpoint nor a folder of them; give a step-*.pt or its folder")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a torn or foreign file raises anything from EOFError to UnpicklingError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} is no readable checkpoint ({reason}); give another with {key}=") from error
    if not isinstance(state, dict) or not {"model", "model_config", "tokenizer", "step"} <= state.keys():
        raise UserError(f"{path} is not a checkpoint of this trainer; give another with {key}=")
    return state


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
