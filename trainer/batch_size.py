"""train.batch_size=auto: find the largest micro-batch that fits into the GPU's memory by trial steps.

The trials use models of their own, and leave neither memory nor random numbers behind. The run that follows is
therefore the same, bit for bit, as with the number on the command line.
"""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from errors import UserError, is_of_gpu_memory
from trainer.build import build_model, compile_model, is_compiled
from trainer.config import AUTO, BOUNDS, TrainConfig
from trainer.distributed.world import ALONE
from trainer.optimizer import build_optimizer
from trainer.precision import Compute
from trainer.state import TrainState, random_state, set_random_state

MEMORY_SHARE = 0.95
"""Share of the free memory that a trial may take. The rest is for evaluation, NCCL and fragmentation. With
train.cuda_graphs=true, a trial may take half of it, because graphs keep their memory and evaluation needs its own."""
FIRST = 8  # sequences of the first trial
LARGEST = BOUNDS["batch_size"][1]
# At most 8 sizes between two powers of two: 1, 2, ..., 15, 16, 18, ..., 30, 32, 36, ...
SIZES = [*range(1, 8), *(n << e for e in range(LARGEST.bit_length() - 4) for n in range(8, 16)), LARGEST]


def check_batch_size(settings: TrainConfig, compute: Compute) -> None:
    """Refuse a global batch that the processes cannot share, and train.batch_size=auto if trials are impossible."""
    if settings.batch_size != AUTO:
        settings.share(compute.world.size)
    elif compute.device.type != "cuda":
        raise UserError("train.batch_size=auto needs a GPU; set a number")
    elif compute.world.is_sharded:
        raise UserError(
            f"train.batch_size=auto does not work with parallel={compute.world.parallel}, because a process that runs "
            "out of memory leaves the others waiting; set a number"
        )
    else:
        candidates(settings, compute.world.size)


def with_batch_size(config: Any, compute: Compute, train_step: Callable, micro_step: Callable) -> TrainConfig:
    """Return config.train with the largest batch_size that fits in all processes, if it is auto.

    `config` is the whole conf.schema.Config, because train_step and micro_step, the functions of train.py, take it.
    """
    settings = config.train
    if settings.batch_size != AUTO:
        return settings
    world = compute.world
    numbers, trials = candidates(settings, world.size), []

    def fits(size: int) -> bool:
        trials.append(size)
        trial = trial_settings(settings, size, numbers[size], compute)
        alone = replace(compute, world=ALONE)  # in a collective, a process would wait for one that is out of memory
        of_trial = replace(config, train=trial)
        does_fit = is_in_memory(lambda: take_trial_steps(of_trial, alone, train_step, micro_step))
        free_memory(is_compiled(settings, compute))
        return not world.largest(0 if does_fit else 1)

    before = random_state()
    with limited_memory(settings):
        size = largest_fitting(list(numbers), fits)
    set_random_state(before)
    if size is None:
        raise UserError(nothing_fits(settings, numbers[min(numbers)]))
    if world.is_first:
        print(f"train.batch_size=auto: train.batch_size={numbers[size]} after trials of {', '.join(map(str, trials))}")
    return replace(settings, batch_size=numbers[size])


def candidates(settings: TrainConfig, processes: int) -> dict[int, int]:
    """Return the values of train.batch_size to choose from, by the rising size of a device's micro-batch.

    With train.global_batch_size, they divide it. If no value is possible, raise the UserError of the smallest.
    """
    whole = settings.global_batch_size
    unit = processes // math.gcd(processes, settings.grad_accumulation or 1)  # so that the processes share a step
    sizes = SIZES if whole is None else [n for n in range(1, min(whole, LARGEST) + 1) if whole % n == 0]
    found = {}
    for number in sizes if whole else [unit * size for size in sizes]:
        with suppress(UserError):
            found.setdefault(replace(settings, batch_size=number).share(processes)[0], number)
    if not found:
        replace(settings, batch_size=1 if whole else unit).share(processes)
    return dict(sorted(found.items()))


def largest_fitting(sizes: list[int], fits: Callable[[int], bool]) -> int | None:
    """Return the largest of the rising `sizes` that fits, or None: double until one does not fit, then bisect."""
    low, high = -1, len(sizes)  # all up to `low` fit, none from `high` on
    wanted = FIRST
    while low < high - 1:
        place = next((i for i, size in enumerate(sizes) if size >= wanted), len(sizes) - 1)
        if not low < place < high:
            break
        if not fits(sizes[place]):
            high = place
            break
        low, wanted = place, 2 * sizes[place]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(sizes[middle]) else (low, middle)
    return sizes[low] if low >= 0 else None


def trial_settings(settings: TrainConfig, size: int, number: int, compute: Compute) -> TrainConfig:
    """Return the settings of a trial with micro-batches of `size`, for a run with train.batch_size=number.

    Two micro-steps show the peak of any number, because the second one runs beside gradients. With ddp, the gradients
    stay in memory from step to step, so even a single micro-step runs beside them.
    """
    _, micro_steps = replace(settings, batch_size=number).share(compute.world.size)
    accumulation = 2 if compute.world.parallel == "ddp" else min(2, micro_steps)
    return replace(settings, batch_size=size, grad_accumulation=accumulation, global_batch_size=None)


def take_trial_steps(config: Any, compute: Compute, train_step: Callable, micro_step: Callable) -> None:
    """Take two optimizer steps on random tokens, with a new model. The moments exist only after the first one."""
    shape, options = config.model, {"document_mask": config.data.document_mask, "is_resumed": True}
    model = build_model(shape, config.attention, config.train, compute, **options)
    batches = RandomBatches((2, config.train.batch_size, shape.context_length), shape.vocab_size, compute.device)
    optimizer = build_optimizer(model, config.optimizer)
    state = TrainState(model, optimizer, compute.grad_scaler(), batches, tokenizer="")
    compiled = compile_model(model, config.train, compute)
    step = partial(micro_step, compiled, state, config, compute)
    for _ in range(2):
        train_step(compiled, step, state, config, compute)


@dataclass
class RandomBatches:
    """In place of a TrainLoader: random inputs and targets of `shape` (2, B, T)."""

    shape: tuple[int, int, int]
    vocab_size: int
    device: torch.device

    def next_batches(self, count: int) -> list[tuple[Tensor, Tensor]]:
        return [tuple(torch.randint(self.vocab_size, self.shape, device=self.device)) for _ in range(count)]


def is_in_memory(act: Callable[[], None]) -> bool:
    """Call `act`. Return False if it ran out of GPU memory."""
    try:
        act()
    except RuntimeError as error:
        if not is_of_gpu_memory(error):
            raise
        return False
    return True


def free_memory(compiled: bool) -> None:
    """Free the memory of a trial. The next model is compiled for its own shape alone, not for any shape."""
    if compiled:
        torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def limited_memory(settings: TrainConfig) -> Iterator[None]:
    """Limit torch to the part of this GPU's free memory that MEMORY_SHARE states."""
    free, total = torch.cuda.mem_get_info()
    share = MEMORY_SHARE / 2 if settings.cuda_graphs else MEMORY_SHARE
    torch.cuda.set_per_process_memory_fraction(share * (free + torch.cuda.memory_reserved()) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.reset_peak_memory_stats()


def nothing_fits(settings: TrainConfig, smallest: int) -> str:
    """Return the sentence for a GPU without the memory for the smallest micro-batch."""
    remedies = ["a shorter model.context_length or a smaller model"]
    if settings.activation_checkpointing != "full":
        remedies.insert(0, "train.activation_checkpointing=full")
    if settings.cuda_graphs:
        remedies.insert(0, "train.cuda_graphs=false")
    return f"train.batch_size=auto: not even train.batch_size={smallest} fits on this GPU; set {', or '.join(remedies)}"
