"""Tile sizes, warps and stages of flash2's kernels: one shipped table, tiles.json, and the rules that read it.

The table is keyed by architecture, head size, mask (or dropout) and length, and made by `python -m bench.tune`. The
plain kernels pad the head size to a power of two; what the table lacks takes the conservative tiles of "any", which fit
96 KiB of shared memory (64 KiB on AMD, whose loads are not pipelined as deep). Under "specialised" are the settings of
Hopper's warp-specialised kernels, where they were measured to be the faster ones.
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


class SpecialisedForward(NamedTuple):
    """How hopper_forward's kernel is launched."""

    n: int
    """Keys of a block."""
    stages: int
    """Blocks of K and of V in flight."""
    consumers: int
    """Warpgroups that compute, two or three, of 64 queries each."""

    @property
    def queries(self) -> int:
        """Rows of a query tile."""
        return 64 * self.consumers


class SpecialisedBackward(NamedTuple):
    """How hopper_backward's main kernel is launched."""

    m: int
    """Rows of a query tile."""
    n: int
    """Rows of a key tile."""
    warps: int
    """Warps that compute; four more load, add up dQ, or idle."""
    stages: int
    """Tiles of dO in shared memory; of Q and of the statistics there are one or two more."""
    resident: int
    """Programs on a multiprocessor at a time, which share its registers."""
    fused: bool
    """Whether it computes dQ too, or leaves that to the plain kernel."""

    @property
    def options(self) -> dict[str, int]:
        """Compiler options. The warps start out with equal shares of the registers, in multiples of 8."""
        registers = 65536 // (self.resident * (self.warps + 4) * 32) // 8 * 8
        return {"num_warps": self.warps, "maxnreg": min(registers, 248)}


def in_halves(m: int, head_dim: int) -> bool:
    """Whether the specialised backward computes a tile of m queries in two halves, all but its dQ."""
    return m == 128 and head_dim > 64


def without_dq(config: SpecialisedBackward, head_dim: int) -> SpecialisedBackward:
    """The settings for leaving dQ to the plain kernel. It is dQ that halves are for: without it heads of 80 have tiles
    of 64 x 64 at any length, by which the rest takes 4 % less at 8k on an H200.
    """
    if in_halves(config.m, head_dim):
        return SpecialisedBackward(64, 64, 4, 2, 2, fused=False)
    return config._replace(fused=False)


SPECIALISED = {"forward": SpecialisedForward, "backward": SpecialisedBackward}


@cache
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


def specialised_settings() -> list[tuple[str, int, str, tuple]]:
    """Pass, head size, mask and settings of the table's specialised entries, each once, whatever the lengths."""
    entries = (
        (pass_, int(size), mask, tuple(config))
        for pass_, sizes in read_table()["specialised"].items()
        for size, masks in sizes.items()
        for mask, buckets in masks.items()
        for config in buckets.values()
    )
    return list(dict.fromkeys(entries))


@cache
def tiles_for(arch: str, head_dim: int, dtype: torch.dtype, causal: bool, bucket: str, dropout: bool = False) -> Tiles:
    """The tiles for an architecture ("sm_90", "gfx942"), a head size from 16 to 256, a dtype, a mask and a length.

    Dropout, which needs more registers, has tiles of its own, tuned with a causal mask.
    """
    if dtype == torch.float32:
        return FP32_TILES
    table, size = read_table(), str(padded_head_dim(head_dim))
    tuned = table.get(arch, {}).get(size, {}).get(_mask(causal, dropout), {}).get(bucket)
    return Tiles(*(Tile(*tile) for tile in tuned or table["any"][size]))


@cache
def specialised_for(
    pass_: str, head_dim: int, causal: bool, bucket: str, dropout: bool = False
) -> SpecialisedForward | SpecialisedBackward | None:
    """The settings of the warp-specialised kernel of a pass ("forward", "backward"), or None where it is not in use."""
    sizes = read_table().get("specialised", {}).get(pass_, {})
    settings = sizes.get(str(head_dim), {}).get(_mask(causal, dropout), {}).get(bucket)
    return settings and SPECIALISED[pass_](*settings)


def _mask(causal: bool, dropout: bool) -> str:
    return "dropout" if dropout else "causal" if causal else "full"
