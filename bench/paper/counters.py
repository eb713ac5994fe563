"""Bytes to and from HBM by the GPU's own counters, which Nsight Compute's ncu reads around each kernel.

Caches and clocks are left as a run finds them, so that what the second level cache spares is not counted.
"""

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Callable

import torch

from bench.cells import Cell
from bench.environment import ROOT
from bench.paper.config import PaperConfig
from bench.paper.variants import attend
from bench.variants import bind, draw

METRICS = "dram__bytes_read.sum", "dram__bytes_write.sum"
SETTINGS = ["--csv", "--profile-from-start=off", "--print-units=base", "--cache-control=none", "--clock-control=none"]


class NotMeasured(Exception):
    """Why the counters could not be read."""


def hbm_bytes(variant: str, shape: dict, pass_: str, seconds: int) -> tuple[int, int]:
    """Bytes read and written by one call of an attention.

    Raises:
        NotMeasured: ncu is not there, or may not read the counters, or the call failed.
    """
    if not shutil.which("ncu"):
        raise NotMeasured("ncu not found")
    profiled = [sys.executable, "-m", "bench.paper.counters", json.dumps([variant, shape, pass_])]
    command = ["ncu", *SETTINGS, "--metrics", ",".join(METRICS), *profiled]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise NotMeasured(f"ncu took more than {seconds} s") from None
    return totals(ended.stdout)


def totals(output: str) -> tuple[int, int]:
    """The sums of both metrics over all kernels of what ncu printed.

    Raises:
        NotMeasured: it holds none.
    """
    lines = output.splitlines()
    if not any(line.startswith('"ID"') for line in lines):
        error = next((line for line in lines if "==ERROR==" in line), "ncu saw no kernel")
        raise NotMeasured(error.replace("==ERROR==", "").strip())
    rows = list(csv.DictReader(line for line in lines if line.startswith('"')))
    read, written = (
        sum(int(float(row["Metric Value"].replace(",", ""))) for row in rows if row["Metric Name"] == metric)
        for metric in METRICS
    )
    return read, written


def profile(call: Callable[[], object]) -> None:
    """Runs a warm call while the counters are on."""
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def main() -> None:
    variant, sizes, pass_ = json.loads(sys.argv[1])
    shape = Cell(**sizes)
    profile(bind(variant, attend(variant, PaperConfig()), shape, draw(shape, "cuda")).call(pass_))


if __name__ == "__main__":
    main()
