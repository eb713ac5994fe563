"""The arithmetic of a training step, and the device it runs on."""

from dataclasses import dataclass

import torch

from errors import UserError, check_choice
from trainer.distributed.world import ALONE, World

FP8_FROM = (8, 9)  # compute capability: Ada and Hopper
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.bfloat16}


@dataclass
class PrecisionConfig:
    """The dtype of matrix products (group `precision`). Weights and optimizer stay fp32."""

    name: str = "auto"
    """auto (bf16 on a GPU that has it, fp32 elsewhere), bf16, fp16 (with a scaled loss), fp32, or fp8: the blocks'
    linear layers train in FP8, and all else is in bf16."""

    def __post_init__(self):
        check_choice("precision.name", self.name, ("auto", *DTYPES))


@dataclass(frozen=True)
class Compute:
    """The device of a run, the dtype of its matrix products, and the processes that share the work."""

    device: torch.device
    dtype: torch.dtype
    world: World = ALONE
    fp8: bool = False
    """Whether the linear layers of the blocks train in FP8."""

    def autocast(self) -> torch.autocast:
        """Return a context that computes matrix products in `dtype`. It does nothing for fp32."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def grad_scaler(self) -> torch.amp.GradScaler:
        """Return a scaler of the loss for fp16, whose gradients would underflow. It does nothing for other dtypes."""
        return torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)

    @property
    def precision(self) -> str:
        """fp8, bf16, fp16 or fp32."""
        if self.fp8:
            return "fp8"
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)

    @property
    def devices(self) -> str:
        """The device, and with several processes their number and the way they share the work."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        alone = self.world.parallel == "none"
        return name if alone else f"{self.world.size} x {name} ({self.world.parallel})"

    def __str__(self) -> str:
        return f"{self.devices}, {self.precision}"


def choose_compute(device: str, precision: PrecisionConfig, world: World = ALONE, trains: bool = True) -> Compute:
    """Return the device for `device` (auto, cpu, cuda) and its dtype. auto takes the GPU and bf16 if possible.

    Without `trains`, refuse FP8.
    """
    check_choice("device", device, ("auto", "cpu", "cuda"))
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise UserError("device=cuda finds no GPU; set device=cpu, or install torch's CUDA build")
    place, name = torch.device("cuda" if device != "cpu" and has_gpu else "cpu"), precision.name
    has_bf16 = place.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "auto":
        name = "bf16" if place.type == "cuda" and has_bf16 else "fp32"
    if name == "bf16" and not has_bf16:
        gpu = torch.cuda.get_device_name(place)
        raise UserError(f"precision=bf16 does not run on {gpu}; set precision=fp16 or precision=fp32")
    if name == "fp16" and place.type == "cpu":
        raise UserError("precision=fp16 needs a GPU; set precision=fp32 or precision=bf16 on a CPU")
    if name == "fp8" and not trains:
        raise UserError("precision=fp8 is for training only; set precision=bf16")
    if name == "fp8" and place.type == "cuda" and not has_fp8(place):
        gpu = torch.cuda.get_device_name(place)
        raise UserError(f"precision=fp8 needs an NVIDIA GPU from Ada or Hopper on, not {gpu}; set precision=auto")
    return Compute(place, DTYPES[name], world, fp8=name == "fp8")


def has_fp8(device: torch.device) -> bool:
    """Return whether the GPU multiplies in FP8: NVIDIA's from Ada on."""
    is_nvidia = torch.cuda.is_available() and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= FP8_FROM
