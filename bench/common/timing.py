"""Time and memory of calls on a GPU.

- A sample is about 5 ms of calls between two CUDA events. It has at most 20 calls, and the host can queue them during
  a spin.
- The GPU spins before the first event while the host queues the calls. This hides launch cost, as in a training step
  whose host runs ahead of the GPU. The spin lasts 1.2 times the host's time during warm-up.
- If the spin ends before the last call is queued, the sample is taken again with a longer spin. No spin exceeds 50 ms.
- Compared variants take their samples in turn, in changing orders. So neither a drifting clock nor the variant before
  favours one of them.
"""

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from errors import first_line, is_out_of_gpu_memory

T = TypeVar("T")
SAMPLE_MS, SAMPLE_CALLS = 5, 20
LEAST_SPIN_MS, MOST_SPIN_MS, MARGIN = 1.5, 50, 1.2
CYCLES_PER_MS = 2_000_000  # at 2 GHz; at a lower clock the spin lasts longer


class Gpu:
    """Time and memory on the current CUDA device. Tests replace this class."""

    device = "cuda"

    def wake(self) -> None:
        """Create the context of the GPU and cuBLAS's workspaces, in this thread and in autograd's.

        Otherwise cuBLAS creates the context and warns, and the first measured memory contains the workspaces.
        """
        x = torch.ones((1, 1), device=self.device, requires_grad=True)
        (x @ x).backward()
        torch.cuda.synchronize()

    def milliseconds(self, call: Callable[[], object], calls: int, spin_ms: float) -> float:
        """Return the duration of one of `calls` calls, which the host queues while the GPU spins.

        If the host was late, repeat this with twice the spin, up to MOST_SPIN_MS. Without a spin, the host's time
        counts.
        """
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(round(spin_ms * CYCLES_PER_MS))
        if calls > 1:
            call()  # fill the caches with this variant's data
        start.record()
        for _ in range(calls):
            call()
        was_late = start.query()  # the GPU began before the last call was queued, so the GPU may have waited
        end.record()
        end.synchronize()
        if was_late and 0 < spin_ms < MOST_SPIN_MS:
            return self.milliseconds(call, calls, min(2 * spin_ms, MOST_SPIN_MS))
        return start.elapsed_time(end) / calls

    def host_milliseconds(self, call: Callable[[], object]) -> float:
        """Return the time the host needs to queue one call: the median of three, each started with an idle GPU."""
        times = []
        for _ in range(3):
            torch.cuda.synchronize()
            times.append(Cpu().milliseconds(call, 1, 0))
        return statistics.median(times)

    def allocated(self) -> int:
        """Return the bytes of all live tensors."""
        return torch.cuda.memory_allocated()

    def peak(self, call: Callable[[], object]) -> int:
        """Return the largest number of live bytes during a call."""
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated()

    def added_peak(self, call: Callable[[], object]) -> int:
        """Return the largest number of bytes that a call adds to the bytes that were live before the call."""
        call()  # allocates what later calls reuse, such as workspaces
        self.wake()  # autograd's thread holds the gradients of that call until it gets this next task
        self.release()  # only the garbage collector frees some objects, for example after compilation
        before = self.allocated()
        return self.peak(call) - before

    def release(self) -> None:
        """Return cached memory to the driver, which needs memory to load kernels."""
        gc.collect()
        torch.cuda.empty_cache()


class Cpu(Gpu):
    """Time and memory on the CPU, for smoke runs of benchmarks made for a GPU. Its times are not meaningful."""

    device = "cpu"

    def wake(self) -> None:
        pass

    def milliseconds(self, call: Callable[[], object], calls: int, spin_ms: float) -> float:
        started = time.perf_counter()
        for _ in range(calls):
            call()
        return 1000 * (time.perf_counter() - started) / calls

    def host_milliseconds(self, call: Callable[[], object]) -> float:
        """Return 0, because nothing is queued."""
        return 0

    def allocated(self) -> int:
        """Return 0, because `peak` counts from the start of its call."""
        return 0

    def peak(self, call: Callable[[], object]) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            call()
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        sizes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
        return max(itertools.accumulate(sizes, initial=0))

    def release(self) -> None:
        """Do nothing: a collection of garbage takes longer than a call."""


class Sampler(NamedTuple):
    """A call, how many calls make a sample, and how long the GPU spins before them."""

    call: Callable[[], object]
    calls: int
    spin_ms: float

    def sample(self, gpu: Gpu) -> float:
        """Return the milliseconds of one call."""
        return gpu.milliseconds(*self)


def spin_for(calls: int, host_ms: float) -> float:
    """Return the milliseconds of spinning that let the host queue `calls` calls and one more to fill the caches."""
    return min(max(MARGIN * (calls + 1) * host_ms, LEAST_SPIN_MS), MOST_SPIN_MS)


def sampler_of(call: Callable[[], object], gpu: Gpu) -> tuple[Sampler, float]:
    """Return the sampler of a call that is warm, and the milliseconds that a sample will take."""
    host_ms = gpu.host_milliseconds(call)
    ms = gpu.milliseconds(call, 2, spin_for(2, host_ms))
    most = int(MOST_SPIN_MS / (MARGIN * host_ms)) - 1 if host_ms else SAMPLE_CALLS  # one call more fills the caches
    calls = max(min(int(SAMPLE_MS / ms), SAMPLE_CALLS, most), 1)
    return Sampler(call, calls, spin_for(calls, host_ms)), ms * calls


def in_turn(variants: Sequence[T], rounds: int) -> Iterator[T]:
    """Yield each variant once in each round.

    At its power limit, a GPU lowers its clock during a heavy kernel. In a fixed order, the variant after the heaviest
    one could always have the lowest clock. In 2 n rounds of n variants, each variant is therefore equally often at each
    place. Each variant also comes equally often directly after each other variant.

    Source: Williams, "Experimental designs balanced for the estimation of residual effects of treatments" (1949).
    """
    n = len(variants)
    places = [place // 2 + 1 if place % 2 else -(place // 2) for place in range(n)]  # 0, 1, -1, 2, -2, ...
    for round_ in range(rounds):
        order = [variants[(place + round_ // 2) % n] for place in places]
        yield from reversed(order) if round_ % 2 else order


def balanced(rounds: int, variants: int) -> int:
    """Return `rounds`, rounded up so that the orders of in_turn are balanced. A single round stays one."""
    step = 2 * variants if variants > 1 and rounds > 1 else 1
    return -(-rounds // step) * step


def median_milliseconds(calls: Iterable[Callable[[], object]], gpu: Gpu, rounds: int) -> list[float]:
    """Return the median milliseconds of each call. The calls are sampled in turn, in at least `rounds` rounds."""
    samplers = []
    for call in calls:
        call()
        samplers.append(sampler_of(call, gpu)[0])
    samples = [[] for _ in samplers]
    for place in in_turn(range(len(samplers)), balanced(rounds, len(samplers))):
        samples[place].append(samplers[place].sample(gpu))
    return [statistics.median(times) for times in samples]


@contextmanager
def recorded(rows: Iterable[dict], gpu: Gpu) -> Iterator[None]:
    """Turn an exception of the body into the status of `rows`, so that one kernel's failure does not end the run."""
    try:
        yield
        return
    except Exception as error:
        oom = is_out_of_gpu_memory(error)
        outcome = {"status": "oom"} if oom else {"status": "failed", "message": first_line(error)}
    for row in rows:
        row.update(outcome)
    gpu.release()  # outside of the handler, because the exception holds tensors
