"""The optimizer, its learning-rate schedule, and gradient clipping that drops steps which are not finite."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from errors import UserError, check_choice, check_range, check_rate
from trainer.distributed.world import local_part
from trainer.muon import Muon, MuonConfig


@dataclass
class OptimizerConfig:
    """AdamW or Muon, with linear warm-up and cosine decay (group `optimizer`)."""

    name: str = "adamw"
    """adamw; muon: torch.optim.Muon for the weight matrices of the blocks, and AdamW for all other parameters."""
    lr: float = 6e-4
    """Learning rate at the end of the warm-up."""
    min_lr: float | None = None
    """Learning rate at the end of the decay and after it; null is a tenth of lr."""
    warmup_steps: int = 100
    """Steps over which the learning rate rises from zero."""
    decay_steps: int | None = None
    """Step at which the cosine reaches min_lr; null is train.max_steps."""
    beta1: float = 0.9
    """Decay of the gradient's running mean, in [0, 1)."""
    beta2: float = 0.95
    """Decay of the squared gradient's running mean, in [0, 1)."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices and tables. Biases and LayerNorm do not decay."""
    grad_clip: float = 1.0
    """Largest norm of the whole gradient; 0 does not clip."""
    muon: MuonConfig = field(default_factory=MuonConfig)

    def __post_init__(self):
        check_choice("optimizer.name", self.name, ("adamw", "muon"))
        for key in ("lr", "min_lr", "warmup_steps", "weight_decay", "grad_clip"):
            check_range(f"optimizer.{key}", getattr(self, key), 0)
        check_range("optimizer.decay_steps", self.decay_steps, 1)
        if not 0 < self.eps < math.inf:  # 0 would divide by zero for table rows that no token uses
            raise UserError(f"optimizer.eps={self.eps} is out of range; give a finite number above 0")
        for key in ("beta1", "beta2"):
            check_rate(f"optimizer.{key}", getattr(self, key))
        if self.min_lr is not None and self.min_lr > self.lr:
            raise UserError(f"optimizer.min_lr={self.min_lr} is above optimizer.lr={self.lr}; lower min_lr or raise lr")
        if self.name != "muon" and self.muon != MuonConfig():
            raise UserError(
                f"optimizer.muon has settings, but optimizer={self.name} does not use them; add optimizer=muon"
            )
        if self.muon.lr and not self.lr:
            raise UserError(
                f"optimizer.muon.lr={self.muon.lr} follows the schedule of optimizer.lr=0; raise optimizer.lr"
            )


def learning_rate(step: int, config: OptimizerConfig, max_steps: int) -> float:
    """Return the rate of the step after `step` finished ones: linear warm-up, then a cosine from lr to min_lr."""
    min_lr = config.lr / 10 if config.min_lr is None else config.min_lr
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    decay_steps = config.decay_steps or max_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, decay_steps - config.warmup_steps))
    return min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (config.lr - min_lr)


def schedule_remarks(step: int, last: float, config: OptimizerConfig, max_steps: int) -> Iterator[str]:
    """Yield what looks wrong in the learning rates to come, after `step` steps and the rate `last`."""
    warmup, decay_steps = config.warmup_steps, config.decay_steps or max_steps
    if warmup > max_steps:
        highest = learning_rate(max_steps - 1, config, max_steps)
        yield (
            f"optimizer.warmup_steps={warmup} exceeds train.max_steps={max_steps}: the learning rate ends at "
            f"{highest:.2g} and never reaches optimizer.lr={config.lr:.2g}; lower optimizer.warmup_steps"
        )
    elif warmup >= decay_steps and decay_steps < max_steps:
        yield (
            f"optimizer.decay_steps={decay_steps} is not above optimizer.warmup_steps={warmup}: the learning rate "
            "falls to its minimum at once after the warm-up; raise optimizer.decay_steps"
        )
    if 0 < step < max_steps and not math.isclose(last, learning_rate(step - 1, config, max_steps), rel_tol=0.1):
        new = learning_rate(step, config, max_steps)
        yield (
            f"the learning rate jumps from {last:.2g} at step {step} to {new:.2g} at step {step + 1}, because the "
            "schedule is not the checkpoint's; to keep the old decay, set optimizer.decay_steps to the old max_steps"
        )


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW. On a GPU, one launch of kernels.adamw updates a whole group of parameters."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters. On a CPU this is torch.optim.AdamW's step."""
        if self.param_groups[0]["params"][0].device.type != "cuda":
            super().step()
        else:
            for group in self.param_groups:
                self._step_of(group)

    def _step_of(self, group: dict) -> None:
        from kernels.adamw.triton_kernels import adamw_  # only a GPU needs Triton

        weights = [p for p in group["params"] if p.grad is not None]
        if not weights:
            return
        for p in weights:
            if p not in self.state:
                step = torch.zeros((), device=p.device)
                self.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        state = ([self.state[p][key] for p in weights] for key in ("exp_avg", "exp_avg_sq", "step"))
        tensors = [[local_part(x) for x in of_one_kind] for of_one_kind in (weights, [p.grad for p in weights], *state)]
        zero, (beta1, beta2) = tensors[0][0].new_zeros(()), group["betas"]
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        scalars = zero + 1 if scale is None else scale, zero if found_inf is None else found_inf
        settings = {"lr": group["lr"], "eps": group["eps"], "weight_decay": group["weight_decay"]}
        adamw_(*tensors, *scalars, beta1=beta1, beta2=beta2, **settings)


def build_optimizer(model: nn.Module, config: OptimizerConfig, kind: type[torch.optim.AdamW] = AdamW) -> AdamW | Muon:
    """Return the optimizer. Only matrices and tables decay. Benchmarks pass another `kind` of AdamW to compare with."""
    hidden = {p for p in model.h.parameters() if p.ndim == 2} if config.name == "muon" else set()
    decayed = [p for p in model.parameters() if p.ndim >= 2 and p not in hidden]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = {"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}
    groups = [group for group in groups if group["params"]]
    adamw = kind(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
    if not hidden:
        return adamw
    return Muon([p for p in model.parameters() if p in hidden], adamw, config.muon, config.weight_decay)


def set_learning_rate(optimizer: AdamW | Muon, lr: float) -> None:
    """Use the schedule's rate `lr` for the next step, times a group's lr_ratio if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1)


def clip_gradients(optimizer: AdamW | Muon, scaler: torch.amp.GradScaler, grad_clip: float) -> Tensor:
    """Clip the norm of the whole gradient to `grad_clip` (0: do not clip) and return the norm before it, a scalar.

    If the norm is not finite, the optimizer's next step leaves weights and moments unchanged. With AdamW, the host does
    not wait: fused AdamW reads `found_inf`, and divides by `grad_scale`, which clips without another pass over the
    gradients.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    largest = grad_clip or math.inf
    if scaler.is_enabled():  # fp16, which parallel.shard refuses for split weights
        scaler.unscale_(optimizer)
        return nn.utils.clip_grad_norm_(parameters, largest)
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm  # over all processes
    optimizer.grad_scale = (norm / largest).clamp(min=1)
    optimizer.found_inf = (~norm.isfinite()).float()
    return norm
