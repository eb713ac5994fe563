"""Bytes to and from HBM: the papers' formulas, what our kernels load and store, and what the counters say.

The papers count what an algorithm moves between HBM and an on-chip memory of M bytes (FlashAttention, theorem 2 and
theorem 5). The second count is of the code here: every load and store of its kernels at the tiles they run with, read
by read, as if no cache were between. Caches are: what many programs read at about the same time comes from HBM once, so
that the counters may say less. Without dropout, and without a mask but for block_sparse and local, which are causal,
and flash2 once more beside them.

Everything is of one head: n tokens, d its size; 2 bytes an element. Statistics, and what is kept in fp32, are 4 bytes
in the count of the code, while the papers count elements alone. Of the n^2 pairs causal attentions compute only some: a
`share` of them by tiles, those that have a pair that is seen.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from math import ceil

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from torch import Tensor

from bench.attention.program import measure as measure_attention
from bench.attention.shapes import Cell
from bench.common.timing import Gpu
from bench.paper.config import PaperConfig
from bench.paper.counters import NotMeasured, hbm_bytes
from bench.paper.text import table, told_alone
from bench.paper.variants import attend, settings
from kernels.flash1.launch import tiles_for as flash1_tiles
from kernels.flash2.block_lists import BLOCK, listed
from kernels.flash2.tiles import Tile, Tiles, length_bucket, specialised_for, tiles_for
from model.attention import read_pattern

TITLE = "Bytes to and from HBM"
DENSE = "naive", "fused_softmax", "flash1", "sdpa_flash", "flash2"
SPARSE = "block_sparse", "local"  # under a causal mask, without which a window is not defined
CAUSAL = "flash2", *SPARSE
PASSES = "forward", "backward"
HEAD_DIM = 64
# FlashAttention's figure 2 has the first: GPT-2 medium's heads at a batch of 64.
SIZES = {"full": ((64, 16, 1024), (16, 16, 4096)), "smoke": ((1, 1, 64),)}  # batch, heads, length
ROUNDS = {"full": 10, "smoke": 1}
TYPICAL_M = 100 * 1024  # bytes: what FlashAttention takes for typical, where there is no GPU to ask
Bytes = dict[str, int]


def standard(n: int, d: int) -> Bytes:
    """FlashAttention's algorithm 0 and its backward, algorithm 3: every line reads its operands and writes its result.

    Forward S = QK^T, P = softmax(S), O = PV. Backward dV = P^T dO, dP = dO V^T, dS of P and dP, dQ = dS K,
    dK = dS^T Q. It is what fused_softmax does.
    """
    forward = (2 * n * d + n * n) + (2 * n * n) + (n * n + 2 * n * d)
    product = n * n + 2 * n * d
    backward = 2 * product + 3 * n * n + 2 * product
    return {"forward": 2 * forward, "backward": 2 * backward}


def flash(n: int, d: int, m: int, share: float = 1.0) -> Bytes:
    """FlashAttention's algorithms 1 and 4 with an on-chip memory of m bytes: B_c = ceil(M / 4d), M in elements.

    For each of T_c = ceil(n / B_c) tiles of keys, all of Q, O, l and m are read, and O, l and m written; K and V are
    read once. Backward, for each all of Q, O, dO, dQ, l and m are read, and dQ written; dK and dV are written once.
    Where only a share of the blocks is not zero, so much of what is of a tile of keys: proposition 4.
    """
    key_tiles = ceil(n / ceil(m / 2 / (4 * d)))
    forward = 2 * n * d + share * key_tiles * (3 * n * d + 4 * n)
    backward = 4 * n * d + share * key_tiles * (5 * n * d + 2 * n)
    return {"forward": round(2 * forward), "backward": round(2 * backward)}


def naive_moves(n: int, d: int) -> Bytes:
    """kernels/naive/definition.py, where S and dP are fp32 and each elementwise operation is a kernel of its own.

    Forward, in bytes for each of n^2: S 4; times scale 8; softmax 8; to bf16 6; read by P V 2. For each of n d: Q, K
    and V 6, O in fp32 4, times 1 / keep 8, to bf16 6. Backward for n^2: P read by dV 2; dP 4; P dP 10; its sum 4;
    dP - sum 8; times P 10; times scale 8; to bf16 6; dS read by dQ and dK 4. For n d: dV 2 + 4 + 8 + 6; dP 4; dQ and
    dK 4 each.
    """
    return {"forward": 28 * n * n + 24 * n * d, "backward": 56 * n * n + 32 * n * d}


def flash1_moves(n: int, d: int, keys: int, backward_keys: int) -> Bytes:
    """kernels/flash1 with so many keys in a tile: algorithms 1 and 4, with O and dQ summed up in HBM in fp32.

    Forward O, l and m are filled first. K and V are read once; for each tile of keys Q is read, and O, l and m are read
    and written. At last O is read and rounded. Backward likewise dQ is filled; for each tile of keys Q, dO, O, l and m
    are read, and dQ read and written; dK and dV are written once; dQ is rounded.
    """
    row, stats = 2 * n * d, 4 * n
    forward = 2 * row + 2 * stats + 2 * row + ceil(n / keys) * (row + 4 * row + 4 * stats) + 3 * row
    backward = 2 * row + 2 * row + ceil(n / backward_keys) * (3 * row + 2 * stats + 4 * row) + 2 * row + 3 * row
    return {"forward": forward, "backward": backward}


def flash1_keys(d: int) -> tuple[int, int]:
    """Keys of a tile of flash1's kernels, forward and backward."""
    forward, backward = flash1_tiles(d, torch.bfloat16)
    return forward.n, backward.n


def flash2_moves(n: int, d: int, arch: str, causal: bool) -> Bytes:
    """kernels/flash2 at the tiles it runs with, Hopper's where they are; a causal mask skips tiles without a seen pair.

    Forward, each of ceil(n / B_r) programs reads its part of Q and all of K and V, and writes its part of O and the
    logsumexp. Backward by the plain kernels: O and dO give delta; each of ceil(n / B_c) programs reads its part of K
    and V and all of Q, dO and both statistics for dK and dV; each of ceil(n / B_r) its part of Q and dO and all of K
    and V for dQ. The kernel of Hopper adds dQ up in fp32 instead: zeroed, for each key tile read and written, and
    at last read and rounded.
    """
    row, stats, bucket = 2 * n * d, 4 * n, length_bucket(n)
    share = partial(share_of, "flash2", n) if causal else lambda m, n: 1.0
    tiles = tiles_for(arch, d, torch.bfloat16, causal, bucket)
    forward, fused = (specialised_for(x, d, causal, bucket) if arch == "sm_90" else None for x in PASSES)
    if forward:
        tiles = tiles._replace(forward=Tile(forward.queries, forward.n, 4 * forward.consumers, forward.stages))
    plain = plain_moves(n, d, tiles, share)
    if not fused:
        return plain
    prepare = 2 * row + stats + 2 * stats + 2 * row  # O, dO, logsumexp; both statistics and zeros in fp32
    key_tiles = share(fused.m, fused.n) * ceil(n / fused.n)
    backward = prepare + 4 * row + key_tiles * (2 * row + 2 * stats + 4 * row) + 3 * row
    return plain | {"backward": round(backward)}


def plain_moves(n: int, d: int, tiles: Tiles, share: Callable[[int, int], float]) -> Bytes:
    """flash2's plain kernels where of the tiles of so many queries by so many keys a share is computed."""
    row, stats = 2 * n * d, 4 * n
    of_forward, of_keys, of_queries = (share(tile.m, tile.n) for tile in tiles)
    forward = of_forward * ceil(n / tiles.forward.m) * 2 * row + 2 * row + stats
    key_gradient = of_keys * ceil(n / tiles.key_gradient.n) * (2 * row + 2 * stats) + 4 * row
    query_gradient = of_queries * ceil(n / tiles.query_gradient.m) * 2 * row + 3 * row + 2 * stats
    backward = 2 * row + stats + key_gradient + query_gradient
    return {"forward": round(forward), "backward": round(backward)}


@cache
def seen_by(variant: str, n: int) -> Tensor:
    """(n, n) boolean: the keys that each query of a causal attention sees, as conf/attention has it."""
    config, i = settings(variant), torch.arange(n)
    seen = i[:, None] >= i
    if variant == "block_sparse":
        seen &= read_pattern(config.pattern, n)[i[:, None] // BLOCK, i // BLOCK]
    elif variant == "local":
        seen &= i[:, None] - i < config.window
    return seen


def share_of(variant: str, n: int, tile_m: int, tile_n: int) -> float:
    """Of all tiles those that a causal attention computes: block_sparse by its blocks, whatever the tiles are."""
    m, k = (BLOCK, BLOCK) if variant == "block_sparse" else (tile_m, tile_n)
    tiles = torch.zeros(ceil(n / m), ceil(n / k))
    queries, keys = seen_by(variant, n).nonzero(as_tuple=True)
    tiles[queries // m, keys // k] = 1
    return tiles.mean().item()


def sparse_moves(variant: str, n: int, d: int, arch: str) -> Bytes:
    """block_sparse and local, which the plain kernels compute everywhere.

    Of a list of keys' blocks in several rows each reads K and V, and writes dK and dV in fp32, which are read again.
    """
    tiles = tiles_for(arch, d, torch.bfloat16, True, length_bucket(n))
    moved = plain_moves(n, d, tiles, partial(share_of, variant, n))
    if variant == "block_sparse":
        pattern = read_pattern(settings(variant).pattern, n)
        of_keys = listed(pattern, causal=True, documents=False, ragged=n % BLOCK != 0).lists[len(pattern) :]
        pieces, more = int((of_keys[:, 1] != 1).sum()), len(of_keys) - len(pattern)
        moved["backward"] += (pieces * 16 + more * 4) * BLOCK * d
    return moved


def moves(variant: str, causal: bool, n: int, d: int, arch: str) -> Bytes | None:
    """What our code loads and stores; None of torch's."""
    counts = {
        "naive": lambda: naive_moves(n, d),
        "fused_softmax": lambda: standard(n, d),
        "flash1": lambda: flash1_moves(n, d, *flash1_keys(d)),
        "flash2": lambda: flash2_moves(n, d, arch, causal),
        **{name: partial(sparse_moves, name, n, d, arch) for name in SPARSE},
    }
    return counts[variant]() if variant in counts else None


def cells(config: PaperConfig) -> list[dict]:
    """A shape."""
    return [dict(zip(("batch", "heads", "seq_len"), shape, strict=True)) for shape in SIZES[config.size]]


def measure(cell: dict, gpu: Gpu, config: PaperConfig) -> Iterator[dict]:
    """A row for each attention and pass: time, in turn and after a check against fp64, and the counts of bytes."""
    on_gpu, n, rows = gpu.device == "cuda", cell["seq_len"], cell["batch"] * cell["heads"]
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability()) if on_gpu else "sm_90"
    m = torch.cuda.get_device_properties().shared_memory_per_multiprocessor if on_gpu else TYPICAL_M
    full, causal = (Cell("io", **cell, head_dim=HEAD_DIM, causal=masked) for masked in (False, True))
    counted_by_gpu = counters([*((name, full) for name in DENSE), *((name, causal) for name in CAUSAL)], config)
    for row in timed(full, causal, gpu, config):
        variant, masked, pass_ = row["variant"], row["causal"], row["pass"]
        if pass_ in PASSES:
            share = share_of(variant, n, BLOCK, BLOCK) if masked else 1.0
            paper = standard(n, HEAD_DIM) if variant in ("naive", "fused_softmax") else flash(n, HEAD_DIM, m, share)
            counted = moves(variant, masked, n, HEAD_DIM, arch)
            counts = {"paper_bytes": rows * paper[pass_], "counted_bytes": rows * counted[pass_] if counted else None}
            row["tflops"] = None if variant in SPARSE else row["tflops"]  # it counts all pairs
            yield row | counts | {"share": share, "sram_bytes": m} | counted_by_gpu(variant, masked, pass_)


def timed(full: Cell, causal: Cell, gpu: Gpu, config: PaperConfig) -> Iterator[dict]:
    """The rows of bench.attention: of those that see all keys together, and of each causal one alone."""
    for shape, names in ((full, DENSE), *((causal, (name,)) for name in CAUSAL)):
        attentions = {name: attend(name, config) for name in names}
        seen = seen_by(names[0], shape.seq_len) if names[0] in SPARSE else None
        yield from measure_attention(shape, attentions, gpu, ROUNDS[config.size], seen)


def counters(attentions: list[tuple[str, Cell]], config: PaperConfig) -> Callable[[str, bool, str], dict]:
    """What the counters say of an attention, causal or not, and a pass, or why they say nothing."""
    try:
        measured, reason = hbm_bytes(attentions, PASSES, config.timeout_s // 2), None
    except NotMeasured as error:
        measured, reason = {}, str(error)

    def of(variant: str, causal: bool, pass_: str) -> dict:
        read, written = measured.get((variant, causal, pass_), (None, None))
        return {"read_bytes": read, "written_bytes": written, "not_measured": reason}

    return of


def label(row: dict, quote: str = "") -> str:
    """What table and picture call the row's attention."""
    return f"{quote}{row['variant']}{quote}{', causal' if row['causal'] else ''}"


def markdown(rows: list[dict]) -> str:
    """GB by each count, beside the time."""
    lines = []
    counted = [row for row in rows if "paper_bytes" in row]
    for row in sorted(counted, key=lambda row: (row["seq_len"], -row["batch"], row["pass"] == "backward")):
        time = f"{row['ms']:.3f}" if row["status"] == "ok" else row["status"].upper()
        counts = [gigabytes(row[key]) for key in ("paper_bytes", "counted_bytes", "read_bytes", "written_bytes")]
        lines.append(
            [label(row, "`"), row["pass"], f"{row['batch']} x {row['heads']} x {row['seq_len']:,}", *counts, time]
        )
    header = (
        "attention",
        "pass",
        "batch x heads x length",
        "paper, GB",
        "loads and stores, GB",
        "read, GB",
        "written, GB",
        "ms",
    )
    reasons = ", ".join(dict.fromkeys(row["not_measured"] for row in counted if row["not_measured"]))
    unmeasured = f" (not measured: {reasons})" if reasons else ""
    m = next((f"M = {row['sram_bytes'] / 1024:.0f} KiB" for row in counted), "")
    return (
        f"{table(header, lines, left=2)}\n\nGB are 10^9 bytes; heads of {HEAD_DIM} in bf16, no mask{of_causal(counted)}"
        ". `naive` is kernels/naive/definition.py, not compiled: an operation a kernel, S and dP in fp32. "
        f"The paper's formulas are those of standard attention and of FlashAttention with {m} of shared memory; loads "
        "and stores are those of the kernels at their tiles, as if no cache were between; read and written is what the "
        f"counters of HBM say, caches included{unmeasured}. They can also say more, as where a kernel of `flash1` "
        "spills registers, and by up to 2 % where none is known to. Bytes are not all: of attentions that move as "
        f"many, one is faster. bench/paper/io.py derives the counts.{told_alone(counted)}"
    )


def of_causal(rows: list[dict]) -> str:
    """What the causal attentions compute, in words."""
    shares = {(row["variant"], row["seq_len"]): row["share"] for row in rows if row["causal"]}
    texts = [f"{share:.1%} by `{name}` at {n:,}" for (name, n), share in shares.items()]
    what = f" but where it says causal: there, of all blocks of {BLOCK} x {BLOCK}, are computed "
    return what + ", ".join(texts) if texts else ""


def gigabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e9:.2f}"


def pictures(rows: list[dict], where: str) -> dict[str, Figure]:
    """Bytes by each count as bars, time as dots: a row of panels for each length."""
    counted = [row for row in rows if "paper_bytes" in row]
    lengths = sorted({row["seq_len"] for row in counted}) or [0]
    least = min((row[key] for row in counted for key in ("paper_bytes", "counted_bytes") if row[key]), default=1e9)
    figure = Figure(figsize=(10, 3.8 * len(lengths)), layout="constrained")
    panels = figure.subplots(len(lengths), len(PASSES), squeeze=False).flat
    for axes, (length, pass_) in zip(panels, product(lengths, PASSES), strict=True):
        shown = [row for row in counted if (row["seq_len"], row["pass"]) == (length, pass_)]
        for i, (text, keys) in enumerate(BARS.items()):
            heights = [sum(row[key] or 0 for key in keys) / 1e9 for row in shown]
            axes.bar([j + (i - 1) * 0.27 for j in range(len(shown))], heights, 0.27, label=text)
        axes.set_xticks(range(len(shown)), [label(row) for row in shown], rotation=30, ha="right")
        axes.set(ylabel="GB", yscale="log", title=f"{pass_}, {length:,} tokens, {where}")
        axes.set_ylim(bottom=least / 4e9)  # of all panels, so that their bars compare
        times = axes.twinx()
        times.plot([row["ms"] or float("nan") for row in shown], "D", color="black", label="ms")
        times.set(ylabel="ms (diamonds)", yscale="log")
        for axis in (axes.yaxis, times.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(BARS), frameon=False)
    return {"": figure}


BARS = {
    "paper's formula": ("paper_bytes",),
    "loads and stores": ("counted_bytes",),
    "measured": ("read_bytes", "written_bytes"),
}
