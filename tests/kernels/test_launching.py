"""Kernels ask for no more warps than a GPU allows. No GPU is needed."""

import pytest
import torch

from kernels.cross_entropy import triton_kernels as cross_entropy
from kernels.flash1.launch import tiles_for
from kernels.flash2.tiles import plain_tiles_for
from kernels.fused_softmax import triton_kernels as softmax
from kernels.fused_softmax.op import LONGEST_ROW
from tests.kernels.ahead_of_time import DTYPES, LONG, SHAPES, others

AMD = "gfx90a", "gfx942"


@pytest.mark.parametrize("arch", AMD)
def test_programs_on_amd_have_at_most_1024_threads(arch):
    """A warp has 64 threads there. The loss and the longest softmax once had 32 warps."""
    warps = {name: warps for dtype in DTYPES for name, *_, warps in others(dtype, arch)}
    for head_dim, dtype, causal, dropout in SHAPES[arch]:
        tiles = plain_tiles_for(arch, head_dim, DTYPES[dtype], causal, LONG, dropout)._asdict()
        tiles |= zip(("flash1", "flash1 backward"), tiles_for(arch, head_dim, DTYPES[dtype]), strict=True)
        warps |= {f"{name} {head_dim} {dtype}": tile.warps for name, tile in tiles.items()}
    assert {name: count for name, count in warps.items() if count * 64 > 1024} == {}


@pytest.mark.parametrize(("arch", "warps"), [("sm_80", 32), ("sm_90", 32), *((arch, 16) for arch in AMD)])
def test_the_longest_rows_are_launched_with_1024_threads(arch, warps, monkeypatch):
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, num_warps: launched.append(num_warps)

    kernels = {cross_entropy: ["cross_entropy_kernel"], softmax: ["softmax_kernel", "softmax_gradient_kernel"]}
    for module, names in kernels.items():
        monkeypatch.setattr(module, "arch_of", lambda device: arch)
        for name in names:
            monkeypatch.setattr(module, name, Kernel())
    rows, options = torch.zeros(1, 1, 1, LONGEST_ROW), (None, None, True, 1.0, 0.0)
    cross_entropy.cross_entropy_(rows[0, 0], torch.zeros(1, dtype=torch.long), LONGEST_ROW, True)
    softmax.forward(rows, *options)
    softmax.backward(rows, rows, *options)
    assert launched == [warps] * 3
