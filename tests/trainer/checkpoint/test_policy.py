"""What counts as the best validation loss if a checkpoint is not saved."""

import errno
import math

import pytest
from torch import nn

from tests.e2e import load
from tests.trainer.checkpoint.states import small
from trainer.checkpoint import single
from trainer.checkpoint.policy import Checkpoints, is_branch
from trainer.checkpoint.single import SingleFileStore
from trainer.distributed.world import ALONE
from trainer.state import TrainState


class SmallState(TrainState):
    """A state whose checkpoint has only a few tensors and the best loss."""

    def state_dict(self) -> dict:
        return small(self.step, best_loss=self.best_loss)


def refuse(*args) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("fault", ["full disk", "weights not finite"])
def test_a_loss_whose_state_is_not_saved_does_not_count_as_the_best(tmp_path, monkeypatch, fault):
    """The losses are 4, 2 and 3. The state with loss 2 is not saved, so best.pt becomes the state with loss 3."""
    told, model = [], nn.Linear(1, 1)
    state = SmallState(model, optimizer=None, scaler=None, loader=None, tokenizer="byte")
    checkpoints = Checkpoints(SingleFileStore(tmp_path, keep=1), "continue", ALONE)

    def evaluate(step: int, loss: float) -> tuple[int, float]:
        state.step = step
        checkpoints.save_if_best(state, {"val/loss": loss})
        best = load(tmp_path / "best.pt")
        assert (best["step"], best["best_loss"]) == (state.best_step, state.best_loss)
        return state.best_step, state.best_loss

    with checkpoints.saving(state, told.append):
        assert evaluate(1, 4.0) == (1, 4.0)
        with monkeypatch.context() as patch:
            if fault == "full disk":
                patch.setattr(single, "write_file", refuse)
            else:
                nn.init.constant_(model.bias, math.nan)
            assert evaluate(2, 2.0) == (1, 4.0)
        nn.init.zeros_(model.bias)
        assert evaluate(3, 3.0) == (3, 3.0)
    assert len(told) == 1 and "training continues" in told[0]


def test_a_run_that_starts_from_another_runs_checkpoint_is_a_branch(tmp_path):
    outputs = tmp_path / "outputs"
    own, other = (outputs / name / "checkpoints" / "step-00000003.pt" for name in ("own", "other"))
    for path in (own, other):
        path.parent.mkdir(parents=True)
        path.touch()
    found = [
        is_branch(output, folder, {"path": str(path)})
        for output, folder, path in (
            (outputs / "own", own.parent, own),
            (outputs / "own", tmp_path / "elsewhere", own),  # with another checkpoint.dir from now on
            (outputs / "own", other.parent, other),  # with a checkpoint.dir of its own
            (outputs / "own", own.parent, other),
            (outputs, outputs / "checkpoints", other),
        )
    ]
    assert found == [False, False, False, True, True] and not is_branch(outputs, own.parent, None)
