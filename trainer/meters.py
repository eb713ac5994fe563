"""Throughput, MFU and memory over windows that hold training steps and nothing else."""

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

GIB = 2**30
RESET_PEAK = Path("/proc/self/clear_refs")  # to which 5 is written: man 5 proc


class ThroughputMeter:
    """Times windows of training steps, without the compilation, evaluation and saving in between.

        meter.start()  # after the first step, which compiles
        for each step:
            ...
            meter.step(data_wait_s)
            with meter.excluded():
                ...  # evaluate, save
            if it is time to log:
                metrics |= meter.read()

    `step` never waits for the device: a host that ran ahead is caught up with in `start`, `excluded` and `read`.

    `tokens_per_step` counts the tokens of all `n_devices`. Tokens per second are those of the whole run; TFLOP/s and
    MFU are per device, as in the papers. `peak_flops` is one device's peak in FLOP/s, None where it is not known.
    `clock` returns seconds.
    """

    def __init__(
        self,
        *,
        tokens_per_step: int,
        flops_per_token: int,
        flops_per_token_causal: int,
        peak_flops: float | None,
        device: torch.device | str,
        n_devices: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.tokens_per_step = tokens_per_step
        self.flops_per_token = flops_per_token
        self.flops_per_token_causal = flops_per_token_causal
        self.peak_flops = peak_flops
        self.device = torch.device(device)
        self.n_devices = n_devices
        self._clock = clock
        self._opened: float | None = None  # None: no window is open
        self._paused = False

    def start(self) -> None:
        """Opens a window, throwing away one that is open, and counts peak memory from here on."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif RESET_PEAK.exists():  # on Linux; elsewhere it is of the process since it began, of all jobs of a sweep
            RESET_PEAK.write_text("5")
        self._open(self._synchronised_time())

    def step(self, data_wait_s: float) -> None:
        """Counts one finished step, whose host waited `data_wait_s` seconds for its batches."""
        assert self._opened is not None, "start() opens the first window"
        self._steps += 1
        self._data_wait_s += data_wait_s

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Takes what happens inside out of the window; inside another `excluded`, or with no window open, no more."""
        if self._opened is None or self._paused:
            yield
            return
        began = self._synchronised_time()
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
            self._excluded_s += self._synchronised_time() - began

    def read(self) -> dict[str, float]:
        """Closes the window, opens the next and returns the metrics of the closed one; {} if it holds no step.

        perf/tokens_per_second, perf/step_ms, perf/tflops, perf/tflops_causal, perf/mfu (a fraction, only with a known
        peak), perf/data_wait_fraction, and the peak of memory: memory/peak_allocated_gib and memory/peak_reserved_gib
        on CUDA, memory/peak_rss_gib elsewhere, since `start`; but on other systems than Linux since the process began.
        """
        assert not self._paused, "read() inside excluded() would cut the window in the middle of what it leaves out"
        now = self._synchronised_time()
        metrics = {}
        if self._opened is not None and self._steps > 0:
            metrics = self._throughput(now - self._opened - self._excluded_s) | self._memory()
        self._open(now)
        return metrics

    def _open(self, now: float) -> None:
        self._opened = now
        self._steps = 0
        self._data_wait_s = 0.0
        self._excluded_s = 0.0

    def _synchronised_time(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._clock()

    def _throughput(self, seconds: float) -> dict[str, float]:
        tokens_per_second = self._steps * self.tokens_per_step / seconds
        flops = tokens_per_second / self.n_devices * self.flops_per_token
        metrics = {
            "perf/tokens_per_second": tokens_per_second,
            "perf/step_ms": 1e3 * seconds / self._steps,
            "perf/tflops": flops / 1e12,
            "perf/tflops_causal": tokens_per_second / self.n_devices * self.flops_per_token_causal / 1e12,
            "perf/data_wait_fraction": self._data_wait_s / seconds,
        }
        if self.peak_flops is not None:
            metrics["perf/mfu"] = flops / self.peak_flops
        return metrics

    def _memory(self) -> dict[str, float]:
        if self.device.type == "cuda":
            return {
                "memory/peak_allocated_gib": torch.cuda.max_memory_allocated(self.device) / GIB,
                "memory/peak_reserved_gib": torch.cuda.max_memory_reserved(self.device) / GIB,
            }
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"memory/peak_rss_gib": rss * (1 if sys.platform == "darwin" else 1024) / GIB}  # macOS counts bytes
