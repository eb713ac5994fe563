"""Messages about memory: the sizes that did not fit, and the settings that need less."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from errors import UserError, is_out_of_memory, two_sentences
from kernels.cross_entropy.op import part_size
from model.gpt2 import CHECKPOINTING, GPT2
from trainer.config import TrainConfig
from trainer.meters import GIB
from trainer.precision import Compute

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
# Numbers that a CPU needs for each token, in units of n_embd:
STORED = {"none": 16, "selective": 12, "full": 2}  # for the backward pass, in each layer
WORKING = {"none": 48, "selective": 48, "full": 64}  # of one layer, the embedding and the head; fitted


@contextmanager
def explaining_out_of_memory(model: nn.Module, settings: TrainConfig, compute: Compute) -> Iterator[None]:
    """Turn an error that says that memory ran out into a UserError that names the sizes and the settings to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(out_of_memory(two_sentences(error), model, settings, compute)) from error


def out_of_memory(reason: str, model: nn.Module, settings: TrainConfig, compute: Compute) -> str:
    """Return a sentence about training steps that did not fit. `reason` is the error's message.

    The first remedies leave the optimizer step as it is.
    """
    device, world = compute.device, compute.world
    peak = f" at a peak of {torch.cuda.max_memory_allocated(device) / GIB:.1f} GiB" if device.type == "cuda" else ""
    batch_size, micro_steps = settings.share(world.size)
    remedies = ["choose a shorter model.context_length or a smaller model"]
    if world.parallel == "ddp":
        remedies.insert(0, "set parallel=fsdp")
    if settings.cuda_graphs:  # they keep the memory of a second step
        remedies.insert(0, "set train.cuda_graphs=false")
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


def memory_remarks(model: GPT2, settings: TrainConfig, compute: Compute) -> Iterator[str]:
    """Yield a warning if a step on a CPU may need more memory than is free. The system then ends it without a word.

    The estimate adds up moments and gradients, activations, and the logits of a part of the tokens with two more
    tensors of their size. For flash2 in fp32 it was 0.88 to 1.03 of three measured peaks, one for each kind of
    activation checkpointing. Attention that stores its scores needs more.
    """
    if compute.device.type != "cpu":
        return
    shape, batch_size = model.config, settings.share(compute.world.size)[0]
    tokens, kind = batch_size * shape.context_length, settings.activation_checkpointing
    need = 12 * sum(p.numel() for p in model.parameters())
    need += tokens * shape.n_embd * compute.dtype.itemsize * (STORED[kind] * shape.n_layer + WORKING[kind])
    need += 3 * 4 * shape.vocab_size * min(tokens, part_size(tokens))
    if need > (free := free_host_memory()):
        remedies = "lower train.batch_size or model.context_length, or choose a smaller model"
        yield (
            f"a step with train.batch_size={batch_size} needs about {need / GIB:.1f} GiB, and {free / GIB:.1f} GiB are "
            f"free: the system may end this run without a word; {remedies}"
        )


def free_host_memory() -> float:
    """Return the bytes that are free on the machine, or in this process's container (cgroup v2) if those are fewer.

    They are infinite on a system without /proc/meminfo.
    """
    if not MEMINFO.exists():
        return math.inf
    free = int(re.search(r"MemAvailable:\s+(\d+)", MEMINFO.read_text())[1]) * 1024
    if (CGROUP / "memory.max").exists() and (limit := (CGROUP / "memory.max").read_text().strip()) != "max":
        used = int(re.search(r"^anon (\d+)", (CGROUP / "memory.stat").read_text(), re.MULTILINE)[1])
        free = min(free, int(limit) - used)
    return free
