"""flash2's plain Triton forward kernel over its tiles B_r x B_c: time, and what of a multiprocessor they take."""

import ctypes
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from matplotlib.figure import Figure
from triton.runtime.errors import OutOfResources

from bench.attention.accuracy import Truth, WrongResult, pick, relative_error, truth_of
from bench.attention.contenders import Data, draw
from bench.attention.shapes import Cell
from bench.common.timing import Gpu, recorded, sampler_of
from bench.paper.config import PaperConfig
from bench.paper.text import table
from kernels.common import launching as launcher
from kernels.flash2 import launch
from kernels.flash2.options import Options
from kernels.flash2.tiles import Tile, Tiles

TITLE = "The tile sizes of flash2's plain Triton forward kernel"
SIZES = {"full": (16, 32, 64, 128, 256), "smoke": (16, 32)}
SHAPES = {
    "full": Cell("blocks", batch=4, seq_len=4096, heads=32, head_dim=64),
    "smoke": Cell("blocks", batch=1, seq_len=32, heads=1, head_dim=16),
}
STAGES = 2
SAMPLES = {"full": 7, "smoke": 1}


def cells(config: PaperConfig) -> list[dict]:
    """A row of the heatmap: a B_r with every B_c."""
    return [{"B_r": size} for size in SIZES[config.size]]


def measure(cell: dict, gpu: Gpu, config: PaperConfig) -> Iterator[dict]:
    """A row for each B_c. What does not fit into a multiprocessor is out of memory: of its shared memory."""
    shape = SHAPES[config.size]
    data = draw(shape, gpu.device)
    truth = truth_of(shape, data)
    for size in SIZES[config.size]:
        tile = Tile(cell["B_r"], size, warps=4 if cell["B_r"] <= 64 else 8, stages=STAGES)
        row = {"B_c": size, "warps": tile.warps, "stages": STAGES, "shape": told(shape)}
        row |= {"status": None, "message": None}
        with recorded([row], gpu):
            try:
                row |= measure_tile(tile, shape, data, truth, gpu, SAMPLES[config.size])
            except OutOfResources as error:
                row.update(status="oom", message=str(error))
        yield row


def told(shape: Cell) -> str:
    """A shape in words."""
    return f"{shape.batch} x {shape.heads} heads of {shape.head_dim}, {shape.seq_len:,} tokens"


def measure_tile(tile: Tile, shape: Cell, data: Data, truth: Truth, gpu: Gpu, samples: int) -> dict:
    """Time and resources of the kernel with this tile.

    Raises:
        WrongResult: it is off by more than the reference allows.
    """
    options = Options(causal=shape.causal, scale=shape.head_dim**-0.5)

    def call() -> torch.Tensor:
        return launch.forward(*data[:3], *options, tiles=Tiles(tile, tile, tile))[0]

    launcher.compiled_kernels.clear()
    allowed = truth.allowed("flash2")[0]
    error = relative_error(pick(call(), shape.kv_heads, truth.pairs), truth.exact[0])
    if not error <= allowed:  # NaN is wrong too
        raise WrongResult(f"out is off by {error:.1e}, where {allowed:.1e} is allowed")
    sampler, _ = sampler_of(call, gpu)
    ms = statistics.median(sampler.sample(gpu) for _ in range(samples))
    kernels = list(launcher.compiled_kernels.values())  # none in Triton's interpreter
    found = resources(kernels[0], tile.warps) if kernels else {}
    return {"ms": ms, "tflops": shape.flops("forward") / ms / 1e9, "error": error, "status": "ok", **found}


def resources(kernel: Any, warps: int) -> dict:
    """Registers a thread, spills, bytes of shared memory a block, and the blocks a multiprocessor holds at once."""
    shared = kernel.metadata.shared
    resident = resident_blocks(ctypes.CDLL("libcuda.so.1"), kernel.function, 32 * warps, shared)
    return {"registers": kernel.n_regs, "spills": kernel.n_spills, "shared_bytes": shared, "resident_blocks": resident}


def resident_blocks(driver: ctypes.CDLL, function: int, threads: int, shared: int) -> int:
    """What the driver's occupancy calculation says.

    Raises:
        RuntimeError: the driver refuses.
    """
    blocks = ctypes.c_int()
    arguments = ctypes.c_void_p(function), ctypes.c_int(threads), ctypes.c_size_t(shared)
    status = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(ctypes.byref(blocks), *arguments)
    if status:
        raise RuntimeError(f"cuOccupancyMaxActiveBlocksPerMultiprocessor returned {status}")
    return blocks.value


def markdown(rows: list[dict]) -> str:
    """A line for each tile, the fastest in bold."""
    best = min((row["ms"] for row in rows if row["status"] == "ok"), default=None)
    lines = []
    for row in sorted((row for row in rows if "B_c" in row), key=lambda row: (row["B_r"], row["B_c"])):
        time = f"{row['ms']:.3f}" if row["status"] == "ok" else "does not fit" if row["status"] == "oom" else "FAILED"
        found = [str(row.get(key, "-")) for key in ("registers", "spills", "shared_bytes", "resident_blocks")]
        tflops = f"{row['tflops']:.1f}" if row["status"] == "ok" else "-"
        marked = f"**{time}**" if row.get("ms") == best else time
        lines.append([str(row["B_r"]), str(row["B_c"]), str(row["warps"]), marked, tflops, *found])
    header = (
        "B_r",
        "B_c",
        "warps",
        "ms",
        "TFLOP/s",
        "registers a thread",
        "spills",
        "shared bytes a block",
        "blocks an SM",
    )
    shape = next((f"{row['shape']}, " for row in rows if row.get("shape")), "")
    return (
        f"{table(header, lines, left=0)}\n\nThe plain Triton kernel of kernels/flash2, which Hopper has another for, "
        f"forward, causal, {shape}bf16, {STAGES} stages of loads; each tile was first held to the fp64 reference. "
        "Blocks an SM are those that a multiprocessor holds at once, by the driver's occupancy calculation. A tile "
        "does not fit where it needs more shared memory than a block can have. A dash is what an interpreted kernel "
        "does not have."
    )


def pictures(rows: list[dict], where: str) -> dict[str, Figure]:
    """The heatmap of times, each tile with its resources."""
    of_tile = {(row["B_r"], row["B_c"]): row for row in rows if "B_c" in row}
    heights, widths = (sorted({tile[i] for tile in of_tile}) for i in (0, 1))
    times = [[of_tile.get((m, n), {}).get("ms") or float("nan") for n in widths] for m in heights]
    figure = Figure(figsize=(1.8 * len(widths) + 2, 1.3 * len(heights) + 1.4), layout="constrained")
    axes = figure.subplots()
    if of_tile:
        image = axes.imshow(times, cmap="viridis_r", norm="log", aspect="auto")
        figure.colorbar(image, label="ms")
    for i, m in enumerate(heights):
        for j, n in enumerate(widths):
            text = {"ha": "center", "va": "center", "fontsize": 8, "bbox": {"fc": "white", "ec": "none", "alpha": 0.75}}
            axes.text(j, i, tile_text(of_tile.get((m, n))), **text)
    axes.set_xticks(range(len(widths)), widths)
    axes.set_yticks(range(len(heights)), heights)
    axes.set(xlabel="B_c, keys of a tile", ylabel="B_r, queries of a tile", title=f"flash2, plain Triton, {where}")
    return {"": figure}


def tile_text(row: dict | None) -> str:
    """What a cell of the heatmap says."""
    if row is None or row["status"] != "ok":
        return "" if row is None else {"oom": "does not fit"}.get(row["status"], row["status"])
    if "registers" not in row:
        return f"{row['ms']:.3f} ms"
    return (
        f"{row['ms']:.3f} ms\n{row['registers']} registers, {row['spills']} spills\n"
        f"{row['shared_bytes'] / 1024:.0f} KiB, {row['resident_blocks']} an SM"
    )
