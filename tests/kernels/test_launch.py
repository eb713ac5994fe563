"""Which kernels flash2 launches, and how it tells."""

import logging

import pytest
import torch

from kernels.flash2 import launch, tiles
from kernels.flash2.options import Options

BF16 = torch.bfloat16
WHOLE = Options(causal=True)
DROPOUT = WHOLE._replace(dropout_p=0.1)


@pytest.fixture(autouse=True)
def new_triton(monkeypatch):
    """The rules are those of the Triton that the specialised kernels are for, whichever is installed."""
    monkeypatch.setattr(launch, "triton_version", lambda: (3, 6))


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
        ("sm_90", 64, BF16, WHOLE._replace(window=8), False),
        ("sm_90", 64, BF16, WHOLE._replace(documents=torch.zeros(1, 2, 4)), False),
        ("sm_90", 128, BF16, DROPOUT, True),
        ("sm_80", 128, BF16, DROPOUT, False),
    ],
)
def test_the_specialised_kernels_run_where_they_are_written_for(arch, head_dim, dtype, options, specialised):
    for pass_ in ("forward", "backward"):
        assert launch.is_specialised(pass_, arch, head_dim, dtype, 1024, options) is specialised
        if options is WHOLE:
            told = launch.explain(head_dim, dtype, True, 1024, arch)
            assert f"{pass_} by {'warp-specialised Gluon' if specialised else 'plain Triton'}" in told


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_dq_of_a_deterministic_backward_is_explained_as_plain(deterministic):
    told = launch.explain(128, BF16, True, 1024, "sm_90", deterministic=deterministic)
    assert "backward by warp-specialised Gluon" in told and ("dQ by plain Triton" in told) is deterministic


def test_a_length_without_settings_gets_the_plain_kernels(monkeypatch):
    table = {"specialised": {"forward": {"64": {"full": {"long": [64, 3, 2]}}}}}
    monkeypatch.setattr(tiles, "read_table", lambda: table)
    tiles.specialised_for.cache_clear()
    chosen = [launch.is_specialised("forward", "sm_90", 64, BF16, seq_k, Options()) for seq_k in (4096, 4097)]
    tiles.specialised_for.cache_clear()
    assert chosen == [False, True]


def test_an_older_triton_gets_the_plain_kernels(monkeypatch):
    monkeypatch.setattr(launch, "triton_version", lambda: (3, 5))
    assert not launch.is_specialised("backward", "sm_90", 64, BF16, 1024, WHOLE)


def test_a_line_of_the_log_says_once_which_kernels_ran(caplog):
    launch._tell.cache_clear()
    q = torch.randn(1, 20, 1, 16)
    with caplog.at_level(logging.INFO, logger=launch.__name__):
        for _ in range(2):
            launch.forward(q, q, q, *Options(scale=0.25))
    assert caplog.messages == ["flash2 forward of head_dim 16 in torch.float32 on cpu: plain Triton kernels"]
