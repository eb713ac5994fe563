"""Safe softmax in three passes over a row, online softmax in two, and torch's softmax, against the row's length."""

from collections.abc import Callable, Iterator

import torch
import triton
from matplotlib.figure import Figure
from torch import Tensor

from bench.attention.accuracy import WrongResult, relative_error
from bench.common.drawing import WIDTH, styled
from bench.common.formatting import length_text, rounded, table
from bench.common.timing import Gpu, median_milliseconds
from bench.paper.settings import PaperSettings
from bench.paper.triton_kernels import online_softmax_kernel, safe_softmax_kernel

TITLE = "Softmax in three passes and in two"
SIZES = {
    "full": {"elements": 2**27, "lengths": [2**10, 2**12, 2**14, 2**16, 2**18]},
    "smoke": {"elements": 1000, "lengths": [100, 250]},
}
PASSES = {"safe": 3, "online": 2, "torch": None}
"""How often each softmax reads its input; torch does not say."""
LABELS = {"safe": "safe, 3 passes", "online": "online, 2 passes", "torch": "torch.softmax"}
COLOURS = {"safe": "#8a8a8a", "online": "#d62728", "torch": "#1f77b4"}
LARGEST_BLOCK, WARPS = 4096, 8
ALLOWED = 1e-5  # relative error; a sum of 2**18 numbers in fp32
ROUNDS = {"full": 10, "smoke": 1}


def cells(settings: PaperSettings) -> list[dict]:
    return [SIZES[settings.size]]


def softmax_by(kernel: triton.JITFunction, x: Tensor, y: Tensor) -> None:
    """Run one of the kernels on x (rows, length) fp32, and write to y."""
    rows, length = x.shape
    block = min(LARGEST_BLOCK, triton.next_power_of_2(length))
    kernel[(rows,)](x, y, length, BLOCK=block, num_warps=WARPS)


def calls_on(x: Tensor, y: Tensor) -> dict[str, Callable[[], object]]:
    """Return a call of each softmax, which writes to y."""
    return {
        "safe": lambda: softmax_by(safe_softmax_kernel, x, y),
        "online": lambda: softmax_by(online_softmax_kernel, x, y),
        "torch": lambda: torch.softmax(x, -1, out=y),
    }


def measure(cell: dict, gpu: Gpu, settings: PaperSettings) -> Iterator[dict]:
    """Yield a row for each length and softmax, timed in turn after a check against fp64."""
    for length in cell["lengths"]:
        generator = torch.Generator(gpu.device).manual_seed(0)
        x = torch.randn(cell["elements"] // length, length, generator=generator, device=gpu.device) * 4
        y, exact = torch.empty_like(x), x.double().softmax(-1)
        calls = calls_on(x, y)
        errors = {name: checked(name, call, y, exact) for name, call in calls.items()}
        del exact
        times = median_milliseconds(calls.values(), gpu, ROUNDS[settings.size])
        for name, ms in zip(calls, times, strict=True):
            row = {"length": length, "rows": len(x), "softmax": name, "passes": PASSES[name], "ms": ms}
            yield row | {"error": errors[name], "status": "ok"}


def checked(name: str, call: Callable[[], object], y: Tensor, exact: Tensor) -> float:
    """Return the relative error of a softmax that writes to y. Raise WrongResult if it is too large."""
    y.fill_(float("nan"))
    call()
    error = relative_error(y, exact)
    if not error <= ALLOWED:  # also true for NaN
        raise WrongResult(f"the error of {LABELS[name]} is {error:.1e}, above the allowed {ALLOWED:.1e}")
    return error


def gigabytes_per_second(row: dict) -> float | None:
    """Return the speed of all loads and stores: one load a pass, and one store. Caches serve some of them."""
    return row["passes"] and 4 * row["length"] * row["rows"] * (row["passes"] + 1) / row["ms"] / 1e6


def markdown(rows: list[dict]) -> str:
    found = {(row["length"], row["softmax"]): row for row in rows if row["status"] == "ok"}
    lines = []
    for length in sorted({length for length, _ in found}):
        of_length = [found.get((length, name)) for name in PASSES]
        times = [f"{row['ms']:.3f}" if row else "-" for row in of_length]
        speeds = [rounded(gigabytes_per_second(row), 0) if row else "-" for row in of_length[:2]]
        safe, online, _ = of_length
        gain = rounded(safe["ms"] / online["ms"]) if safe and online else "-"
        lines.append([f"{length:,}", f"{safe['rows']:,}" if safe else "-", *times, *speeds, gain])
    times, speeds = [f"{name}, ms" for name in LABELS.values()], ["safe, GB/s", "online, GB/s"]
    return (
        f"{table(['length', 'rows', *times, *speeds, 'safe / online'], lines, left=0)}\n\nSoftmax of fp32 rows, one "
        "Triton program for each row. GB/s counts every load and store of the passes. A GPU can exceed the speed of "
        "its HBM, because caches hold short rows from one pass to the next."
    )


@styled
def pictures(rows: list[dict], device: str) -> dict[str, Figure]:
    """Draw milliseconds against the length."""
    done = sorted((row for row in rows if row["status"] == "ok"), key=lambda row: row["length"])
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    axes = figure.subplots()
    lengths = sorted({row["length"] for row in done})
    axes.set_xscale("log", base=2)
    for name, label in LABELS.items():
        points = [(row["length"], row["ms"]) for row in done if row["softmax"] == name]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=COLOURS[name], label=label)
    axes.set_xticks(lengths, map(length_text, lengths))
    axes.set_ylim(bottom=0)
    axes.set(xlabel="length of a row", ylabel="ms", title=f"Softmax of the same number of elements, {device}")
    axes.grid(axis="y")
    axes.legend()
    return {"": figure}
