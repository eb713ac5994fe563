"""Throughput, MFU and memory over windows that contain training steps and nothing else."""

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

GIB = 2**30


@dataclass(kw_only=True)
class ThroughputMeter:
    """Times windows of training steps, without the compilation, evaluation and saving in between.

    The first window opens after the first step, which compiles. Opening and closing a window waits for the device.
    Tokens per second count all `n_devices`; TFLOP/s, MFU and `peak_flops` (FLOP/s, None if unknown) are per device.
    `waited_s` returns the seconds that the run has waited for data so far.
    """

    tokens_per_step: int
    flops_per_token: int
    flops_per_token_causal: int
    peak_flops: float | None
    device: torch.device
    waited_s: Callable[[], float]
    n_devices: int = 1
    clock: Callable[[], float] = time.perf_counter
    _opened: float | None = field(default=None, init=False)

    def step(self) -> bool:
        """Count a finished step. The first one opens the window instead, and returns True."""
        if self._opened is None:
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            self._open(self._synchronised_time())
            return True
        self._steps += 1
        return False

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Leave the time inside the context out of the window."""
        began = self._synchronised_time()
        try:
            yield
        finally:
            self._excluded_s += self._synchronised_time() - began

    def read(self) -> dict[str, float]:
        """Close the window, open the next one, and return the metrics of the closed one; {} if it holds no step.

        perf/mfu is a fraction. Peak memory counts from the first step, and on a CPU from the start of the process.
        """
        if self._opened is None:
            return {}
        now = self._synchronised_time()
        metrics = self._metrics(now - self._opened - self._excluded_s) if self._steps else {}
        self._open(now)
        return metrics

    def _open(self, now: float) -> None:
        self._opened = now
        self._steps = 0
        self._waited_before_s = self.waited_s()
        self._excluded_s = 0.0

    def _synchronised_time(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock()

    def _metrics(self, seconds: float) -> dict[str, float]:
        tokens_per_second = self._steps * self.tokens_per_step / seconds
        flops = tokens_per_second / self.n_devices * self.flops_per_token
        metrics = {
            "perf/tokens_per_second": tokens_per_second,
            "perf/step_ms": 1e3 * seconds / self._steps,
            "perf/tflops": flops / 1e12,
            "perf/tflops_causal": tokens_per_second / self.n_devices * self.flops_per_token_causal / 1e12,
            "perf/data_wait_fraction": (self.waited_s() - self._waited_before_s) / seconds,
        }
        if self.peak_flops is not None:
            metrics["perf/mfu"] = flops / self.peak_flops
        if self.device.type == "cuda":
            metrics["memory/peak_allocated_gib"] = torch.cuda.max_memory_allocated(self.device) / GIB
            metrics["memory/peak_reserved_gib"] = torch.cuda.max_memory_reserved(self.device) / GIB
        else:
            unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
            metrics["memory/peak_rss_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
        return metrics
