"""Compile flash2's plain kernels for an AMD GPU at many tiles, and choose the best by the machine code."""

import itertools

from bench.amd.assembly import LDS, describe
from bench.common.compilation import compile_flash2
from errors import first_line
from kernels.flash2.options import Options
from kernels.flash2.tiles import TileConfig

HIDING_WAVES = 2  # per SIMD: one wave computes while the other waits
PRODUCTS = {"forward": 2, "key_gradient": 4, "query_gradient": 3}  # matrix products of a tile
CANDIDATES = {
    "forward": list(itertools.product((64, 128), (32, 64), (4, 8), (1, 2))),
    "key_gradient": list(itertools.product((32, 64), (64, 128), (4, 8), (1, 2))),
    "query_gradient": list(itertools.product((64, 128), (32, 64), (4, 8), (1, 2))),
}
"""Queries, keys, warps and stages of a tile, by kernel."""


def compiled_row(arch: str, head_dim: int, kernel: str, tile: tuple) -> dict:
    """Compile one kernel at one tile, and return what its assembly says."""
    tile = TileConfig(*tile)
    row = {"arch": arch, "head_dim": head_dim, "kernel": kernel, **tile._asdict(), "status": "ok"}
    try:
        compiled = compile_flash2(kernel, tile, head_dim, Options(causal=True), "bf16", arch)
    except Exception as error:  # for example a tile that needs more than 64 KiB
        return row | {"status": "failed", "message": first_line(error)}
    found = describe(compiled.asm["amdgcn"], compiled.metadata.shared, tile.warps)
    needed = PRODUCTS[kernel] * tile.queries * tile.keys * head_dim / tile.warps  # multiply-adds of a wave
    return row | found | {"cost": 1000 * found["instructions"] / needed, "work": found["macs"] / needed}


def fits(row: dict) -> bool:
    """Return whether a tile can be chosen: it has no scratch memory, fits the LDS, and has products in its loop."""
    return row["status"] == "ok" and row["scratch"] == 0 and row["lds"] <= LDS and row["waves"] > 0 and row["mfma"] > 0


def rank(row: dict) -> float:
    """Return the instructions per needed multiply-add, twice for a single wave per SIMD, which hides no latency."""
    return row["cost"] * max(1.0, HIDING_WAVES / row["waves"])


def mark_best(rows: list[dict]) -> None:
    """Mark the best tile of each architecture, head size and kernel. Of equals, take the first."""
    for row in rows:
        row["best"] = False
    groups: dict[tuple, list[dict]] = {}
    for row in filter(fits, rows):
        groups.setdefault((row["arch"], row["head_dim"], row["kernel"]), []).append(row)
    for group in groups.values():
        min(group, key=rank)["best"] = True
