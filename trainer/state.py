"""The state of a run that must survive a restart, in one object."""

import random
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from torch import nn

from data.loader import TrainLoader
from trainer.checkpoint.files import State
from trainer.checkpoint.load import of_this_version
from trainer.checkpoint.sharded import read_parts
from trainer.distributed.parallel import split_moments, split_weights
from trainer.distributed.world import ALONE, World
from trainer.scales import ScaleUpdates

NUMBERS = ("step", "best_loss", "best_step", "evaluated", "skipped", "norms")
COUNTS = ("broken_in_a_row", "overflows_in_a_row")  # older checkpoints lack them


@dataclass
class TrainState:
    """Weights, optimizer, the loader's position, random generators, settings, the number of steps, and the scales of
    the loss and of FP8."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    loader: TrainLoader
    tokenizer: str
    step: int = 0  # finished optimizer steps
    best_loss: float = float("inf")  # lowest validation loss so far, in nats
    best_step: int = 0  # the step of that loss
    best_evaluation: State = field(default_factory=dict)  # the settings of the evaluation that gave that loss
    evaluated: int = 0  # the step of the last complete evaluation
    skipped: int = 0  # steps that were dropped because loss or gradient was not finite
    broken_in_a_row: int = 0  # the last steps, if they were dropped
    overflows_in_a_row: int = 0  # the last steps, if their gradient was not finite
    norms: list[float] = field(default_factory=list)  # gradient norms of the last steps; their median is the usual norm
    config: State = field(default_factory=dict)  # the run's settings, which a resumed run takes over
    world: World = ALONE
    resumed_from: int = 0  # number of processes that wrote the checkpoint
    fp8_scales: ScaleUpdates = field(init=False)

    def __post_init__(self):
        self.fp8_scales = ScaleUpdates(self.model, self.world)

    @property
    def tokens(self) -> int:
        """Training tokens that all processes have read so far."""
        loader = self.loader.state_dict()
        return loader["position"] * loader["context_length"]

    def state_dict(self) -> State:
        """Return everything as plain values and tensors. All processes call this together.

        The dict holds this process's part of sharded tensors, and the random states of all processes.
        """
        weights = self.model.state_dict()  # first, because FSDP then frees the parameters that it gathered
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        groups = self.optimizer.param_groups
        return {
            "model": weights,
            "model_config": asdict(self.model.config),
            "pattern": self.model.attention.matrix,
            "optimizer": self.optimizer.state_dict(),
            "parameters": [names[p] for group in groups for p in group["params"]],  # in the optimizer's order
            "scaler": self.scaler.state_dict(),
            "fp8_scales": self.fp8_scales.state_dict(),
            "loader": self.loader.state_dict(),
            "config": self.config,
            "best_evaluation": self.best_evaluation,
            "tokenizer": self.tokenizer,
            "rng": self.world.gather(random_state()),
        } | {key: getattr(self, key) for key in NUMBERS + COUNTS}

    def load_state_dict(self, state: State) -> None:
        """Restore a state. If its tensors are still in their folder, read this process's part."""
        with of_this_version(state):
            model = self.model if self.world.is_sharded else None
            self._load(read_parts(state, model) if "folder" in state else state)

    def _load(self, state: State) -> None:
        self.model.load_state_dict(split_weights(self.model, state["model"]))
        moments, groups = split_moments(self.optimizer, state["optimizer"]), self.optimizer.state_dict()["param_groups"]
        for own, saved in zip(groups, moments["param_groups"], strict=True):
            own["lr"] = saved["lr"]  # each step sets it; weight decay and betas are this run's own settings
        self.optimizer.load_state_dict(moments | {"param_groups": groups})
        if state["scaler"]:  # only runs in fp16 have one
            self.scaler.load_state_dict(state["scaler"])
        self.fp8_scales.load_state_dict(state.get("fp8_scales", {}))
        self.loader.load_state_dict(state["loader"])
        for key in NUMBERS:  # The conversion refuses other values than numbers.
            setattr(self, key, type(getattr(self, key))(state[key]))
        for key in COUNTS:
            setattr(self, key, int(state.get(key, 0)))
        self.norms = [float(norm) for norm in self.norms]
        self.best_evaluation = dict(state.get("best_evaluation", {}))  # older checkpoints lack it
        self.resumed_from, rank = len(state["rng"]), self.world.rank
        if self.resumed_from == self.world.size or rank == 0:  # the other processes already draw different numbers
            set_random_state(state["rng"][rank])


def random_state() -> State:
    """Return the states of Python's, NumPy's and torch's generators, on the CPU and on this process's GPU."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: State) -> None:
    """Restore the states that random_state returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
