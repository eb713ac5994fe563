"""What to tell when the GPU's memory does not suffice: what did not fit, and settings that do, found by trying them."""

from collections.abc import Iterator

import torch
from torch import nn

from model.gpt2 import CHECKPOINTING
from trainer.config import TrainConfig
from trainer.meters import GIB
from trainer.precision import Compute


def out_of_memory(
    told: str, model: nn.Module, optimizer: torch.optim.Optimizer, compute: Compute, settings: TrainConfig
) -> str:
    """A sentence on steps that ran out of memory, of which torch said `told`.

    Nobody may hold the activations of the step that failed: not its traceback either. One of several processes tries
    nothing, for which it would need the others.
    """
    shape, device, world = model.config, compute.device, compute.world
    peak = f" at a peak of {torch.cuda.max_memory_allocated(device) / GIB:.1f} GiB" if device.type == "cuda" else ""
    (batch_size, micro_steps), own = settings.share(world.size), model.h[0].activation_checkpointing
    what = (
        f"out of memory{peak} ({told}): a GPT-2 of {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, "
        f"train.batch_size={batch_size}, model.context_length={shape.context_length}"
    )
    if world.size > 1:
        remedies = ["lower train.batch_size"]
        if own != "full":
            remedies.append("train.activation_checkpointing=full")
        if not world.is_sharded:
            remedies.append("parallel=fsdp")
        return f"process {world.rank} of {world.size}: {what}; {' or set '.join(remedies)}"
    sizes = candidates(batch_size, micro_steps, shape.context_length, own)
    remedy = next((settings for settings, *size in sizes if _fits(model, optimizer, compute, *size)), None)
    tried = f"what fits is {remedy}" if remedy else "one short sequence does not fit either, so choose a smaller model"
    return f"{what}; {tried}"


def candidates(batch_size: int, micro_steps: int, context: int, own: str) -> Iterator[tuple[str, int, int, str]]:
    """Settings in the order to try them, and their batch size, context, and which activations are computed twice.

    First smaller micro-batches of the same step, with the run's `own` activation checkpointing, then single sequences
    with more of it, then shorter ones.
    """
    whole = batch_size * micro_steps
    for size in range(batch_size - 1, 0, -1):
        if whole % size == 0:
            yield f"train.batch_size={size} train.grad_accumulation={whole // size}", size, context, own
    single = f"train.batch_size=1 train.grad_accumulation={whole} train.activation_checkpointing="
    for checkpointing in CHECKPOINTING[CHECKPOINTING.index(own) + 1 :]:
        yield f"{single}{checkpointing}", 1, context, checkpointing
    while (context := context // 2) >= 64:
        yield f"{single}full model.context_length={context}", 1, context, "full"


def _fits(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    compute: Compute,
    batch_size: int,
    context: int,
    checkpointing: str,
) -> bool:
    """Whether a forward and a backward pass fit beside the optimizer's moments."""
    model.train()
    for block in model.h:
        block.activation_checkpointing = checkpointing
    try:
        # Moments that the optimizer has not made yet: two of the size of each parameter.
        moments = [] if optimizer.state else [torch.empty_like(p) for p in model.parameters() for _ in range(2)]
        tokens = torch.zeros((batch_size, context), dtype=torch.int64, device=compute.device)
        with compute.autocast():
            loss = model(tokens, tokens)
        loss.backward()
        del moments
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        model.zero_grad(set_to_none=True)
