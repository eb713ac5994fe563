"""All of a run that must survive it, in one object."""

from dataclasses import asdict, dataclass, field

import torch
from torch import nn

from data.loader import TrainLoader
from errors import UserError
from trainer.checkpoint import State, of_this_version, rng_state, set_rng_state
from trainer.distributed.parallel import split_moments, split_weights

SHAPE = ("context_length", "n_layer", "n_head", "n_embd", "vocab_size")  # what a run cannot change when it is continued


@dataclass
class TrainState:
    """Weights, optimizer, loss scale, the loader's position, all random generators, settings, and the steps so far."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    loader: TrainLoader
    tokenizer: str
    step: int = 0
    """Optimizer steps finished."""
    best_loss: float = float("inf")
    """Lowest validation loss so far, in nats."""
    evaluated: int = 0
    """The step of the last evaluation that came to its end."""
    skipped: int = 0
    """Steps so far that were not finite, and dropped."""
    norms: list[float] = field(default_factory=list)
    """Gradient norms of the last steps, by which Watch tells what is usual."""
    config: State = field(default_factory=dict)
    """The settings of the run, to be read by whoever finds the checkpoint; a resumed run goes by its own."""

    @property
    def tokens(self) -> int:
        """Training tokens that all processes have read so far."""
        loader = self.loader.state_dict()
        return loader["position"] * loader["context_length"]

    def state_dict(self) -> State:
        """Tensors as this process holds them: its parts, where they are split."""
        weights = self.model.state_dict()  # first, as FSDP then puts away the parameters that it has gathered
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        groups = self.optimizer.param_groups
        return {
            "model": weights,
            "model_config": asdict(self.model.config),
            "optimizer": self.optimizer.state_dict(),
            "parameters": [names[parameter] for group in groups for parameter in group["params"]],  # as it numbers them
            "scaler": self.scaler.state_dict(),
            "loader": self.loader.state_dict(),
            "config": self.config,
            "tokenizer": self.tokenizer,
            "step": self.step,
            "best_loss": self.best_loss,
            "evaluated": self.evaluated,
            "skipped": self.skipped,
            "norms": list(self.norms),
            "rng": rng_state(),
        }

    def load_state_dict(self, state: State) -> None:
        """Of a state whose tensors were left in their folder, reads those that this process is to hold.

        Raises:
            CheckpointError: it is not of this version of the trainer.
        """
        with of_this_version(state):
            self._load(state)

    def _load(self, state: State) -> None:
        if "folder" in state:
            from trainer.sharded import read_parts  # DCP takes seconds to import

            state = read_parts(state, self.model)
        self.model.load_state_dict(split_weights(self.model, state["model"]))
        moments, groups = split_moments(self.optimizer, state["optimizer"]), self.optimizer.state_dict()["param_groups"]
        for own, saved in zip(groups, moments["param_groups"], strict=True):
            own["lr"] = saved["lr"]  # which each step sets; decay and the like are this run's own
        self.optimizer.load_state_dict(moments | {"param_groups": groups})
        if state["scaler"]:  # of a run in fp16
            self.scaler.load_state_dict(state["scaler"])
        self.loader.load_state_dict(state["loader"])
        self.step, self.best_loss, self.skipped = state["step"], float(state["best_loss"]), int(state["skipped"])
        self.norms = [float(norm) for norm in state.get("norms", [])]  # older checkpoints have none
        self.evaluated = int(state.get("evaluated", self.step))  # nor this
        set_rng_state(state["rng"])


def check_resumable(state: State, model_config: object, tokenizer: str) -> None:
    """Refuses to continue a checkpoint with another model or tokenizer.

    Raises:
        UserError: naming the first setting that differs.
    """
    source = state["path"]
    if state["tokenizer"] != tokenizer:
        raise UserError(
            f"checkpoint.resume={source} was trained on {state['tokenizer']} tokens, not on {tokenizer}; "
            f"choose data of the {state['tokenizer']} tokenizer"
        )
    saved, asked = state["model_config"], asdict(model_config)
    with of_this_version(state):
        differing = next((key for key in SHAPE if saved[key] != asked[key]), None)
        longer = differing == "context_length" and asked[differing] > saved[differing]
    if longer:
        raise UserError(
            f"model.context_length={asked['context_length']} is longer than the {saved['context_length']} positions of "
            f"checkpoint.resume={source}; set model.context_length={saved['context_length']}"
        )
    if differing:
        raise UserError(
            f"model.{differing}={asked[differing]}, but checkpoint.resume={source} has {saved[differing]}; set "
            f"model.{differing}={saved[differing]}"
        )
