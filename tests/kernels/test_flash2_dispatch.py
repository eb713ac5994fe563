"""The choice between flash2's kernels, and its explanation and log line."""

import pytest
import torch

from kernels.common import launching
from kernels.flash2 import dispatch, tiles
from kernels.flash2.options import Options
from kernels.flash2.tiles import HopperConfig

BF16 = torch.bfloat16
WHOLE = Options(causal=True)
DROPOUT = WHOLE._replace(dropout_p=0.1)


@pytest.fixture(autouse=True)
def new_triton(monkeypatch):
    """Apply the rules of a Triton that supports the warp-specialised kernels, whichever is installed."""
    monkeypatch.setattr(launching, "triton_version", lambda: (3, 6))


@pytest.mark.parametrize(
    ("arch", "head_dim", "dtype", "options", "specialised"),
    [
        ("sm_90", 128, BF16, WHOLE, True),
        ("sm_90", 80, torch.float16, WHOLE, True),
        ("sm_80", 64, BF16, WHOLE, False),
        ("sm_100", 128, BF16, WHOLE, False),
        ("gfx942", 128, BF16, WHOLE, False),
        ("sm_90", 72, BF16, WHOLE, False),
        ("sm_90", 64, torch.float32, WHOLE, False),
        ("sm_90", 80, BF16, WHOLE._replace(window=8), True),
        ("sm_90", 80, BF16, DROPOUT._replace(window=8), False),
        ("sm_90", 80, BF16, WHOLE._replace(documents=torch.zeros(1, 2, 4)), True),
        ("sm_90", 80, BF16, DROPOUT._replace(documents=torch.zeros(1, 2, 4)), False),
        ("sm_90", 80, BF16, WHOLE._replace(blocks=torch.zeros(1)), False),
        ("sm_90", 128, BF16, DROPOUT, True),
        ("sm_80", 128, BF16, DROPOUT, False),
    ],
)
def test_the_warp_specialised_kernels_run_only_on_supported_inputs(arch, head_dim, dtype, options, specialised):
    for pass_ in ("forward", "backward"):
        assert dispatch.uses_hopper_kernels(pass_, arch, head_dim, dtype, 1024, options) is specialised
        if options is WHOLE:
            line = dispatch.explain(head_dim, dtype, True, 1024, arch)
            assert f"{pass_} by {'warp-specialised Gluon' if specialised else 'plain Triton'}" in line


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("head_dim", [16, 20, 24, 36, 40, 72, 250, 256])
def test_the_explained_loads_are_those_of_the_kernels(head_dim, arch, dtype, monkeypatch):
    """Rows of 20 16-bit numbers have 40 bytes, which TMA cannot read. They were once explained as loads by TMA."""
    monkeypatch.setattr(launching, "arch_of", lambda device: arch)
    contiguous = torch.empty(2, 8, 3, head_dim, dtype=dtype)
    packed = torch.empty(2, 8, 3, 3, head_dim, dtype=dtype).unbind(2)  # as the model's layers pass them
    line = dispatch.explain(head_dim, dtype, True, 1024, arch)
    for inputs in ([contiguous] * 3, packed):
        loads = "TMA" if launching.uses_tma(*inputs) else "pointers"
        assert line.count(f"by plain Triton, {loads}, ") == 2


@pytest.mark.parametrize(
    ("head_dim", "kind", "way"),
    [
        (128, {}, "in a fixed order"),
        (128, {"causal": False}, "in a fixed order"),
        (128, {"documents": True}, "in a fixed order"),
        (128, {"causal": False, "documents": True}, "by plain Triton"),
        (128, {"grouped": True}, "by plain Triton"),
        (96, {"grouped": True}, "in a fixed order"),
        (128, {"dropout_p": 0.1}, "by plain Triton"),
        (64, {"dropout_p": 0.1}, "in a fixed order"),
    ],
)
def test_the_dq_of_a_deterministic_backward_is_explained(head_dim, kind, way):
    kind = {"head_dim": head_dim, "dtype": BF16, "causal": True, "seq_len": 1024, "arch": "sm_90"} | kind
    line = dispatch.explain(**kind, deterministic=True)
    assert "backward by warp-specialised Gluon" in line
    assert [words in line for words in ("in a fixed order", "dQ by plain Triton")] == [way[0] == "i", way[0] == "b"]
    assert "in a fixed order" not in dispatch.explain(**kind)


def test_a_length_without_settings_gets_the_plain_kernels(monkeypatch):
    row = {"pass": "forward", "head_dim": 64, "mask": "full", "max_seq_len": None}
    row |= {"keys": 64, "stages": 3, "consumers": 2}
    monkeypatch.setattr(tiles, "read_table", lambda: {"hopper": [row]})
    tiles.hopper_config_for.cache_clear()
    chosen = [dispatch.uses_hopper_kernels("forward", "sm_90", 64, BF16, seq_k, Options()) for seq_k in (4096, 4097)]
    tiles.hopper_config_for.cache_clear()
    assert chosen == [False, True]


@pytest.mark.parametrize("window", [1024, 1025])
def test_a_window_chooses_the_settings_by_its_own_length(window):
    """A query sees no more keys in a longer sequence. With heads of 64, only long windows leave plain Triton."""
    options = WHOLE._replace(window=window)
    for seq_k in (2000, 100_000):
        assert dispatch.uses_hopper_kernels("forward", "sm_90", 64, BF16, seq_k, options) is (window > 1024)


@pytest.mark.parametrize(("pass_", "head_dim"), [("forward", 64), ("forward", 80), ("backward", 96)])
@pytest.mark.parametrize("window", [300, 1024, 4097])
def test_a_window_in_a_long_sequence_gets_the_tiles_of_a_sequence_of_its_length(pass_, head_dim, window, monkeypatch):
    """The plain tiles too: heads of 64 have other ones above 4,096 tokens."""
    monkeypatch.setattr(dispatch, "arch_of", lambda device: "sm_90")
    kind = pass_, None, torch.device("cpu"), BF16, head_dim
    for tma in (False, True):
        found = [dispatch._choose(*kind, seq_k, WHOLE._replace(window=window), tma) for seq_k in (100_000, window)]
        assert found[0] == found[1]
    plain = tiles.plain_tiles_for("sm_90", head_dim, BF16, True, window)
    assert dispatch._choose(*kind, 100_000, WHOLE._replace(window=window), False) == plain


@pytest.mark.parametrize("window", [300, 1500, 5000])
def test_a_window_is_explained_by_the_settings_that_it_gets(window, monkeypatch):
    """5,000 keys hide nothing of 4,096 tokens."""
    monkeypatch.setattr(dispatch, "arch_of", lambda device: "sm_90")
    options = WHOLE._replace(window=window if window < 4096 else 0)
    line = dispatch.explain(64, BF16, True, 4096, "sm_90", window=window)
    for pass_, part in zip(("forward", "backward"), line.split("; "), strict=True):
        chosen = dispatch._choose(pass_, None, torch.device("cpu"), BF16, 64, 4096, options, True)
        told = str(chosen) if isinstance(chosen, HopperConfig) else f"{chosen.forward.queries}x{chosen.forward.keys} in"
        assert part.startswith(pass_) and told in part


def test_an_older_triton_gets_the_plain_kernels(monkeypatch):
    monkeypatch.setattr(launching, "triton_version", lambda: (3, 5))
    assert not dispatch.uses_hopper_kernels("backward", "sm_90", 64, BF16, 1024, WHOLE)
