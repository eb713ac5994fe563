"""The GPU's own counters, such as bytes to and from HBM, which Nsight Compute's ncu reads around each kernel.

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
from bench.paper.attentions import attention_named, tiled
from kernels.flash2.tiles import TileConfig

METRICS = "dram__bytes_read.sum", "dram__bytes_write.sum"
MARK = "spin_kernel"  # the kernel of torch.cuda._sleep, which moves no bytes
Bytes = dict[tuple[str, bool, str], tuple[int, int]]
Call = tuple[AttentionShape, str, str, TileConfig | None]
"""Shape, name of the attention, pass, and the tile if it is flash2's plain forward kernel with a given tile."""
SETTINGS = ["--csv", "--profile-from-start=off", "--print-units=base", "--cache-control=none", "--clock-control=none"]


def hbm_bytes(
    attentions: Sequence[tuple[str, AttentionShape]], passes: Sequence[str], seconds: int
) -> tuple[Bytes, str | None]:
    """Return the bytes read and written by one call of each attention and pass, by (variant, causal, pass).

    Without bytes, the second result is the reason: see `counted`.
    """
    calls = list(product(attentions, passes))
    found, reason = counted([(shape, variant, pass_, None) for (variant, shape), pass_ in calls], METRICS, seconds)
    keys = [(variant, shape.causal, pass_) for (variant, shape), pass_ in calls]
    moved = [tuple(int(call[metric]) for metric in METRICS) for call in found]
    return dict(zip(keys, moved, strict=True)) if found else {}, reason


def counted(calls: Sequence[Call], metrics: Sequence[str], seconds: int) -> tuple[list[dict[str, float]], str | None]:
    """Return the metrics of each call, added up over its kernels.

    Without metrics, the second result is the reason: ncu is missing or may not read the counters, or a call failed.
    """
    if not shutil.which("ncu"):
        return [], "ncu not found"
    given = json.dumps([(asdict(shape), *call) for shape, *call in calls])
    profiled = [sys.executable, "-m", "bench.paper.hbm_counters", given, str(seconds)]
    command = ["ncu", *SETTINGS, "--metrics", ",".join(metrics), *profiled]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return [], f"ncu took more than {seconds} s"
    if ended.returncode or '\n"ID"' not in ended.stdout:
        error = re.search("==ERROR== *(.*)", ended.stdout + ended.stderr)
        return [], error[1].strip() if error else "ncu saw no kernel"
    return totals(ended.stdout, metrics), None


def totals(output: str, metrics: Sequence[str]) -> list[dict[str, float]]:
    """Return the sums of the metrics over the kernels of each call from ncu's output. MARK precedes each call."""
    calls: list[dict[str, float]] = []
    for row in csv.DictReader(line for line in output.splitlines() if line.startswith('"')):
        metric = row["Metric Name"]
        if MARK not in row["Kernel Name"]:
            calls[-1][metric] += float(row["Metric Value"].replace(",", ""))
        elif metric == metrics[0]:
            calls.append(dict.fromkeys(metrics, 0.0))
    return calls


def main() -> None:
    """Run each call once to warm up, then the mark and the call with the counters on."""
    signal.alarm(int(sys.argv[2]))  # a killed ncu does not end this process
    for sizes, variant, pass_, tile in json.loads(sys.argv[1]):
        shape, attend = AttentionShape(**sizes), tiled(TileConfig(*tile)) if tile else attention_named(variant)
        call = bind(variant, attend, shape, draw_inputs(shape, "cuda")).call(pass_)
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)  # launches the mark
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
