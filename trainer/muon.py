"""Muon for the weight matrices of the blocks, and AdamW for all other parameters, as one optimizer."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from errors import check_choice, check_range, check_rate

LARGEST_NS_STEPS = 99  # of torch.optim.Muon


@dataclass
class MuonConfig:
    """Muon's settings for the weight matrices of the blocks (with optimizer=muon)."""

    lr: float | None = None
    """Learning rate at the end of the warm-up, which follows the schedule of optimizer.lr; null is optimizer.lr."""
    momentum: float = 0.95
    """Decay of the gradient's running mean, in [0, 1)."""
    nesterov: bool = True
    """Mix the gradient into its running mean once more before the orthogonalisation."""
    ns_steps: int = 5
    """Newton-Schulz iterations of the orthogonalisation."""
    adjust_lr_fn: str = "match_rms_adamw"
    """Scale of the rate for a matrix of shape A x B. match_rms_adamw is lr x 0.2 x sqrt(max(A, B)); choose it with a
    rate of AdamW. original is lr x sqrt(max(1, A / B)); choose it with a rate such as 0.02."""

    def __post_init__(self):
        check_range("optimizer.muon.lr", self.lr, 0)
        check_range("optimizer.muon.ns_steps", self.ns_steps, 1, LARGEST_NS_STEPS)
        check_rate("optimizer.muon.momentum", self.momentum)
        check_choice("optimizer.muon.adjust_lr_fn", self.adjust_lr_fn, ("match_rms_adamw", "original"))


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon for `matrices` and `adamw` for its own parameters, with one state and one list of groups."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], adamw: torch.optim.AdamW, config: MuonConfig, weight_decay: float
    ):
        """Take over adamw's parameters. The schedule gives adamw's rate."""
        lr = adamw.defaults["lr"]
        own = lr if config.lr is None else config.lr
        options = {"momentum": config.momentum, "nesterov": config.nesterov, "ns_steps": config.ns_steps}
        options |= {"weight_decay": weight_decay, "adjust_lr_fn": config.adjust_lr_fn}
        groups = [{"params": list(matrices), "lr_ratio": own / lr if lr else 1.0}]  # see optimizer.set_learning_rate
        self._adamw, self._muon = adamw, torch.optim.Muon(groups, lr=own, **options)
        super().__init__([*adamw.param_groups, *self._muon.param_groups], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters, or none if `found_inf` is set. Divide the gradients by `grad_scale`.

        optimizer.clip_gradients sets both. torch's Muon does not know them, so the host waits for `found_inf`.
        """
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None and found_inf:
            return
        self._adamw.param_groups, self._muon.param_groups = self.param_groups[:-1], self.param_groups[-1:]
        self._adamw.state = self._muon.state = self.state  # load_state_dict replaces the state and the groups
        self._adamw.grad_scale = scale
        for p in self.param_groups[-1]["params"]:
            if scale is not None and p.grad is not None:
                p.grad.div_(scale)
        self._adamw.step()
        self._muon.step()
