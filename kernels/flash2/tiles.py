"""Tile sizes, warps and stages of flash2's kernels: the table tiles.json and the rules that read it.

`python -m bench.tune` writes the rows of "plain" and "hopper". max_seq_len is their longest sequence, or their longest
window (null: no limit).

- plain: tuned tiles of the plain Triton kernels, by architecture ("sm_90" is Hopper), head size padded to a power of
  two, mask ("causal", "full", "dropout") and max_seq_len.
- compiled: tiles of the plain kernels for AMD GPUs without tuned rows, by architecture and padded head size.
  `python -m bench.amd search=true` chose them by their machine code.
- conservative: tiles for everything else, by padded head size. They fit in 96 KiB of shared memory (64 KiB on AMD),
  because a program has 99 KiB on the RTX 3090, 4090 and 5090 (sm_86, sm_89, sm_120). An A100 has 163 KiB, Hopper and
  Blackwell 227 KiB. tests/kernels/cards.py compiles them for these GPUs: no kernel spills more than 160 bytes of
  registers per thread.
- hopper: settings of the warp-specialised kernels of sm_90 by pass, head size, mask (also "window" and "documents") and
  max_seq_len. A missing row means that the plain kernels are faster.
"""

import json
import re
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
import triton

TABLE = Path(__file__).with_name("tiles.json")
LENGTHS = 512, 1024, 4096  # limits of sequences and windows in the table; rows for longer ones have no limit


class TileConfig(NamedTuple):
    """How a plain kernel is launched."""

    queries: int  # rows of a query tile
    keys: int  # rows of a key tile
    warps: int
    stages: int  # depth of the loads' pipeline


class PlainTiles(NamedTuple):
    """Tiles of the three plain kernels: forward, dK and dV, dQ."""

    forward: TileConfig
    key_gradient: TileConfig
    query_gradient: TileConfig


LARGE = "sm_80", "sm_90", "sm_100", "sm_103", "cpu"  # with 163 KiB of shared memory or more
# fp32 uses no tensor cores, and small tiles.
FP32_TILES = PlainTiles(*[TileConfig(32, 32, 4, 1)] * 3)
WIDE_FP32_TILES = PlainTiles(*[TileConfig(16, 16, 4, 1)] * 3)  # of heads above 128 on other GPUs, to fit in 99 KiB


class HopperForwardConfig(NamedTuple):
    """How the kernel of hopper_forward is launched."""

    keys: int  # of a block
    stages: int  # blocks of K and of V in flight
    consumers: int  # warpgroups that compute, two or three, with 64 queries each

    @property
    def queries(self) -> int:
        """Rows of a query tile."""
        return 64 * self.consumers


class HopperBackwardConfig(NamedTuple):
    """How the main kernel of hopper_backward is launched."""

    queries: int  # rows of a query tile
    keys: int  # rows of a key tile
    warps: int  # that compute; four more load, add up dQ, or idle
    stages: int  # tiles of dO in shared memory; Q and the statistics have one or two more
    resident: int  # programs on a multiprocessor at a time, which share its registers
    fused: bool  # whether the kernel computes dQ too; otherwise the plain kernel does

    @property
    def compiler_options(self) -> dict[str, int]:
        """Warps and registers. All warps start with equal shares of a multiprocessor's 65536 registers, in multiples of
        8 for a thread, which has 255 at most.
        """
        registers = 65536 // (self.resident * (self.warps + 4) * 32) // 8 * 8
        return {"num_warps": self.warps, "maxnreg": min(registers, 248)}


HopperConfig = HopperForwardConfig | HopperBackwardConfig
HOPPER_CONFIGS = {"forward": HopperForwardConfig, "backward": HopperBackwardConfig}


def in_halves(queries: int, head_dim: int) -> bool:
    """Return whether the Hopper backward computes tiles of `queries` rows in two halves, except for dQ."""
    return queries == 128 and head_dim > 64


def without_dq(config: HopperBackwardConfig, head_dim: int) -> HopperBackwardConfig:
    """Return the settings of a backward that leaves dQ to the plain kernel.

    Tiles in halves pay only for dQ (see main_loop.py). Smaller tiles replace them.
    """
    if in_halves(config.queries, head_dim):
        return HopperBackwardConfig(queries=64, keys=64, warps=4, stages=2, resident=2, fused=False)
    return config._replace(fused=False)


@cache
def padded_head_dim(head_dim: int) -> int:
    """Return head_dim padded to a power of two, for the plain kernels."""
    return max(16, triton.next_power_of_2(head_dim))


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """Return the two parts of a head that the Hopper kernels read: 80 is 64 + 16 columns; 64 and 128 are whole."""
    return (128, 0) if head_dim == 128 else (64, head_dim - 64)


def max_seq_len(seq_len: int) -> int | None:
    """Return the limit of the table's rows for the length of a sequence or window, or None for no limit."""
    return next((longest for longest in LENGTHS if seq_len <= longest), None)


def mask_of(causal: bool, dropout: bool) -> str:
    """Return the table's name of a mask. Dropout needs more registers: its rows were tuned with a causal mask."""
    return "dropout" if dropout else "causal" if causal else "full"


@cache
def read_table() -> dict[str, list[dict]]:
    """Return the rows of tiles.json by section."""
    return json.loads(TABLE.read_text())


def find_row(rows: list[dict], **key) -> dict | None:
    """Return the first row that has these values, or None."""
    return next((row for row in rows if all(row[name] == value for name, value in key.items())), None)


def plain_tiles_of(row: dict) -> PlainTiles:
    """Return the tiles in a row of "plain", "compiled" or "conservative"."""
    return PlainTiles(*(TileConfig(**row[kernel]) for kernel in PlainTiles._fields))


def check_arch(arch: str) -> None:
    """Raise a ValueError for NVIDIA GPUs older than sm_80.

    Triton would compute the products there without tensor cores and spill thousands of bytes of registers.
    """
    if (nvidia := re.fullmatch(r"sm_(\d+)", arch)) and int(nvidia[1]) < 80:
        raise ValueError(
            f"the kernels need sm_80 or newer, and this GPU is {arch}; use attention=sdpa or attention=naive"
        )


@lru_cache(4096)
def plain_tiles_for(
    arch: str, head_dim: int, dtype: torch.dtype, causal: bool, seq_len: int, dropout: bool = False
) -> PlainTiles:
    """Return the plain kernels' tiles: arch is "sm_90", "gfx942" and so on, head_dim is from 16 to 256.

    Raises:
        ValueError: the architecture is older than sm_80.
    """
    check_arch(arch)
    if dtype == torch.float32:
        return FP32_TILES if head_dim <= 128 or arch in LARGE else WIDE_FP32_TILES
    table, size = read_table(), padded_head_dim(head_dim)
    key = {"head_dim": size, "mask": mask_of(causal, dropout), "max_seq_len": max_seq_len(seq_len)}
    tuned, compiled = find_row(table["plain"], arch=arch, **key), find_row(table["compiled"], arch=arch, head_dim=size)
    return plain_tiles_of(tuned or compiled or find_row(table["conservative"], head_dim=size))


@lru_cache(4096)
def hopper_config_for(pass_: str, head_dim: int, mask: str, seq_len: int) -> HopperConfig | None:
    """Return the settings of the Hopper kernel for a pass ("forward", "backward"), or None if the plain ones run.

    mask is one of the table's names, for example what mask_of returns.
    """
    key = {"head_dim": head_dim, "mask": mask, "max_seq_len": max_seq_len(seq_len)}
    row, kind = find_row(read_table()["hopper"], **{"pass": pass_}, **key), HOPPER_CONFIGS[pass_]
    return row and kind(*(row[name] for name in kind._fields))
