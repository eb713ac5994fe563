"""Bytes to and from HBM: the papers' formulas, the loads and stores of our kernels, and the GPU's counters.

Without a mask, except for block_sparse and local, which are causal, and for flash2, which is measured both ways.
"""

from collections.abc import Iterator

import torch

from bench.attention.measurement import measure_shape
from bench.attention.shapes import AttentionShape
from bench.common.formatting import rounded, table, value_text
from bench.common.timing import Gpu
from bench.paper.attentions import attention_named
from bench.paper.byte_counts import PASSES, SPARSE, flash, kernel_traffic, seen_by, share_of, standard
from bench.paper.hbm_counters import hbm_bytes
from bench.paper.settings import PaperSettings
from kernels.flash2.block_lists import BLOCK

TITLE = "Bytes to and from HBM"
DENSE = "naive", "fused_softmax", "flash1", "sdpa_flash", "flash2"
CAUSAL = "flash2", *SPARSE  # a window is only defined under a causal mask
HEAD_DIM = 64
# Batch, heads, length. The first shape is from FlashAttention's figure 2: GPT-2 medium's heads, batch 64.
SIZES = {"full": ((64, 16, 1024), (16, 16, 4096)), "smoke": ((1, 1, 32),)}
ROUNDS = {"full": 10, "smoke": 1}
TYPICAL_M = 100 * 1024  # bytes: FlashAttention's typical on-chip memory, used without a GPU
COUNTS = "paper_bytes", "counted_bytes", "read_bytes", "written_bytes"


def cells(settings: PaperSettings) -> list[dict]:
    return [dict(zip(("batch", "heads", "seq_len"), shape, strict=True)) for shape in SIZES[settings.size]]


def measure(cell: dict, gpu: Gpu, settings: PaperSettings) -> Iterator[dict]:
    """Yield a row for each attention and pass: time, after a check against fp64, and the counts of bytes."""
    on_gpu, n, heads = gpu.device == "cuda", cell["seq_len"], cell["batch"] * cell["heads"]
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability()) if on_gpu else "sm_90"
    m = torch.cuda.get_device_properties().shared_memory_per_multiprocessor if on_gpu else TYPICAL_M
    full, causal = (AttentionShape("io", **cell, head_dim=HEAD_DIM, causal=masked) for masked in (False, True))
    pairs = [*((name, full) for name in DENSE), *((name, causal) for name in CAUSAL)]
    by_gpu, reason = hbm_bytes(pairs, PASSES, settings.timeout_s // 2)
    # Attentions without a mask are timed in alternation, each causal one alone.
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
            row["tflops"] = None if variant in SPARSE else row["tflops"]  # it counts all pairs
            read, written = by_gpu.get((variant, masked, pass_), (None, None))
            counts |= {"read_bytes": read, "written_bytes": written, "not_measured": reason}
            yield row | counts | {"share": share, "sram_bytes": m}


def markdown(rows: list[dict]) -> str:
    counted, lines = [row for row in rows if "paper_bytes" in row], []
    for row in sorted(counted, key=lambda row: (row["seq_len"], -row["batch"], row["pass"] == "backward")):
        name = f"`{row['variant']}`{', causal' if row['causal'] else ''}"
        shape = f"{row['batch']} x {row['heads']} x {row['seq_len']:,}"
        counts = ["-" if row[key] is None else rounded(row[key] / 1e9) for key in COUNTS]
        time = value_text(row, "ms", "{:.3f}".format)
        lines.append([name, row["pass"], shape, f"{row['share']:.1%}", *counts, time])
    gb = "paper, GB", "loads and stores, GB", "read, GB", "written, GB"
    header = ["attention", "pass", "batch x heads x length", "blocks", *gb, "ms"]
    reasons = ", ".join(dict.fromkeys(row["not_measured"] for row in counted if row["not_measured"]))
    m = next((f"M = {row['sram_bytes'] / 1024:.0f} KiB" for row in counted), "M bytes")
    return (
        f"{table(header, lines, left=3)}\n\nGB: 10^9 bytes; heads of {HEAD_DIM} in bf16. Blocks: the computed share of "
        f"blocks of {BLOCK} x {BLOCK}. Paper: the formulas of standard attention and of FlashAttention with {m} of "
        "shared memory. Loads and stores: all of our kernels at their tiles, without caches "
        "(bench/paper/byte_counts.py). Read and written: the GPU's counters of HBM"
        f"{f' (not measured: {reasons})' if reasons else ''}."
    )
