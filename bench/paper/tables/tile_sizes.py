"""Time and resources of flash2's plain Triton forward kernel for each tile of B_r queries by B_c keys."""

import ctypes
import statistics
from collections.abc import Iterator

import torch
from matplotlib.figure import Figure
from triton.runtime.errors import OutOfResources

from bench.attention.accuracy import Truth, WrongResult, pick, relative_error, truth_of
from bench.attention.contenders import Inputs, draw_inputs
from bench.attention.shapes import AttentionShape
from bench.common.drawing import SMALL, WIDTH, styled
from bench.common.formatting import rounded, table
from bench.common.timing import Gpu, recorded, sampler_of
from bench.paper.occupancy import WARP, resident_programs
from bench.paper.settings import PaperSettings
from kernels.common import launching as launcher
from kernels.flash2 import dispatch
from kernels.flash2.options import Options
from kernels.flash2.tiles import PlainTiles, TileConfig

TITLE = "The tile sizes of flash2's plain Triton forward kernel"
SIZES = {"full": (16, 32, 64, 128, 256), "smoke": (16, 32)}
SHAPES = {
    "full": AttentionShape("blocks", batch=4, seq_len=4096, heads=32, head_dim=64),
    "smoke": AttentionShape("blocks", batch=1, seq_len=32, heads=1, head_dim=16),
}
STAGES = 2
SAMPLES = {"full": 7, "smoke": 1}


def cells(settings: PaperSettings) -> list[dict]:
    return [{"B_r": size} for size in SIZES[settings.size]]


def measure(cell: dict, gpu: Gpu, settings: PaperSettings) -> Iterator[dict]:
    """Yield a row for each B_c. Status oom: the tile needs more shared memory than a block can have."""
    shape = SHAPES[settings.size]
    data = draw_inputs(shape, gpu.device)
    truth = truth_of(shape, data)
    words = f"{shape.batch} x {shape.heads} heads of {shape.head_dim}, {shape.seq_len:,} tokens"
    for size in SIZES[settings.size]:
        tile = TileConfig(cell["B_r"], size, warps=4 if cell["B_r"] <= 64 else 8, stages=STAGES)
        row = {"B_c": size, "warps": tile.warps, "stages": STAGES, "shape": words, "status": None, "message": None}
        with recorded([row], gpu):
            try:
                row |= measure_tile(tile, shape, data, truth, gpu, SAMPLES[settings.size])
            except OutOfResources as error:
                row.update(status="oom", message=str(error))
        yield row


def measure_tile(tile: TileConfig, shape: AttentionShape, data: Inputs, truth: Truth, gpu: Gpu, samples: int) -> dict:
    """Return time and resources of the kernel with this tile. Raise WrongResult if its error is too large."""
    options = Options(causal=shape.causal, scale=shape.head_dim**-0.5)

    def call() -> torch.Tensor:
        return dispatch.forward(*data[:3], *options, tiles=PlainTiles(tile, tile, tile))[0]

    launcher.compiled_kernels.clear()
    allowed = truth.allowed("flash2")[0]
    error = relative_error(pick(call(), shape.kv_heads, truth.pairs), truth.exact[0])
    if not error <= allowed:  # also true for NaN
        raise WrongResult(f"the error of out is {error:.1e}, above the allowed {allowed:.1e}")
    sampler, _ = sampler_of(call, gpu)
    ms = statistics.median(sampler.sample(gpu) for _ in range(samples))
    row = {"ms": ms, "tflops": shape.flops("forward") / ms / 1e9, "error": error, "status": "ok"}
    for kernel in launcher.compiled_kernels.values():  # one; none in Triton's interpreter
        shared = kernel.metadata.shared
        blocks = resident_programs(ctypes.CDLL("libcuda.so.1"), kernel.function, WARP * tile.warps, shared)
        row |= {"registers": kernel.n_regs, "spills": kernel.n_spills, "shared_bytes": shared}
        row["resident_blocks"] = blocks
    return row


def markdown(rows: list[dict]) -> str:
    """Return a line for each tile, the fastest in bold."""
    best = min((row["ms"] for row in rows if row["status"] == "ok"), default=None)
    lines = []
    for row in sorted((row for row in rows if "B_c" in row), key=lambda row: (row["B_r"], row["B_c"])):
        time = f"{row['ms']:.3f}" if row["status"] == "ok" else "does not fit" if row["status"] == "oom" else "FAILED"
        found = [str(row.get(key, "-")) for key in ("registers", "spills", "shared_bytes", "resident_blocks")]
        tflops = rounded(row["tflops"], 1) if row["status"] == "ok" else "-"
        marked = f"**{time}**" if row.get("ms") == best else time
        lines.append([str(row["B_r"]), str(row["B_c"]), str(row["warps"]), marked, tflops, *found])
    header = ["B_r", "B_c", "warps", "ms", "TFLOP/s", "registers/thread", "spills", "shared bytes/block", "blocks/SM"]
    shape = next((f"{row['shape']}, " for row in rows if row.get("shape")), "")
    return (
        f"{table(header, lines, left=0)}\n\nThe plain Triton kernel of kernels/flash2, forward, causal, {shape}bf16, "
        f"{STAGES} stages of loads. A tile does not fit if it needs more shared memory than a block can have."
    )


@styled
def pictures(rows: list[dict], device: str) -> dict[str, Figure]:
    """Draw the heatmap of times, each tile with its resources."""
    of_tile = {(row["B_r"], row["B_c"]): row for row in rows if "B_c" in row}
    heights, widths = (sorted({tile[i] for tile in of_tile}) for i in (0, 1))
    times = [[of_tile.get((m, n), {}).get("ms") or float("nan") for n in widths] for m in heights]
    figure = Figure(figsize=(WIDTH, 1.2 * len(heights) + 1.4), layout="constrained")
    axes = figure.subplots()
    if of_tile:
        image = axes.imshow(times, cmap="viridis_r", norm="log", aspect="auto")
        bar = figure.colorbar(image, label="ms", format="{x:g}")
        bar.ax.yaxis.set_minor_formatter("{x:g}")
        bar.ax.tick_params(which="both", labelsize=SMALL)
    for i, m in enumerate(heights):
        for j, n in enumerate(widths):
            box = {"fc": "white", "ec": "none", "alpha": 0.8, "pad": 3}
            axes.text(j, i, tile_text(of_tile.get((m, n))), ha="center", va="center", fontsize=SMALL, bbox=box)
    axes.set_xticks(range(len(widths)), widths)
    axes.set_yticks(range(len(heights)), heights)
    axes.set(xlabel="B_c, keys of a tile", ylabel="B_r, queries of a tile", title=f"flash2, plain Triton, {device}")
    return {"": figure}


def tile_text(row: dict | None) -> str:
    if row is None or row["status"] != "ok":
        return "" if row is None else {"oom": "does not fit"}.get(row["status"], row["status"])
    lines = [f"{row['ms']:.3f} ms"]
    if "registers" in row:
        lines += [f"{row['registers']} registers", f"{row['spills']} spills"]
        lines.append(f"{row['shared_bytes'] / 1024:.0f} KiB, {row['resident_blocks']} per SM")
    return "\n".join(lines)
