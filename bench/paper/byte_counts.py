"""Bytes that attention moves between HBM and the chip, by the papers' formulas and by our kernels' loads and stores.

The papers count elements that move between HBM and an on-chip memory of M bytes (FlashAttention, theorems 2 and 5). The
*_traffic functions count every load and store of our kernels at their tiles, without a cache. The GPU's counters can
show less, because programs that read the same data at the same time share it.

All counts are for one head without dropout: n tokens of size d, 2 bytes per element; statistics and fp32 sums 4 bytes.
A causal attention computes a `share` of the tiles: the tiles with at least one visible pair.
"""

from collections.abc import Callable
from functools import cache, partial
from math import ceil

import torch
from torch import Tensor

from kernels.flash1.launch import tiles_for as flash1_tiles
from kernels.flash2.block_lists import BLOCK, listed
from kernels.flash2.tiles import HopperConfig, PlainTiles, TileConfig, hopper_config_for, mask_of, plain_tiles_for
from model.attention import VARIANTS, build_attention

SPARSE = "block_sparse", "local"
PASSES = "forward", "backward"
Bytes = dict[str, int]


def standard(n: int, d: int) -> Bytes:
    """Count FlashAttention's algorithms 0 and 3 (as fused_softmax): each step reads operands and writes its result.

    Forward: S, P, O. Backward: dV, dP, dS of P and dP, dQ, dK.
    """
    product = n * n + 2 * n * d
    return {"forward": 2 * (2 * product + 2 * n * n), "backward": 2 * (4 * product + 3 * n * n)}


def flash(n: int, d: int, m: int, share: float = 1.0) -> Bytes:
    """Count FlashAttention's algorithms 1 and 4 with an on-chip memory of m bytes: B_c = ceil(M / 4d), M in elements.

    Forward reads K and V once; for each tile of keys it reads Q, O, l and m and writes O, l and m. Backward reads Q, O,
    dO, dQ, l and m and writes dQ for each tile; it writes dK and dV once. The `share` of blocks that are not zero
    scales the work per tile of keys (proposition 4).
    """
    key_tiles = ceil(n / ceil(m / 2 / (4 * d)))
    forward = 2 * n * d + share * key_tiles * (3 * n * d + 4 * n)
    backward = 4 * n * d + share * key_tiles * (5 * n * d + 2 * n)
    return {"forward": round(2 * forward), "backward": round(2 * backward)}


def naive_traffic(n: int, d: int) -> Bytes:
    """Count kernels/naive/definition.py. S and dP are fp32, and each elementwise operation is a kernel of its own.

    Forward, in bytes for each of n^2: S 4; times scale 8; softmax 8; to bf16 6; read by P V 2. For each of n d: Q, K
    and V 6, O in fp32 4, times 1 / keep 8, to bf16 6. Backward for n^2: P read by dV 2; dP 4; P dP 10; its sum 4;
    dP - sum 8; times P 10; times scale 8; to bf16 6; dS read by dQ and dK 4. For n d: dV 2 + 4 + 8 + 6; dP 4; dQ and
    dK 4 each.
    """
    return {"forward": 28 * n * n + 24 * n * d, "backward": 56 * n * n + 32 * n * d}


def flash1_traffic(n: int, d: int, keys: int, backward_keys: int) -> Bytes:
    """Count kernels/flash1 with this many keys per tile: algorithms 1 and 4, with fp32 sums of O and dQ in HBM.

    Forward fills O, l and m and reads K and V once; for each tile of keys it reads Q and reads and writes O, l and m.
    At the end it rounds O. Backward fills dQ; for each tile of keys it reads Q, dO, O, l and m, and reads and writes
    dQ. It reads K and V and writes dK and dV once, and rounds dQ.
    """
    row, stats = 2 * n * d, 4 * n
    forward = 7 * row + 2 * stats + ceil(n / keys) * (5 * row + 4 * stats)
    backward = 9 * row + ceil(n / backward_keys) * (7 * row + 2 * stats)
    return {"forward": forward, "backward": backward}


def keys_seen(variant: str, n: int) -> int:
    """Return the largest number of keys that a query of flash2 or local sees: its window chooses local's kernels."""
    return min(VARIANTS[variant]().window, n) if variant == "local" else n


def hopper_settings(variant: str, pass_: str, n: int, d: int, arch: str, causal: bool) -> HopperConfig | None:
    """Return the settings of the Hopper kernel for a pass of flash2 or local, or None if plain kernels compute it."""
    mask = "window" if variant == "local" else mask_of(causal, False)
    return hopper_config_for(pass_, d, mask, keys_seen(variant, n)) if arch == "sm_90" else None


def is_fused(variant: str, n: int, d: int, arch: str, causal: bool) -> bool:
    """Return whether one kernel computes all gradients of flash2 or local."""
    settings = hopper_settings(variant, "backward", n, d, arch, causal) if variant in ("flash2", "local") else None
    return settings is not None and settings.fused


def flash2_traffic(variant: str, n: int, d: int, arch: str, causal: bool) -> Bytes:
    """Count flash2 or local at its tiles, with Hopper's kernels if they apply. A mask skips invisible tiles.

    Hopper's backward kernel adds dQ up in fp32: it zeroes dQ, reads and writes dQ for each tile of keys, and reads and
    rounds dQ at the end.
    """
    row, stats = 2 * n * d, 4 * n
    share = partial(share_of, variant, n) if causal else lambda m, n: 1.0
    tiles = plain_tiles_for(arch, d, torch.bfloat16, causal, keys_seen(variant, n))
    forward, fused = (hopper_settings(variant, pass_, n, d, arch, causal) for pass_ in PASSES)
    if forward:
        tiles = tiles._replace(forward=TileConfig(forward.queries, forward.keys, 4 * forward.consumers, forward.stages))
    plain = plain_traffic(n, d, tiles, share)
    if not fused:
        return plain
    if not fused.fused:
        raise ValueError(f"the separate backward kernels of Hopper at d={d} are not counted")
    prepare = 2 * row + stats + 2 * stats + 2 * row  # O, dO, logsumexp; both statistics; zeros in fp32
    key_tiles = share(fused.queries, fused.keys) * ceil(n / fused.keys)
    backward = prepare + 4 * row + key_tiles * (2 * row + 2 * stats + 4 * row) + 3 * row
    return plain | {"backward": round(backward)}


def plain_traffic(n: int, d: int, tiles: PlainTiles, share: Callable[[int, int], float]) -> Bytes:
    """Count flash2's plain kernels. `share` maps queries and keys of a tile to the share of tiles that is computed.

    Forward: each of ceil(n / B_r) programs reads its part of Q and all of K and V, and writes its part of O and the
    logsumexp. Backward: O and dO give delta. For dK and dV, each of ceil(n / B_c) programs reads its part of K and V
    and all of Q, dO and both statistics. For dQ, each of ceil(n / B_r) programs reads its part of Q and dO and all of
    K and V.
    """
    row, stats = 2 * n * d, 4 * n
    of_forward, of_keys, of_queries = (share(tile.queries, tile.keys) for tile in tiles)
    forward = of_forward * ceil(n / tiles.forward.queries) * 2 * row + 2 * row + stats
    key_gradient = of_keys * ceil(n / tiles.key_gradient.keys) * (2 * row + 2 * stats) + 4 * row
    query_gradient = of_queries * ceil(n / tiles.query_gradient.queries) * 2 * row + 3 * row + 2 * stats
    backward = 2 * row + stats + key_gradient + query_gradient
    return {"forward": round(forward), "backward": round(backward)}


def tile_traffic(n: int, d: int, tile: TileConfig, share: float, wgmma: bool) -> dict[str, int]:
    """Count what flash2's plain forward kernel moves with this tile, through the caches and in shared memory.

    All loads and stores go through L2 and L1: `cached`. Each program stores its tiles of K and V in shared memory:
    `shared_stored`. A matrix product loads them from there: `shared_loaded`. With wgmma, four warps load a tile
    together for 64 queries. With mma.sync, each warp loads a tile for its own queries, at least 16.
    """
    tiles = PlainTiles(tile, tile, tile)
    stored = share * ceil(n / tile.queries) * 2 * 2 * n * d
    readers = ceil(tile.queries / 64) if wgmma else min(tile.warps, ceil(tile.queries / 16))
    cached = plain_traffic(n, d, tiles, lambda m, n: share)["forward"]
    return {"cached": cached, "shared_stored": round(stored), "shared_loaded": round(stored * readers)}


@cache
def seen_by(variant: str, n: int) -> Tensor:
    """Return the keys that each query of a causal attention sees with its default settings: (n, n) bool."""
    config, i = VARIANTS[variant](), torch.arange(n)
    seen = i[:, None] >= i
    if variant == "block_sparse":
        seen &= build_attention(config).blocks(n)[i[:, None] // BLOCK, i // BLOCK]
    elif variant == "local":
        seen &= i[:, None] - i < config.window
    return seen


def share_of(variant: str, n: int, tile_m: int, tile_n: int) -> float:
    """Return the share of tiles that a causal attention computes. block_sparse uses its blocks, not the tiles."""
    m, k = (BLOCK, BLOCK) if variant == "block_sparse" else (tile_m, tile_n)
    tiles = torch.zeros(ceil(n / m), ceil(n / k))
    queries, keys = seen_by(variant, n).nonzero(as_tuple=True)
    tiles[queries // m, keys // k] = 1
    return tiles.mean().item()


def block_sparse_traffic(n: int, d: int, arch: str) -> Bytes:
    """Count block_sparse, which runs the plain kernels on every GPU.

    A list of blocks of keys can be split into several rows. Each row reads K and V and writes dK and dV in fp32, which
    are read again.
    """
    tiles = plain_tiles_for(arch, d, torch.bfloat16, True, n)
    moved = plain_traffic(n, d, tiles, partial(share_of, "block_sparse", n))
    pattern = build_attention(VARIANTS["block_sparse"]()).blocks(n)
    of_keys = listed(pattern, causal=True, documents=False, ragged=n % BLOCK != 0).lists[len(pattern) :]
    pieces, more = int((of_keys[:, 1] != 1).sum()), len(of_keys) - len(pattern)
    return moved | {"backward": moved["backward"] + (pieces * 16 + more * 4) * BLOCK * d}


def products(variant: str, pass_: str, fused: bool) -> int:
    """Return how many matrix products of 2 n^2 d FLOPs an attention computes.

    Forward: S and O. Backward from stored P: dV, dP, dQ and dK. A fused backward pass also computes S again. flash2's
    plain kernels compute S and dP twice: for dK and dV, and for dQ.
    """
    if pass_ == "forward":
        return 2
    if variant in ("flash2", "local", "block_sparse"):
        return 5 if fused else 7
    return {"naive": 4, "fused_softmax": 4, "flash1": 5, "sdpa_flash": 5}[variant]


def kernel_traffic(variant: str, causal: bool, n: int, d: int, arch: str) -> Bytes | None:
    """Return the loads and stores of one of our attentions, or None for one of torch's."""
    counts = {
        "naive": lambda: naive_traffic(n, d),
        "fused_softmax": lambda: standard(n, d),
        "flash1": lambda: flash1_traffic(n, d, *(tile.keys for tile in flash1_tiles(arch, d, torch.bfloat16))),
        "flash2": lambda: flash2_traffic("flash2", n, d, arch, causal),
        "local": lambda: flash2_traffic("local", n, d, arch, causal),
        "block_sparse": lambda: block_sparse_traffic(n, d, arch),
    }
    return counts[variant]() if variant in counts else None
