"""What a run says if the GPU runs out of memory: what did not fit, and which settings need less."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from errors import UserError, two_sentences
from model.gpt2 import CHECKPOINTING
from trainer.config import TrainConfig
from trainer.meters import GIB
from trainer.precision import Compute


@contextmanager
def explaining_out_of_memory(model: nn.Module, settings: TrainConfig, compute: Compute) -> Iterator[None]:
    """Turn torch's out-of-memory error into a UserError that names the sizes and the settings to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(out_of_memory(two_sentences(error), model, settings, compute)) from error


def out_of_memory(reason: str, model: nn.Module, settings: TrainConfig, compute: Compute) -> str:
    """Return a sentence about training steps that did not fit. `reason` is torch's message.

    Its remedies begin with those that leave the optimizer step as it is.
    """
    device, world = compute.device, compute.world
    peak = f" at a peak of {torch.cuda.max_memory_allocated(device) / GIB:.1f} GiB" if device.type == "cuda" else ""
    batch_size, micro_steps = settings.share(world.size)
    remedies = ["choose a shorter model.context_length or a smaller model"]
    if world.parallel == "ddp":
        remedies.insert(0, "set parallel=fsdp")
    if settings.activation_checkpointing != CHECKPOINTING[-1]:
        stronger = CHECKPOINTING[CHECKPOINTING.index(settings.activation_checkpointing) + 1]
        remedies.insert(0, f"set train.activation_checkpointing={stronger}")
    if batch_size > 1:
        smaller = next(size for size in range(batch_size // 2, 0, -1) if batch_size * micro_steps % size == 0)
        remedies.insert(0, f"set train.batch_size={smaller} train.grad_accumulation={settings.sequences // smaller}")
    who = f"process {world.rank} of {world.size}: " if world.size > 1 else ""
    return (
        f"{who}out of memory{peak} ({reason}): a GPT-2 of {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M "
        f"parameters, train.batch_size={batch_size}, model.context_length={model.config.context_length}; "
        f"{' or '.join(remedies)}"
    )
