"""Bytes to and from HBM by the GPU's own counters, which Nsight Compute's ncu reads around each kernel.

ncu neither flushes caches nor fixes clocks, so that hits in the second-level cache do not count as HBM traffic.
"""

import csv
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product

import torch

from bench.attention.contenders import bind, draw_inputs
from bench.attention.shapes import AttentionShape
from bench.common.results import ROOT
from bench.paper.attentions import attention_named

METRICS = "dram__bytes_read.sum", "dram__bytes_write.sum"
MARK = "spin_kernel"  # the kernel of torch.cuda._sleep, which moves no bytes
Bytes = dict[tuple[str, bool, str], tuple[int, int]]
SETTINGS = ["--csv", "--profile-from-start=off", "--print-units=base", "--cache-control=none", "--clock-control=none"]


def hbm_bytes(
    attentions: Sequence[tuple[str, AttentionShape]], passes: Sequence[str], seconds: int
) -> tuple[Bytes, str | None]:
    """Return the bytes read and written by one call of each attention and pass, by (variant, causal, pass).

    Without bytes, the second result is the reason: ncu is missing or may not read the counters, or a call failed.
    """
    if not shutil.which("ncu"):
        return {}, "ncu not found"
    calls = list(product(attentions, passes))
    given = [(asdict(shape), variant, pass_) for (variant, shape), pass_ in calls]
    profiled = [sys.executable, "-m", "bench.paper.hbm_counters", json.dumps(given), str(seconds)]
    command = ["ncu", *SETTINGS, "--metrics", ",".join(METRICS), *profiled]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {}, f"ncu took more than {seconds} s"
    if ended.returncode or '\n"ID"' not in ended.stdout:
        error = re.search("==ERROR== *(.*)", ended.stdout + ended.stderr)
        return {}, error[1].strip() if error else "ncu saw no kernel"
    keys = [(variant, shape.causal, pass_) for (variant, shape), pass_ in calls]
    return dict(zip(keys, totals(ended.stdout), strict=True)), None


def totals(output: str) -> list[tuple[int, int]]:
    """Return the sums of both metrics over the kernels of each call from ncu's output. MARK precedes each call."""
    calls: list[dict[str, int]] = []
    for row in csv.DictReader(line for line in output.splitlines() if line.startswith('"')):
        metric = row["Metric Name"]
        if MARK not in row["Kernel Name"]:
            calls[-1][metric] += int(float(row["Metric Value"].replace(",", "")))
        elif metric == METRICS[0]:
            calls.append(dict.fromkeys(METRICS, 0))
    return [(call[METRICS[0]], call[METRICS[1]]) for call in calls]


def main() -> None:
    """Run each call once to warm up, then the mark and the call with the counters on."""
    signal.alarm(int(sys.argv[2]))  # a killed ncu does not end this process
    for sizes, variant, pass_ in json.loads(sys.argv[1]):
        shape = AttentionShape(**sizes)
        call = bind(variant, attention_named(variant), shape, draw_inputs(shape, "cuda")).call(pass_)
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)  # launches the mark
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
