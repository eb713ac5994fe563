"""Tile sizes, warps and stages of flash2's kernels: one shipped table, tiles.json, and the rule that reads it.

The table is keyed by architecture, padded head size, mask (or dropout) and length, and made by `python -m bench.tune`.
What it lacks takes the conservative tiles of "any", which fit 96 KiB of shared memory (64 KiB on AMD, whose loads are
not pipelined as deep).
"""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import triton

TABLE = Path(__file__).with_name("tiles.json")
LENGTHS = (1024, 4096)  # the longest sequences of the buckets "1024" and "4096"; all longer ones are "long"


class Tile(NamedTuple):
    """Rows of a query tile and of a key tile, warps of a program, depth of the loads' pipeline."""

    m: int
    n: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Tiles of the three kernels: forward, dK and dV, dQ."""

    forward: Tile
    key_gradient: Tile
    query_gradient: Tile


FP32_TILES = Tiles(*[Tile(32, 32, 4, 1)] * 3)  # fp32 is computed without tensor cores, in small tiles


def padded_head_dim(head_dim: int) -> int:
    """The power of two the kernels pad head_dim to."""
    return max(16, triton.next_power_of_2(head_dim))


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """The two parts the warp-specialised kernels read a head in: 80 as 64 and 16 columns, 64 and 128 whole."""
    return (128, 0) if head_dim == 128 else (64, head_dim - 64)


def length_bucket(seq_len: int) -> str:
    return next((str(longest) for longest in LENGTHS if seq_len <= longest), "long")


@cache
def read_table() -> dict:
    return json.loads(TABLE.read_text())


@cache
def tiles_for(arch: str, head_dim: int, dtype: torch.dtype, causal: bool, bucket: str, dropout: bool = False) -> Tiles:
    """The tiles for an architecture ("sm_90", "gfx942"), a head size from 16 to 256, a dtype, a mask and a length.

    Dropout, which needs more registers, has tiles of its own, tuned with a causal mask.
    """
    if dtype == torch.float32:
        return FP32_TILES
    table, size = read_table(), str(padded_head_dim(head_dim))
    mask = "dropout" if dropout else "causal" if causal else "full"
    tuned = table.get(arch, {}).get(size, {}).get(mask, {}).get(bucket)
    return Tiles(*(Tile(*tile) for tile in tuned or table["any"][size]))
