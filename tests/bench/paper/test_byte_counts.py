"""The counts of bytes, compared with numbers that are worked out by hand."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from bench.attention.rows import empty_row
from bench.paper import byte_counts
from bench.paper.settings import PaperSettings
from bench.paper.tables import hbm_traffic
from kernels.flash2.tiles import PlainTiles, TileConfig, plain_tiles_for
from model.attention import VARIANTS
from tests.bench.stopwatch import Stopwatch

TILES = PlainTiles(TileConfig(4, 4, 4, 1), TileConfig(2, 4, 4, 1), TileConfig(2, 8, 4, 1))


def test_standard_attention_is_counted_as_in_the_paper():
    """n = 4, d = 2. Forward: S of Q and K, 8 + 8 read and 16 written; P 16 + 16; O of P and V 16 + 8 + 8. Backward:
    four products of 16 + 8 + 8 elements, and dS of P and dP: 16 + 16 + 16. Two bytes each."""
    assert byte_counts.standard(4, 2) == {"forward": 2 * (32 + 32 + 32), "backward": 2 * (4 * 32 + 48)}


def test_flashattention_reads_everything_once_for_each_tile_of_keys():
    """n = 8, d = 2 and 64 bytes on chip: 32 elements, tiles of 4 keys, two of them. Forward K and V 32, and twice Q and
    O in and out 48, l and m in and out 32. Backward K, V, dK and dV 64, and twice Q, O, dO and dQ in and out 80, l and
    m 16."""
    assert byte_counts.flash(8, 2, 64) == {"forward": 2 * (32 + 2 * 80), "backward": 2 * (64 + 2 * 96)}


def test_flash1_moves_its_sums_for_each_tile_of_keys():
    """n = 8, d = 2: a matrix of 32 bytes, or 64 in fp32; statistics of 32. Forward fills 64 + 2 x 32, reads K and V,
    64, for two tiles Q 32, O 64 + 64, l and m 2 x 64, and rounds O: 64 + 32. Backward fills 64, reads K and V, for four
    tiles Q, dO and O 96, l and m 64, dQ 64 + 64; writes dK and dV, 64, and rounds dQ: 96."""
    forward = 128 + 64 + 2 * (32 + 128 + 128) + 96
    assert byte_counts.flash1_traffic(8, 2, 4, 2) == {"forward": forward, "backward": 64 + 64 + 4 * 288 + 64 + 96}


def test_flash2_moves_keys_for_each_tile_of_queries(monkeypatch):
    """n = 8, d = 2, as above. Forward in two tiles of queries: K and V, 64, for each; Q, O and the logsumexp. Backward
    by the plain kernels: O, dO and delta; two tiles of keys read Q, dO and both statistics, 64 + 64, and all K, V, dK
    and dV 128; four tiles of queries read K and V, and all Q, dO, dQ and both statistics 160."""
    monkeypatch.setattr(byte_counts, "plain_tiles_for", lambda *kind: TILES)
    forward, backward = 2 * 64 + 64 + 32, (64 + 32) + (2 * 128 + 128) + (4 * 64 + 160)
    assert byte_counts.flash2_traffic("flash2", 8, 2, "sm_80", causal=False) == {
        "forward": forward,
        "backward": backward,
    }


def test_flash2_on_hopper_adds_up_dq_for_each_tile_of_keys(monkeypatch):
    """Each of two tiles of keys moves Q, dO, both statistics, and dQ in fp32 in and out, 256. Before, O, dO and the
    logsumexp are read, and both statistics and 64 bytes of zeros are written. Then K, V, dK and dV; rounding dQ, 96."""
    settings = {"forward": None, "backward": SimpleNamespace(queries=2, keys=4, fused=True)}
    monkeypatch.setattr(byte_counts, "hopper_config_for", lambda pass_, *kind: settings[pass_])
    before = 64 + 32 + 64 + 64
    full, causal = (
        byte_counts.flash2_traffic("flash2", 8, 2, "sm_90", causal=causal)["backward"] for causal in (False, True)
    )
    assert full == before + 128 + 2 * (64 + 64 + 128) + 96
    assert causal == before + 128 + 6 / 8 * 2 * (64 + 64 + 128) + 96, "two of four tiles of queries see no key above 3"


def test_flash2_on_hopper_moves_keys_for_each_of_its_own_tiles_of_queries(monkeypatch):
    """Two tiles of 4 queries; the first sees no key of the second tile of keys. Once the plain kernel's tiles of 64
    queries were counted, and not Hopper's of 128 or 192."""
    settings = {"forward": SimpleNamespace(keys=4, stages=2, consumers=2, queries=4), "backward": None}
    monkeypatch.setattr(byte_counts, "hopper_config_for", lambda pass_, *kind: settings[pass_])
    monkeypatch.setattr(byte_counts, "plain_tiles_for", lambda *kind: PlainTiles(*[TileConfig(1, 1, 4, 1)] * 3))
    assert byte_counts.flash2_traffic("flash2", 8, 2, "sm_90", causal=True)["forward"] == 3 / 4 * 2 * 64 + 64 + 32


def test_invisible_tiles_are_not_counted(monkeypatch):
    """n = 8, d = 2, as above. A window of 2 touches, in tiles of 4 x 4, the two on the diagonal and the one below it,
    3 of 4; in tiles of 2 x 4, 5 of 8; of 2 x 8, all 4.
    In the paper's count the share scales the work per tile of keys."""
    monkeypatch.setattr(byte_counts, "VARIANTS", {"local": partial(VARIANTS["local"], window=2)})
    monkeypatch.setattr(byte_counts, "plain_tiles_for", lambda *kind: TILES)
    byte_counts.seen_by.cache_clear()
    forward = 3 / 4 * 2 * 64 + 64 + 32
    backward = (64 + 32) + (5 / 8 * 2 * 128 + 128) + (4 * 64 + 160)
    assert byte_counts.flash2_traffic("local", 8, 2, "sm_90", causal=True) == {"forward": forward, "backward": backward}
    assert byte_counts.flash(8, 2, 64, 3 / 4) == {"forward": 2 * (32 + 2 * 60), "backward": 2 * (64 + 2 * 72)}
    byte_counts.seen_by.cache_clear()


def test_a_butterfly_keeps_blocks_whatever_the_tiles_are():
    """The four blocks of queries see these blocks of keys: 0; 0 and 1; 0 and 2; all. That is 9 of 16."""
    assert byte_counts.share_of("block_sparse", 512, 64, 32) == 9 / 16


def test_the_pieces_of_a_long_list_are_counted():
    """All queries see the first of 32 blocks of keys, so its list has two rows. For every element of 128 x 2, each row
    adds 16 bytes, and the second row adds 4 bytes to read K and V again."""
    tiles = plain_tiles_for("sm_90", 2, torch.bfloat16, True, 4096)
    whole = byte_counts.plain_traffic(4096, 2, tiles, partial(byte_counts.share_of, "block_sparse", 4096))
    moved = byte_counts.block_sparse_traffic(4096, 2, "sm_90")
    assert moved["forward"] == whole["forward"] and moved["backward"] == whole["backward"] + (2 * 16 + 4) * 256


def test_a_smaller_tile_of_queries_loads_keys_and_values_more_often():
    """n = 64, d = 2: K and V are 512 bytes, Q and O too, and the logsumexp 256. Tiles of 16 queries read K and V four
    times, 3/4 of them under this mask. One warp loads each tile for 16 queries; for 32, two of four warps do."""
    four, two = (TileConfig(queries, 16, 4, 1) for queries in (16, 32))
    found = byte_counts.tile_traffic(64, 2, four, 3 / 4, wgmma=False)
    assert found == {"cached": 3 * 512 + 512 + 256, "shared_stored": 1536, "shared_loaded": 1536}
    found = byte_counts.tile_traffic(64, 2, two, 1.0, wgmma=False)
    assert found == {"cached": 2 * 512 + 512 + 256, "shared_stored": 1024, "shared_loaded": 2 * 1024}


def test_four_warps_load_a_tile_together_with_wgmma():
    """128 queries are two groups of 64; with mma.sync, each of eight warps loads for its own 16 queries."""
    eight = TileConfig(128, 16, 8, 1)
    loaded = [byte_counts.tile_traffic(128, 2, eight, 1.0, wgmma)["shared_loaded"] for wgmma in (True, False)]
    assert loaded == [2 * 1024, 8 * 1024]


def test_the_products_of_a_backward_pass():
    names = "naive", "flash1", "flash2", "local"
    assert [byte_counts.products(name, "backward", fused=True) for name in names] == [4, 5, 5, 5]
    names = "flash2", "local", "block_sparse"
    assert [byte_counts.products(name, "backward", fused=False) for name in names] == [7, 7, 7]


def test_a_window_is_counted_with_the_kernels_that_its_length_chooses(monkeypatch):
    """Once local was counted with the plain kernels, after Hopper's had taken over."""
    asked = []
    monkeypatch.setattr(byte_counts, "VARIANTS", {"local": partial(VARIANTS["local"], window=2)})
    monkeypatch.setattr(byte_counts, "hopper_config_for", lambda *kind: asked.append(kind))
    assert not byte_counts.is_fused("local", 4096, 64, "sm_90", causal=True)
    assert asked == [("backward", 64, "window", 2)]


def test_the_law_counts_the_keys_and_values_of_every_tile_of_queries():
    """It is the whole traffic except Q, O and the logsumexp, for any tile that divides the length."""
    row = {"batch": 2, "heads": 3, "seq_len": 256}
    for queries in (16, 64):
        moved = byte_counts.tile_traffic(256, 64, TileConfig(queries, 64, 4, 1), 1.0, wgmma=False)["cached"]
        assert hbm_traffic.law(row | {"B_r": queries}) == 6 * (moved - 2 * 2 * 256 * 64 - 4 * 256)


def test_gflops_of_matrix_products(monkeypatch):
    """A product of 512 x 64 and 64 x 512 has 2 x 512 x 512 x 64 FLOPs, here for 3 heads. Standard attention has 2
    products forward and 4 backward. flash2's backward computes S again, in 5 products. With a causal mask, 10 of the 16
    blocks of 128 x 128 are computed."""
    monkeypatch.setattr(hbm_traffic, "hbm_bytes", lambda *given: ({}, "no counters"))
    monkeypatch.setattr(hbm_traffic, "attention_named", lambda name: None)

    def measure_shape(shape, attentions, gpu, rounds, seen):
        return [empty_row(shape, name, pass_) for name in attentions for pass_ in ("forward", "backward", "both")]

    monkeypatch.setattr(hbm_traffic, "measure_shape", measure_shape)
    sizes = {"batch": 1, "heads": 3, "seq_len": 512}
    rows = hbm_traffic.measure_attentions(sizes, Stopwatch(), PaperSettings(size="smoke"))
    gflops = {(row["variant"], row["causal"], row["pass"]): row["gflops"] for row in rows}
    product = 2 * 512 * 512 * 64 * 3 / 1e9
    assert gflops["naive", False, "forward"] == pytest.approx(2 * product)
    assert gflops["naive", False, "backward"] == pytest.approx(4 * product)
    assert gflops["flash2", False, "backward"] == pytest.approx(5 * product)
    assert gflops["flash2", True, "forward"] == pytest.approx(2 * product * 10 / 16)
