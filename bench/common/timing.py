"""Sampling: how long a call takes on the GPU, and how many calls are compared fairly.

- Variants alternate inside one process. A round takes one sample of each, and there are many rounds, so that a clock
  that drifts drifts for all. A row is the median of its samples with their 20th and 80th percentile.
- A sample is as many calls as make about 5 ms (20 at most) between two CUDA events. The GPU spins before the first
  event, while the host queues the calls: launch cost is hidden, as it is in a training step whose host runs ahead.
- The spin lasts 1.2 times as long as the host needs for those calls, 1.5 ms at least and 50 ms at most, so that kernels
  run back to back even where a call costs the host more time than the GPU, as forward and backward of short sequences
  do. What the host needs is measured while warming up, for each variant and pass; a host slower than 50 ms a sample
  would show in the timing.
- `peak_mib` is what a call holds at most, its results included and its inputs not; for `backward` and `both` that
  includes what the forward pass saved.
"""

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from bench.attention.contenders import Contender
from bench.attention.shapes import Cell
from errors import first_line, is_of_gpu_memory

SAMPLE_MS, SAMPLE_CALLS = 5, 20  # a sample lasts so long, with at most so many calls
SLOW_MS = 20  # a sample that lasts longer is taken in fewer rounds
LEAST_SPIN_MS, MOST_SPIN_MS, MARGIN = 1.5, 50, 1.2
CYCLES_PER_MS = 2_000_000  # at 2 GHz; at a lower clock the spin lasts longer


class Gpu:
    """Time and memory on the current CUDA device. Tests put another in its place."""

    device = "cuda"

    def wake(self) -> None:
        """Makes the GPU's context current here and in autograd's thread: cuBLAS warns where it has to do so itself."""
        torch.ones((), device=self.device, requires_grad=True).exp().backward()
        torch.cuda.synchronize()

    def milliseconds(self, call: Callable[[], object], calls: int, spin_ms: float) -> float:
        """Duration of one call, from `calls` of them in a row that the host queues while the GPU spins."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(round(spin_ms * CYCLES_PER_MS))
        if calls > 1:
            call()  # the caches are then this variant's own
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls

    def host_milliseconds(self, call: Callable[[], object]) -> float:
        """Time that the host needs to queue one call: the median of three, each begun with the GPU idle."""
        times = []
        for _ in range(3):
            torch.cuda.synchronize()
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return 1000 * statistics.median(times)

    def allocated(self) -> int:
        """Bytes of tensors alive."""
        return torch.cuda.memory_allocated()

    def peak(self, call: Callable[[], object]) -> int:
        """The most bytes alive during a call."""
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated()

    def release(self) -> None:
        """Gives cached memory back to the driver, which needs some to load kernels into."""
        gc.collect()
        torch.cuda.empty_cache()


class Cpu(Gpu):
    """Time and memory on the CPU, where only what comes out matters: smoke runs of benchmarks made for a GPU."""

    device = "cpu"

    def wake(self) -> None:
        pass

    def milliseconds(self, call: Callable[[], object], calls: int, spin_ms: float) -> float:
        started = time.perf_counter()
        for _ in range(calls):
            call()
        return 1000 * (time.perf_counter() - started) / calls

    def host_milliseconds(self, call: Callable[[], object]) -> float:
        return self.milliseconds(call, 1, 0)

    def allocated(self) -> int:
        """Nothing: `peak` counts from where its call begins."""
        return 0

    def peak(self, call: Callable[[], object]) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            call()
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        sizes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
        return max(itertools.accumulate(sizes, initial=0))

    def release(self) -> None:
        gc.collect()


class Sampler(NamedTuple):
    """A call, and how samples of it are taken."""

    call: Callable[[], object]
    calls: int
    spin_ms: float

    def sample(self, gpu: Gpu) -> float:
        """Milliseconds of one call."""
        return gpu.milliseconds(self.call, self.calls, self.spin_ms)


def spin_for(calls: int, host_ms: float) -> float:
    """Milliseconds that the GPU has to spin while the host queues `calls`, and the one before that warms the caches."""
    return min(max(MARGIN * (calls + 1) * host_ms, LEAST_SPIN_MS), MOST_SPIN_MS)


def sampler_of(call: Callable[[], object], gpu: Gpu) -> tuple[Sampler, float]:
    """Settles how many calls make a sample of a call that is warm; and the milliseconds that a sample will last."""
    host_ms = gpu.host_milliseconds(call)
    ms = gpu.milliseconds(call, 2, spin_for(2, host_ms))
    calls = min(max(int(SAMPLE_MS / ms), 1), SAMPLE_CALLS)
    return Sampler(call, calls, spin_for(calls, host_ms)), ms * calls


@dataclass
class Series:
    """The samples of one row, one every `every` rounds."""

    row: dict
    sampler: Sampler
    every: int
    samples: list[float] = field(default_factory=list)


@contextmanager
def recorded(rows: Iterable[dict], gpu: Gpu) -> Iterator[None]:
    """What is raised inside becomes the status of `rows`: one kernel's failure must not end the others' run."""
    try:
        yield
        return
    except Exception as error:
        oom = is_of_gpu_memory(error)
        outcome = {"status": "oom"} if oom else {"status": "failed", "message": first_line(error)}
    for row in rows:
        row.update(outcome)
    gpu.release()


def start_series(row: dict, contender: Contender, gpu: Gpu, rounds: int) -> Series:
    """Warms a pass up, notes its memory, and settles how it is sampled."""
    before = gpu.allocated()
    call = contender.call(row["pass"])
    call()
    row["peak_mib"] = round((gpu.peak(call) - before) / 2**20, 1)
    sampler, sample_ms = sampler_of(call, gpu)
    return Series(row, sampler, every=min(math.ceil(sample_ms / SLOW_MS), max(rounds // 6, 1)))


def alternate(all_series: list[Series], cell: Cell, gpu: Gpu, rounds: int) -> None:
    """Takes the samples in turn, round after round, and completes the rows."""
    for number in range(rounds):
        for series in all_series:
            if series.row["status"] is None and number % series.every == 0:
                with recorded([series.row], gpu):
                    series.samples.append(series.sampler.sample(gpu))
    for series in all_series:
        if series.row["status"] is None:
            quantiles = torch.tensor(series.samples).quantile(torch.tensor([0.5, 0.2, 0.8])).tolist()
            series.row.update(zip(("ms", "ms_p20", "ms_p80"), quantiles, strict=True))
            series.row.update(tflops=cell.flops(series.row["pass"]) / quantiles[0] / 1e9, status="ok")
