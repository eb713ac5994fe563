"""The scales of FP8 training, which change between steps, and what the log says of them.

A tensor's scale follows its peak. The peak rises at once to the largest |x| of the last step, and falls by at most 1/16
a step. The scale is the smallest power of two that puts twice the peak inside the format's range. So the largest |x|
can double from one step to the next before numbers are clipped.
"""

import torch
from torch import Tensor, nn

from kernels.fp8.definition import E4M3, E5M2
from model.linear import FIRST_PEAKS, Scales
from trainer.checkpoint.files import State
from trainer.distributed.world import ALONE, World, local_part

HEADROOM, FORGET = 2.0, 15 / 16
SMALLEST_PEAK = 2.0**-40  # Smaller peaks share its scale. The reciprocals and products of all scales stay normal fp32.
FORMATS = {"input": E4M3, "weight": E4M3, "gradient": E5M2}


class ScaleUpdates:
    """Sets the scales of a model's linear layers after each step. It does nothing for a model without scales."""

    def __init__(self, model: nn.Module, world: World = ALONE):
        """Set the first scales."""
        self.layers = [module for module in model.modules() if isinstance(getattr(module, "scales", None), Scales)]
        self.world = world
        if not self.layers:
            return
        device = self.layers[0].scales.input_scale.device
        self.limits = torch.tensor([torch.finfo(format).max for format in FORMATS.values()], device=device)[:, None]
        self.first = torch.tensor([FIRST_PEAKS[role] for role in FORMATS], device=device)[:, None]
        self._begin()
        self.seen = torch.zeros(3, *self.peaks.shape, device=device)  # the last step's statistics

    def _begin(self) -> None:
        """Set the first scales. A weight's scale follows from the weight itself. The other peaks are unknown: 0."""
        self.peaks = torch.zeros(len(FORMATS), len(self.layers), device=self.limits.device)
        weights = torch.stack([largest_of(local_part(layer.weight.detach())) for layer in self.layers])
        self.peaks[list(FORMATS).index("weight")] = self.world.maximum(weights.float())
        self._set()

    def update(self) -> None:
        """Take the statistics of the step that has ended, and set the scales of the next one."""
        if not self.layers:
            return
        statistics = [getattr(layer.scales, f"{role}_statistics") for role in FORMATS for layer in self.layers]
        self.seen = torch.stack(statistics, 1).view(3, *self.peaks.shape)
        torch._foreach_zero_(statistics)
        largest = self.world.maximum(self.seen[0])
        usable = largest.isfinite() & (largest > 0)  # Infinity, NaN and a tensor of zeros leave the peak as it is.
        self.peaks = torch.where(usable, torch.maximum(largest, FORGET * self.peaks), self.peaks)
        self._set()

    def _set(self) -> None:
        peaks = torch.where(self.peaks > 0, self.peaks, self.first).clamp(min=SMALLEST_PEAK)
        ratios = HEADROOM * (peaks / self.limits)  # finite for every finite peak
        scales = torch.exp2(torch.ceil(torch.log2(ratios)))
        of_layers = [getattr(layer.scales, f"{role}_scale") for role in FORMATS for layer in self.layers]
        torch._foreach_copy_(of_layers, list(scales.flatten().unbind()))

    def metrics(self) -> dict[str, float]:
        """Return the largest |x| of the last step, and the largest underflow of a layer, for each role.

        A layer's underflow is the mean over the micro-steps of this process, and over recomputations of activation
        checkpointing.
        """
        if not self.layers:
            return {}
        largest, underflow, tensors = self.seen
        found = torch.stack((largest, underflow / tensors.clamp(min=1))).amax(2).tolist()
        names = [f"fp8/{what}_{role}" for what in ("amax", "underflow") for role in FORMATS]
        return dict(zip(names, [*found[0], *found[1]], strict=True))

    def state_dict(self) -> State:
        return {"peaks": self.peaks.tolist()} if self.layers else {}

    def load_state_dict(self, state: State) -> None:
        """Restore the scales. A checkpoint of a run without FP8 has none: set the first ones for its weights."""
        if self.layers and state:
            self.peaks = torch.tensor(state["peaks"], device=self.peaks.device)
            self._set()
        elif self.layers:
            self._begin()


def largest_of(x: Tensor) -> Tensor:
    """Return the largest |x|, or 0 for the empty shard of a process that holds no rows of a weight."""
    return x.abs().amax() if x.numel() else x.new_zeros(())
