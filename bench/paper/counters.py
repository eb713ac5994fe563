"""Bytes to and from HBM by the GPU's own counters, which Nsight Compute's ncu reads around each kernel.

Caches and clocks are left as a run finds them, so that what the second level cache spares is not counted.
"""

import csv
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import product

import torch

from bench.attention.contenders import bind, draw
from bench.attention.shapes import Cell
from bench.common.results import ROOT
from bench.paper.config import PaperConfig
from bench.paper.variants import attend

METRICS = "dram__bytes_read.sum", "dram__bytes_write.sum"
MARK = "spin_kernel"  # torch.cuda._sleep's, which moves nothing
Bytes = dict[tuple[str, bool, str], tuple[int, int]]
SETTINGS = ["--csv", "--profile-from-start=off", "--print-units=base", "--cache-control=none", "--clock-control=none"]


class NotMeasured(Exception):
    """Why the counters could not be read."""


def hbm_bytes(attentions: Sequence[tuple[str, Cell]], passes: Sequence[str], seconds: int) -> Bytes:
    """Bytes read and written by one call of each variant, on its shape, and pass, by (variant, causal, pass).

    Raises:
        NotMeasured: ncu is not there, or may not read the counters, or a call failed.
    """
    if not shutil.which("ncu"):
        raise NotMeasured("ncu not found")
    calls = list(product(attentions, passes))
    given = [(asdict(shape), variant, pass_) for (variant, shape), pass_ in calls]
    profiled = [sys.executable, "-m", "bench.paper.counters", json.dumps(given), str(time.time() + seconds)]
    command = ["ncu", *SETTINGS, "--metrics", ",".join(METRICS), *profiled]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise NotMeasured(f"ncu took more than {seconds} s") from None
    if ended.returncode:
        raise NotMeasured(reason(ended.stdout + ended.stderr))
    keys = [(variant, shape.causal, pass_) for (variant, shape), pass_ in calls]
    return dict(zip(keys, totals(ended.stdout), strict=True))


def totals(output: str) -> list[tuple[int, int]]:
    """The sums of both metrics over all kernels of each call, of what ncu printed; MARK comes before each call.

    Raises:
        NotMeasured: it holds none.
    """
    lines = output.splitlines()
    if not any(line.startswith('"ID"') for line in lines):
        raise NotMeasured(reason(output))
    calls: list[dict[str, int]] = []
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        metric = row["Metric Name"]
        if MARK not in row["Kernel Name"]:
            calls[-1][metric] += int(float(row["Metric Value"].replace(",", "")))
        elif metric == METRICS[0]:
            calls.append(dict.fromkeys(METRICS, 0))
    return [(call[METRICS[0]], call[METRICS[1]]) for call in calls]


def reason(output: str) -> str:
    """Why ncu measured nothing, as it says."""
    error = next((line for line in output.splitlines() if "==ERROR==" in line), "ncu saw no kernel")
    return error.replace("==ERROR==", "").strip()


def profile(call: Callable[[], object]) -> None:
    """Runs a warm call while the counters are on, after the mark."""
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    torch.cuda._sleep(1)
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def main() -> None:
    # ncu, when it is killed, leaves this process to itself.
    signal.alarm(max(1, int(float(sys.argv[2]) - time.time())))
    for sizes, variant, pass_ in json.loads(sys.argv[1]):
        shape = Cell(**sizes)
        profile(bind(variant, attend(variant, PaperConfig()), shape, draw(shape, "cuda")).call(pass_))


if __name__ == "__main__":
    main()
