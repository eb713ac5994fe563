"""train.batch_size=auto: find the largest micro-batch that fits into the GPU's memory by trial steps.

The trials use models of their own, and leave neither memory nor random numbers behind. The run that follows is
therefore the same, bit for bit, as with the number on the command line.
"""

import gc
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from errors import UserError, is_out_of_gpu_memory
from trainer.build import build_model, compile_model, is_compiled
from trainer.config import AUTO, BOUNDS, TrainConfig
from trainer.distributed.world import ALONE, World
from trainer.meters import GIB
from trainer.optimizer import build_optimizer
from trainer.precision import Compute
from trainer.state import TrainState, random_state, set_random_state

MEMORY_SHARE = 0.95
"""Share of the free memory that a trial may take. The rest is for evaluation, NCCL and fragmentation. With
train.cuda_graphs=true, a trial may take half of it, because graphs keep their memory and evaluation needs its own."""
FIRST = 4  # sequences of the first trial
GROWTH = 32  # A trial is at most 32 times the largest size that fits, because errors of the line grow with distance.
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
    world, compiled = compute.world, is_compiled(settings, compute)
    numbers, trials = candidates(settings, world.size), []
    alone = replace(compute, world=ALONE)  # in a collective, a process would wait for one that is out of memory

    def peak(size: int, limit: int) -> int | None:
        trials.append(size)
        of_trial = replace(config, train=trial_settings(settings, size, numbers[size], compute))
        taken = measured_peak(lambda: take_trial_steps(of_trial, alone, train_step, micro_step))
        free_memory(compiled)
        taken = world.largest(limit + 1 if taken is None else taken)  # all processes must choose the same next trial
        say(world, described_trial(size, taken, limit))
        return taken if taken <= limit else None

    if compiled:
        say(world, "each trial compiles the model first")
    before = random_state()
    with limited_memory(settings, world) as limit:
        size = largest_fitting(list(numbers), partial(peak, limit=limit), limit)
    set_random_state(before)
    if size is None:
        raise UserError(nothing_fits(settings, numbers[min(numbers)]))
    say(world, f"train.batch_size={numbers[size]} after trials of {', '.join(map(str, trials))}")
    return replace(settings, batch_size=numbers[size])


def say(world: World, text: str) -> None:
    """Print what the search does, at once and in one process."""
    if world.is_first:
        print(f"train.batch_size=auto: {text}", flush=True)


def described_trial(size: int, taken: int, limit: int) -> str:
    """Return the line that tells the result of a trial, which did not fit if `taken` exceeds `limit`."""
    of_all = f"{limit / GIB:.1f} GiB"
    if taken > limit:
        return f"a micro-batch of {size} does not fit in {of_all}"
    return f"a micro-batch of {size} takes {taken / GIB:.1f} of {of_all}"


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


def largest_fitting(sizes: list[int], peak: Callable[[int], int | None], limit: int) -> int | None:
    """Return the largest of the rising `sizes` that fits in `limit` bytes, or None if nothing fits.

    `peak` takes a trial and returns its peak memory in bytes, or None if it does not fit.
    """
    fitted, failed = [], []  # (place in `sizes`, bytes) of the trials that fit, and places of the others
    place = place_from(sizes, FIRST)
    while place is not None:
        taken = peak(sizes[place])
        if taken is None:
            failed.append(place)
        else:
            fitted.append((place, taken))
        place = next_place(sizes, fitted, failed, limit)
    return sizes[fitted[-1][0]] if fitted else None


def next_place(sizes: list[int], fitted: list[tuple[int, int]], failed: list[int], limit: int) -> int | None:
    """Return the place in `sizes` of the next trial, or None if no larger size can fit.

    Bisect until two sizes fit. Then follow their line, but stay below the sizes that do not fit: by one place, and if
    the line is wrong again and again, by 2, 4, ... places.
    """
    low, high = fitted[-1][0] if fitted else -1, failed[-1] if failed else len(sizes)
    middle = (low + high) // 2
    if len(fitted) == 1 and not failed:
        place = place_from(sizes, 2 * sizes[low])
    elif len(fitted) < 2:
        place = middle
    else:
        below = max(middle, high - 2 ** max(0, len(failed) - 1))
        place = min(below, place_on_line(sizes, fitted, limit))
    return place if place > low else None


def place_on_line(sizes: list[int], fitted: list[tuple[int, int]], limit: int) -> int:
    """Return the place of the largest size under `limit`, by the line through the last two trials that fit.

    Peak memory is a constant plus a multiple of the micro-batch, except for rounding and fragmentation.
    """
    (size, less), (larger, more) = ((sizes[place], taken) for place, taken in fitted[-2:])
    farthest = place_from(sizes, GROWTH * larger)
    if more <= less:
        return farthest
    largest = larger + (limit - more) * (larger - size) // (more - less)
    return min(farthest, bisect_right(sizes, largest) - 1)


def place_from(sizes: list[int], wanted: int) -> int:
    """Return the place of the first size that is at least `wanted`, or of the last one."""
    return min(bisect_left(sizes, wanted), len(sizes) - 1)


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
    shape = config.model
    model = build_model(shape, config.attention, config.train, compute, config.data.document_mask)
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


def measured_peak(act: Callable[[], None]) -> int | None:
    """Call `act` and return its peak of GPU memory in bytes, or None if it ran out of GPU memory."""
    torch.cuda.reset_peak_memory_stats()
    try:
        act()
    except RuntimeError as error:
        if not is_out_of_gpu_memory(error):
            raise
        return None
    return torch.cuda.max_memory_allocated()


def free_memory(compiled: bool) -> None:
    """Free the memory of a trial. The next model is compiled for its own shape alone, not for any shape."""
    if compiled:
        torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def limited_memory(settings: TrainConfig, world: World) -> Iterator[int]:
    """Limit torch to the part of the GPU's free memory that MEMORY_SHARE states, and yield it in bytes.

    All processes take the smallest limit.
    """
    free, total = torch.cuda.mem_get_info()
    share = MEMORY_SHARE / 2 if settings.cuda_graphs else MEMORY_SHARE
    limit = -world.largest(-int(share * (free + torch.cuda.memory_reserved())))
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        yield limit
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
