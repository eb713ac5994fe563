"""The GPU's own counters, such as bytes to and from HBM, which Nsight Compute's ncu reads around each kernel.

ncu does not flush caches, so hits in the second-level cache do not count as HBM traffic. It does not fix clocks.
"""

import csv
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain, product

import torch

from bench.attention.contenders import bind, draw_inputs
from bench.attention.shapes import AttentionShape
from bench.common.results import ROOT
from bench.paper.attentions import tiled
from bench.paper.ladder_steps import call_of
from kernels.flash2.tiles import TileConfig

METRICS = "dram__bytes_read.sum", "dram__bytes_write.sum"
MARK = "spin_kernel"  # the kernel of torch.cuda._sleep, which moves no bytes
Metrics = dict[str, float]
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

    Without metrics, the second result is the reason: see `profiled`, or ncu does not know a metric.
    """
    found, reason = profiled(calls, metrics, seconds)
    kernels = list(chain.from_iterable(found))
    if unknown := [metric for metric in metrics if not all(metric in kernel for kernel in kernels)]:
        return [], f"ncu has no {unknown[0]}"
    return [{metric: sum(kernel[metric] for kernel in call) for metric in metrics} for call in found], reason


def profiled(calls: Sequence[Call], metrics: Sequence[str], seconds: int) -> tuple[list[list[Metrics]], str | None]:
    """Return the metrics of each kernel of each call. A metric that ncu does not know is left out.

    Without kernels, the second result is the reason: ncu is missing or may not read the counters, or a call failed.
    """
    if not shutil.which("ncu"):
        return [], "ncu not found"
    given = json.dumps([(asdict(shape), *call) for shape, *call in calls])
    program = [sys.executable, "-m", "bench.paper.hbm_counters", given, str(seconds)]
    command = ["ncu", *SETTINGS, "--metrics", ",".join(metrics), *program]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return [], f"ncu took more than {seconds} s"
    if not ended.returncode and '\n"ID"' in ended.stdout:
        return kernels_of(ended.stdout), None
    error = re.search("==ERROR== *(.*)", ended.stdout + ended.stderr)
    reason = error[1].strip() if error else "ncu saw no kernel"
    known = [metric for metric in metrics if metric.split(".")[0] not in reason]
    if "Failed to find metric" in reason and 0 < len(known) < len(metrics):
        return profiled(calls, known, seconds)
    return [], reason


def kernels_of(output: str) -> list[list[Metrics]]:
    """Return the kernels of each call from ncu's output. MARK precedes each call."""
    calls: list[list[Metrics]] = []
    last = None
    for row in csv.DictReader(line for line in output.splitlines() if line.startswith('"')):
        is_mark = MARK in row["Kernel Name"]
        if row["ID"] != last:
            last = row["ID"]
            (calls if is_mark else calls[-1]).append([] if is_mark else {})
        if not is_mark:
            with suppress(ValueError):  # the value of a metric that the GPU does not have is (!) n/a
                calls[-1][-1][row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    return calls


def main() -> None:
    """Run each call once to warm up, then the mark and the call with the counters on."""
    signal.alarm(int(sys.argv[2]))  # a killed ncu does not end this process
    for sizes, variant, pass_, tile in json.loads(sys.argv[1]):
        shape = AttentionShape(**sizes)
        inputs = draw_inputs(shape, "cuda")
        if tile:
            call = bind(variant, tiled(TileConfig(*tile)), shape, inputs).call(pass_)
        else:
            call = call_of(variant, pass_, shape, inputs)
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)  # launches the mark
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
