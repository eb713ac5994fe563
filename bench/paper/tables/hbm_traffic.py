"""Bytes to and from HBM: the papers' formulas, the loads and stores of our kernels, and the GPU's counters.

A second measurement shows the traffic of L2 against the queries of a tile, in flash2's plain forward kernel.
Without a mask, except for block_sparse and local, which are causal, and for flash2, which is measured both ways.
"""

from collections.abc import Iterator

import torch
from matplotlib.figure import Figure

from bench.attention.accuracy import truth_of
from bench.attention.contenders import draw_inputs
from bench.attention.measurement import measure_shape
from bench.attention.shapes import AttentionShape
from bench.common.drawing import WIDTH, styled
from bench.common.formatting import rounded, table, value_text
from bench.common.timing import Gpu
from bench.paper.attentions import attention_named
from bench.paper.byte_counts import (
    PASSES,
    SPARSE,
    flash,
    is_fused,
    kernel_traffic,
    products,
    seen_by,
    share_of,
    standard,
)
from bench.paper.hbm_counters import counted, hbm_bytes
from bench.paper.settings import PaperSettings
from bench.paper.tables.tile_sizes import measure_tile
from kernels.common.launching import arch_of
from kernels.flash2.block_lists import BLOCK
from kernels.flash2.tiles import TileConfig

TITLE = "Bytes to and from HBM"
DENSE = "naive", "fused_softmax", "flash1", "sdpa_flash", "flash2"
CAUSAL = "flash2", *SPARSE  # a window is only defined under a causal mask
HEAD_DIM = 64
# Batch, heads, length. The first shape is from FlashAttention's figure 2: GPT-2 medium's heads, batch 64.
SIZES = {"full": ((64, 16, 1024), (16, 16, 4096)), "smoke": ((1, 1, 32),)}
ROUNDS = {"full": 10, "smoke": 1}
TYPICAL_M = 100 * 1024  # bytes: FlashAttention's typical on-chip memory, used without a GPU
# B_r, B_c and the shape.
TILES = {
    "full": ((16, 32, 64, 128, 256), 64, {"batch": 4, "heads": 32, "seq_len": 4096}),
    "smoke": ((16, 32), 16, {"batch": 1, "heads": 1, "seq_len": 64}),
}
L2_BYTES = "lts__t_bytes.sum"
LAW = "8 N^2 d^2 / M with M = 4 B_r d"
GREY, OURS, COUNTED = "#8a8a8a", "#d62728", "#1f77b4"
COUNTS = "paper_bytes", "counted_bytes", "read_bytes", "written_bytes"


def cells(settings: PaperSettings) -> list[dict]:
    shapes = [dict(zip(("batch", "heads", "seq_len"), shape, strict=True)) for shape in SIZES[settings.size]]
    return [{"measured": "attentions", **shape} for shape in shapes] + [{"measured": "tiles"}]


def measure(cell: dict, gpu: Gpu, settings: PaperSettings) -> Iterator[dict]:
    """Yield the rows of a cell: attentions of one shape, or tiles of flash2's plain forward kernel."""
    if cell["measured"] == "tiles":
        yield from measure_tiles(gpu, settings)
    else:
        yield from measure_attentions({key: cell[key] for key in ("batch", "heads", "seq_len")}, gpu, settings)


def measure_attentions(sizes: dict, gpu: Gpu, settings: PaperSettings) -> Iterator[dict]:
    """Yield a row for each attention and pass: time, after a check against fp64, and the counts of bytes and FLOPs."""
    on_gpu, n, heads = gpu.device == "cuda", sizes["seq_len"], sizes["batch"] * sizes["heads"]
    arch = arch_of(torch.device("cuda")) if on_gpu else "sm_90"
    m = torch.cuda.get_device_properties().shared_memory_per_multiprocessor if on_gpu else TYPICAL_M
    full, causal = (AttentionShape("io", **sizes, head_dim=HEAD_DIM, causal=masked) for masked in (False, True))
    pairs = [*((name, full) for name in DENSE), *((name, causal) for name in CAUSAL)]
    by_gpu, reason = hbm_bytes(pairs, PASSES, settings.timeout_s // 2)
    # Attentions without a mask are timed in turn, each causal one alone.
    for shape, names in ((full, DENSE), *((causal, (name,)) for name in CAUSAL)):
        attentions = {name: attention_named(name) for name in names}
        seen = seen_by(names[0], n) if names[0] in SPARSE else None
        for row in measure_shape(shape, attentions, gpu, ROUNDS[settings.size], seen):
            variant, masked, pass_ = row["variant"], row["causal"], row["pass"]
            if pass_ not in PASSES:
                continue
            share = share_of(variant, n, BLOCK, BLOCK) if masked else 1.0
            paper = standard(n, HEAD_DIM) if variant in ("naive", "fused_softmax") else flash(n, HEAD_DIM, m, share)
            ours = kernel_traffic(variant, masked, n, HEAD_DIM, arch)
            counts = {"paper_bytes": heads * paper[pass_], "counted_bytes": heads * ours[pass_] if ours else None}
            fused = is_fused(variant, n, HEAD_DIM, arch, masked)
            counts["gflops"] = heads * share * products(variant, pass_, fused) * 2 * n * n * HEAD_DIM / 1e9
            row["tflops"] = None if variant in SPARSE else row["tflops"]  # it counts all pairs
            read, written = by_gpu.get((variant, masked, pass_), (None, None))
            counts |= {"read_bytes": read, "written_bytes": written, "not_measured": reason}
            yield row | counts | {"share": share, "sram_bytes": m}


def measure_tiles(gpu: Gpu, settings: PaperSettings) -> Iterator[dict]:
    """Yield a row for each B_r without a mask: time, after a check against fp64, and the bytes between L2 and chip."""
    queries, keys, sizes = TILES[settings.size]
    shape = AttentionShape("io", **sizes, head_dim=HEAD_DIM, causal=False)
    data = draw_inputs(shape, gpu.device)
    truth = truth_of(shape, data)
    tiles = [TileConfig(size, keys, warps=4 if size <= 64 else 8, stages=2) for size in queries]
    rows = [measure_tile(tile, shape, data, truth, gpu, ROUNDS[settings.size]) for tile in tiles]
    calls = [(shape, "triton", "forward", tile) for tile in tiles]
    found, reason = counted(calls, [L2_BYTES], settings.timeout_s // 2)
    for i, (tile, row) in enumerate(zip(tiles, rows, strict=True)):
        computed = row.pop("computed")["cached"]
        counts = {"l2_computed": computed, "l2_bytes": found[i][L2_BYTES] if found else None, "not_measured": reason}
        yield {"B_r": tile.queries, "B_c": keys, **sizes, **row, **counts}


def law(row: dict) -> float:
    """Return FlashAttention's N^2 d^2 / M in bytes, times 8, for all heads of a row.

    A tile of B_r keys or queries takes a quarter of M, as in the paper: M = 4 B_r d elements. Each tile of queries
    reads K and V, so the kernel reads 2 N d (N / B_r) = 8 N^2 d^2 / M elements, and once Q.
    """
    n, elements = row["seq_len"], 4 * row["B_r"] * HEAD_DIM
    return row["batch"] * row["heads"] * 2 * 8 * (n * HEAD_DIM) ** 2 / elements


def markdown(rows: list[dict]) -> str:
    counted_rows, lines = [row for row in rows if "paper_bytes" in row], []
    for row in sorted(counted_rows, key=lambda row: (row["seq_len"], -row["batch"], row["pass"] == "backward")):
        name = f"`{row['variant']}`{', causal' if row['causal'] else ''}"
        shape = f"{row['batch']} x {row['heads']} x {row['seq_len']:,}"
        gflops = rounded(row["gflops"], 0) if "gflops" in row else "-"
        counts = ["-" if row[key] is None else rounded(row[key] / 1e9) for key in COUNTS]
        time = value_text(row, "ms", "{:.3f}".format)
        lines.append([name, row["pass"], shape, f"{row['share']:.1%}", gflops, *counts, time])
    gb = "paper, GB", "loads and stores, GB", "read, GB", "written, GB"
    header = ["attention", "pass", "batch x heads x length", "blocks", "GFLOPs", *gb, "ms"]
    m = next((f"M = {row['sram_bytes'] / 1024:.0f} KiB" for row in counted_rows), "M bytes")
    note = (
        f"GB: 10^9 bytes; heads of {HEAD_DIM} in bf16. Blocks: the computed share of blocks of {BLOCK} x {BLOCK}. "
        "GFLOPs: the matrix products of these blocks, including what the backward pass computes again. Paper: the "
        f"formulas of standard attention and of FlashAttention with {m} of shared memory. Loads and stores: all of our "
        "kernels at their tiles, without caches (bench/paper/byte_counts.py). Read and written: the GPU's counters of "
        f"HBM{unread(counted_rows)}."
    )
    return "\n\n".join([table(header, lines, left=3), note, *tiles_markdown(rows)])


def unread(rows: list[dict]) -> str:
    """Return why counters were not read, in parentheses, or nothing."""
    reasons = ", ".join(dict.fromkeys(row["not_measured"] for row in rows if row["not_measured"]))
    return f" (not measured: {reasons})" if reasons else ""


def of_tiles(rows: list[dict]) -> list[dict]:
    return sorted((row for row in rows if "l2_computed" in row and row["status"] == "ok"), key=lambda row: row["B_r"])


def tiles_markdown(rows: list[dict]) -> list[str]:
    """Return the table of L2's traffic against B_r and its note, or nothing without such rows."""
    tiles, lines = of_tiles(rows), []
    for row in tiles:
        counts = ["-" if x is None else rounded(x / 1e9) for x in (law(row), row["l2_computed"], row["l2_bytes"])]
        lines.append([str(row["B_r"]), *counts, f"{row['ms']:.3f}"])
    if not tiles:
        return []
    header = ["B_r", "8 N^2 d^2 / M, GB", "loads and stores, GB", "L2's counter, GB", "ms"]
    shape = "{batch} x {heads} heads, {seq_len:,} tokens".format(**tiles[0])
    note = (
        f"Traffic between L2 and the multiprocessors in flash2's plain forward kernel, B_c = {tiles[0]['B_c']}, no "
        f"mask, {shape}. M = 4 B_r d elements. L2's counter: all bytes that L2 moves{unread(tiles)}."
    )
    return [table(header, lines, left=0), note]


@styled
def pictures(rows: list[dict], device: str) -> dict[str, Figure]:
    """Draw the traffic of L2 against 1 / B_r, with the paper's law as a line."""
    tiles = of_tiles(rows)
    if not tiles:
        return {}
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    axes = figure.subplots()
    inverse = [1 / row["B_r"] for row in tiles]
    axes.plot([0, *inverse[::-1]], [0, *(law(row) / 1e9 for row in tiles[::-1])], "--", color=GREY, label=LAW)
    axes.plot(inverse, [row["l2_computed"] / 1e9 for row in tiles], "o", color=OURS, label="loads and stores, computed")
    if all(row["l2_bytes"] for row in tiles):
        axes.plot(inverse, [row["l2_bytes"] / 1e9 for row in tiles], "s", color=COUNTED, label="L2's counter")
    axes.set_xticks(inverse, [f"1/{row['B_r']}" for row in tiles])
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="1 / B_r", ylabel="GB", title=f"L2 traffic of flash2's plain forward kernel, {device}")
    axes.grid(axis="y")
    axes.legend()
    return {"": figure}
