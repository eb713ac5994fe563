"""The watch over training steps: it finds losses and gradients that are not finite and gradient spikes, and records
such steps so that replay.py can rerun them."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from errors import UserError, assigned
from trainer.checkpoint.files import State
from trainer.checkpoint.policy import Checkpoints
from trainer.config import TrainConfig
from trainer.evaluation import perplexity
from trainer.folders import write_text
from trainer.loggers import finite
from trainer.state import TrainState

REMEMBERED = 100  # gradient norms whose median is the usual norm
NEEDED = 20  # norms, before one can be a spike
IN_A_ROW = 10  # broken steps in a row that stop a run even with train.on_nan=skip
OVERFLOWS = 40  # fp16 overflows in a row, starting from a loss scale of 2^16; below that, gradients vanish


@dataclass
class Watch:
    """Judges every step of a run by its loss and gradient norm, and writes records of bad steps to `folder`.

    All processes see the same numbers and judge in the same way; the first one writes. `tell` prints one line for the
    user.
    """

    state: TrainState
    settings: TrainConfig
    checkpoints: Checkpoints
    folder: Path
    tell: Callable[[str], None]
    loss: float | None = None  # of the newest judged step, in nats
    _window: list[Tensor] = field(default_factory=list)  # loss and norm of each unjudged step, still on the device
    _newest: dict[str, float] = field(default_factory=dict)  # metrics of the newest judged step, until `read`

    def note(self, result: Tensor) -> None:
        """Keep a step's loss and gradient norm, (2,) on the device."""
        self._window.append(result)

    def judge(self) -> None:
        """Judge all steps since the last call. Save the state and raise a UserError if a step must stop the run."""
        if not self._window:
            return
        rows = self.state.world.sum(torch.stack(self._window)).div(self.state.world.size).tolist()
        self._window = []
        first = self.state.step - len(rows) + 1
        for i, (loss, norm) in enumerate(rows):
            self._judge(first + i, loss, norm, later=rows[i + 1 :])
        self.loss = loss
        self._newest = {"train/loss": loss, "train/perplexity": perplexity(loss), "train/grad_norm": norm}
        self._newest["train/lr"] = self.state.optimizer.param_groups[0]["lr"]
        if self.settings.on_nan == "skip":
            self._newest["train/skipped_steps"] = self.state.skipped

    def read(self) -> dict[str, float]:
        """Judge all steps and return the metrics of the newest; {} if they were read before. Raises like `judge`."""
        self.judge()
        newest, self._newest = self._newest, {}
        return newest

    def _judge(self, step: int, loss: float, norm: float, later: list[list[float]]) -> None:
        broken, spike = self._is_broken(loss, norm), self._spike(norm)
        if not broken and spike is None:
            return
        told = f"the loss was {loss:.6g} and the gradient norm {norm:.6g} at step {step}"
        dropped = f"{told}; the weights did not take this step"
        stops = broken and (self.settings.on_nan == "stop" or self.state.broken_in_a_row == IN_A_ROW)
        if stops:
            self.state.broken_in_a_row = 0  # a run that resumes from here counts again
        saved = self.checkpoints.save_at_failure(self.state) if stops else ""
        look = self._record(step, loss, norm)
        if stops:
            raise UserError(f"{dropped}. {saved} {_remedy(later)}: {look}")
        if spike is not None:
            self.tell(f"{told}, {spike:,.1f} times the usual norm; {look}")
        if broken:
            self.state.skipped += 1
            self.tell(f"{dropped} (train.on_nan=skip, {self.state.skipped} so far); {look}")

    def _is_broken(self, loss: float, norm: float) -> bool:
        """Return whether the step is not finite. fp16 finds its loss scale by overflows, so a few are normal there."""
        state = self.state
        state.overflows_in_a_row = 0 if math.isfinite(norm) else state.overflows_in_a_row + 1
        is_normal = state.scaler.is_enabled() and state.overflows_in_a_row <= OVERFLOWS
        broken = not math.isfinite(loss) or not (math.isfinite(norm) or is_normal)
        state.broken_in_a_row = state.broken_in_a_row + 1 if broken else 0
        return broken

    def _spike(self, norm: float) -> float | None:
        """Return how many times the usual norm this one is, if that exceeds train.spike_factor."""
        if not math.isfinite(norm):
            return None
        norms, factor = self.state.norms, self.settings.spike_factor
        usual = median(norms) if len(norms) >= NEEDED else math.inf
        norms.append(norm)
        del norms[:-REMEMBERED]
        return norm / usual if factor is not None and norm > factor * usual > 0 else None

    def _record(self, step: int, loss: float, norm: float) -> str:
        """Write what a replay of the step needs, and return the advice how to look at it."""
        path = self.folder / f"step-{step:08d}.json"
        loader = self.state.loader.state_dict()
        loader["position"] -= (self.state.step - step + 1) * self.settings.sequences
        content = {
            "step": step,
            "loss": finite(loss),
            "grad_norm": finite(norm),
            "loader": loader,
            "scaler": self.state.scaler.state_dict(),
            "config": self.state.config,
        }
        if self.state.world.is_first:
            try:
                self.folder.mkdir(exist_ok=True)
                write_text(path, json.dumps(content, indent=2) + "\n")
            except OSError as error:
                return f"the record {path} cannot be written ({error.strerror})"
        source = "" if self.checkpoints.before(step) else " checkpoint=... (no checkpoint from before the step exists)"
        function = self.state.config["attention"].get("function")  # only the command line can name code to import
        named = f" {assigned('function', function)}" if function else ""
        return f"look at it with python replay.py {assigned('record', path)}{named}{source}"


def _remedy(later: list[list[float]]) -> str:
    """Return the advice after a broken step. `later` has the loss and the gradient norm of each step after it."""
    if later and not any(math.isfinite(loss) and math.isfinite(norm) for loss, norm in later):
        return (
            "No later step was finite either, so a run from this state would stop again. Lower optimizer.lr and begin "
            "a new run, or resume from an earlier checkpoint. Or check the data"
        )
    return "Lower optimizer.lr, or check the data"


def read_record(path: Path) -> State:
    """Return the content of a record that a Watch wrote."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        loader = content["loader"]
        known = content.keys() >= {"step", "loss", "grad_norm", "scaler", "config"}
        known &= loader.keys() >= {"seed", "context_length", "tokens"} and loader["position"] >= 0
    except OSError as error:
        raise UserError(
            f"record={path} cannot be read ({error.strerror}); give a file of a run's replay folder"
        ) from error
    except (ValueError, AttributeError, TypeError, KeyError):
        known = False
    if not known:
        raise UserError(f"record={path} is not the record of a step; give a file of a run's replay folder")
    return content
