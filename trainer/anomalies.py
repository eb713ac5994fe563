"""Steps that went wrong: told by their loss and gradient norm, and recorded so that they can be replayed."""

import json
import math
from pathlib import Path
from statistics import median

import torch
from torch import nn

from errors import UserError
from trainer.checkpoint import State
from trainer.distributed.world import local_part
from trainer.loggers import finite
from trainer.state import TrainState

REMEMBERED = 100  # gradient norms that tell what is usual
NEEDED = 20  # of them, before one can be unusual
IN_A_ROW = 10  # steps that are not finite, at which skipping ends
OVERFLOWS = 40  # in a row, from a loss scale of 2^16 on: below, gradients vanish


def are_finite(model: nn.Module) -> bool:
    """Whether all weights are, of which a process that holds a part sees that."""
    return bool(torch.stack([local_part(parameter).isfinite().all() for parameter in model.parameters()]).all())


class Watch:
    """Judges the steps of a run, one after the other, and records some as files of `folder`.

    A gradient norm is a spike if it is more than `spike_factor` times the median of the last hundred (None: none is),
    which are kept in `norms`: the list of the run's state. Of several processes, all of which judge alike, only one
    `writes`.
    """

    def __init__(self, folder: Path, spike_factor: float | None, norms: list[float], writes: bool = True):
        self.folder, self.spike_factor, self.writes = folder, spike_factor, writes
        self.in_a_row = 0
        """Steps up to now that were not finite."""
        self._norms = norms
        self._overflows = 0

    def is_broken(self, loss: float, norm: float, overflow_is_normal: bool) -> bool:
        """Whether the step was not finite; `overflow_is_normal` in fp16, which finds its loss scale by such norms, but
        not for ever.
        """
        self._overflows = 0 if math.isfinite(norm) else self._overflows + 1
        is_normal = overflow_is_normal and self._overflows <= OVERFLOWS
        broken = not math.isfinite(loss) or not (math.isfinite(norm) or is_normal)
        self.in_a_row = self.in_a_row + 1 if broken else 0
        return broken

    def spike(self, norm: float) -> float | None:
        """How many times the usual this step's gradient norm is, if that is too many."""
        if not math.isfinite(norm):
            return None
        usual = median(self._norms) if len(self._norms) >= NEEDED else math.inf
        self._norms.append(norm)
        del self._norms[:-REMEMBERED]
        is_spike = self.spike_factor is not None and norm > self.spike_factor * usual > 0
        return norm / usual if is_spike else None

    def record(
        self, step: int, loss: float, norm: float, *, state: TrainState, windows: int, weights: Path | None
    ) -> Path | None:
        """Writes what it takes to run the batch of that step again, and returns the file; None where the disk refuses.

        A step reads `windows` windows; `weights` are the checkpoint to run it by.
        """
        path = self.folder / f"step-{step:08d}.json"
        if not self.writes:
            return path
        loader = state.loader.state_dict()
        loader["position"] -= (state.step - step + 1) * windows
        content = {
            "step": step,
            "loss": finite(loss),
            "grad_norm": finite(norm),
            "checkpoint": None if weights is None else str(weights),
            "loader": loader,
            "scaler": state.scaler.state_dict(),
            "config": state.config,
        }
        try:
            self.folder.mkdir(exist_ok=True)
            path.write_text(json.dumps(content, indent=2) + "\n")
        except OSError:
            return None
        return path


def read_record(path: Path) -> State:
    """What `record` wrote.

    Raises:
        UserError: there is none, or it is none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        whole = content.keys() >= {"step", "loss", "grad_norm", "checkpoint", "loader", "scaler", "config"}
        whole = whole and isinstance(content["checkpoint"], str | None)
        whole = whole and content["loader"].keys() >= {"position", "seed", "context_length", "tokens"}
        position = content["loader"]["position"] if whole else None
        whole = whole and isinstance(position, int) and position >= 0
    except OSError as error:
        raise UserError(
            f"replay={path} cannot be read ({error.strerror}); give a file of a run's replay folder"
        ) from error
    except (ValueError, AttributeError, TypeError, KeyError):
        whole = False
    if not whole:
        raise UserError(f"replay={path} is no record of a step; give a file of a run's replay folder")
    return content
