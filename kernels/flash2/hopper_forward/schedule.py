"""The order of the query tiles in the programs of the Hopper forward: the device's part and the host's.

M rows of a query tile, N keys of a block. A section is a group of heads whose tiles are dealt out together. The place
of a tile is (batch, head, first query, first key block, number of key blocks).
"""

from functools import lru_cache

import numpy as np
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.common.head_rows import keys_of
from kernels.flash2.tiles import HopperForwardConfig

CACHED = 24 * 2**20  # bytes of K and V, half of the H200's L2 cache
BEYOND = 1.05  # a section that does not fit in the cache must balance this much better: at 8k it costs 2 to 5 %
MOST_TOGETHER = 64  # heads


@gluon.jit
def count_tiles(tiles):
    """Return how many of `tiles` this program computes: a full round deals one to each program; see tile_at."""
    programs, program = gl.num_programs(0), gl.program_id(0)
    rounds = tiles // programs
    place = gl.where(rounds % 2 == 0, program, programs - 1 - program)
    return rounds + (place < tiles % programs).to(gl.int32)


@gluon.jit
def tile_at(
    n, shape, band, M: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """Return the place of this program's n-th tile. The tiles are dealt back and forth over the programs."""
    programs, program = gl.num_programs(0), gl.program_id(0)
    t = n * programs + gl.where(n % 2 == 0, program, programs - 1 - program)
    return tile_of(t, shape, band, M, N, CAUSAL, WINDOW, DOCUMENTS)


@gluon.jit
def tile_of(
    t, shape, band, M: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """Return the place of tile number t.

    All tiles of one section come before the tiles of the next section. Under a causal mask tiles differ in length.
    Within a section the longest tiles come first, which balances the work of the programs.
    """
    batches, heads, seq_q, seq_k, section = shape
    rows = gl.cdiv(seq_q, M)
    first = t // (section * rows) * section
    t -= first * rows
    width = gl.minimum(section, batches * heads - first)
    bh = first + t % width
    i = (rows - 1 - t // width) * M
    begin, blocks = 0, gl.cdiv(seq_k, N)
    if CAUSAL:
        # Every other section, counted from the last one, has its shortest tiles first. Tiles are then equally long on
        # both sides of a boundary between sections.
        after = gl.cdiv(batches * heads, section) - 1 - first // section
        i = gl.where(after % 2 == 0, i, (rows - 1) * M - i)
        # A tile has at least one block, even if its queries see no key, because it must write their zeros.
        blocks = gl.minimum(blocks, gl.maximum(gl.cdiv(i + M + seq_k - seq_q, N), 1))
    if WINDOW or DOCUMENTS:
        start, _ = keys_at(i, bh // heads, shape, band, CAUSAL, WINDOW, DOCUMENTS)
        _, stop = keys_at(gl.minimum(i + M, seq_q) - 1, bh // heads, shape, band, CAUSAL, WINDOW, DOCUMENTS)
        begin = gl.maximum(start, 0) // N
        blocks = gl.maximum(gl.cdiv(stop, N) - begin, 1)
    return bh // heads, bh % heads, i, begin, blocks


@gluon.jit
def draw_tile(counter):
    """Return the number of a tile that no program has yet, or a number after the last tile.

    Documents make tiles unequal, in a way that only the GPU knows. So each program starts with the tile of its own
    number, and draws the others from a counter in global memory that starts at zero.
    """
    return gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")


@gluon.jit
def allocate_places(SLOTS: gl.constexpr):
    """Allocate slots in shared memory for the places of tiles: five numbers each, as tile_of returns them."""
    return gl.allocate_shared_memory(gl.int32, [SLOTS * 5, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def publish(places, slot, place):
    """Write a place to a slot. The caller is one warp, and signals a barrier afterwards."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in gl.static_range(5):
        places.index(slot * 5 + i).store(gl.full([1], place[i], gl.int32, LAYOUT))


@gluon.jit
def read_place(places, slot):
    """Return the place in a slot. The caller is one warpgroup, which has waited for the barrier."""
    first = slot * 5
    batch, head, i = _number(places, first), _number(places, first + 1), _number(places, first + 2)
    return batch, head, i, _number(places, first + 3), _number(places, first + 4)


@gluon.jit
def _number(places, index):
    """Return one number in shared memory. (Gluon loads tensors only.)"""
    return gl.sum(places.index(index).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def keys_at(o_i, batch, shape, band, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr):
    """Return first and end of the keys that the queries o_i see; see head_rows.keys_of."""
    documents, window, _counter = band
    _batches, _heads, seq_q, seq_k, _section = shape
    return keys_of(o_i, documents, batch, seq_k - seq_q, seq_q, seq_k, window, CAUSAL, WINDOW, DOCUMENTS)


@lru_cache(4096)
def section_size(shape: tuple[int, int, int], bytes_of_head: int, programs: int, config: HopperForwardConfig) -> int:
    """Return the number of heads to deal out together under a causal mask, for (all heads, queries, keys).

    Among sections whose K and V (bytes_of_head each) stay in the L2 cache, take the one that balances the programs
    best. Take a larger one only if it is clearly better balanced.
    """

    def cost(section: int) -> float:
        cached = section == 1 or section * bytes_of_head <= CACHED
        return longest_program(section, *shape, programs, config) * (1 if cached else BEYOND)

    return min(range(1, min(shape[0], MOST_TOGETHER) + 1), key=cost)


def longest_program(
    section: int, heads: int, seq_q: int, seq_k: int, programs: int, config: HopperForwardConfig
) -> int:
    """Return the number of blocks that the busiest program computes under a causal mask; mirrors tile_at.

    Each tile counts one block more for its start and end. The time of a forward pass is proportional to this number.
    """
    rows = -(-seq_q // config.queries)
    t = np.arange(heads * rows)
    n, place = np.divmod(t, programs)
    program = np.where(n % 2 == 0, place, programs - 1 - place)
    first = t // (section * rows) * section
    width = np.minimum(section, heads - first)
    tile = rows - 1 - (t - first * rows) // width
    after = -(-heads // section) - 1 - first // section
    tile = np.where(after % 2 == 0, tile, rows - 1 - tile)
    blocks = np.clip(-(-((tile + 1) * config.queries + seq_k - seq_q) // config.keys), 1, -(-seq_k // config.keys))
    return int(np.bincount(program, blocks + 1).max())
