"""The small kernels of the tables `softmax` and `hierarchy`, and the figures made of their times."""

import os
import re
import subprocess
import sys

import pytest
import torch

from bench.attention.accuracy import WrongResult
from bench.common.timing import Cpu
from bench.paper.tables import memory_hierarchy, softmax_passes
from bench.paper.triton_kernels import online_softmax_kernel, safe_softmax_kernel
from tests.e2e import ROOT


@pytest.mark.parametrize("kernel", [safe_softmax_kernel, online_softmax_kernel], ids=["safe", "online"])
def test_softmax_is_exact_to_rounding_over_several_blocks(kernel, monkeypatch):
    """In blocks of 16, the maximum of each column grows from block to block, or falls, by up to 200. exp overflows
    at 89."""
    monkeypatch.setattr(softmax_passes, "LARGEST_BLOCK", 16)
    rising = torch.linspace(-100, 100, 37)
    x = torch.stack([rising, rising.flip(0), torch.randn(37, generator=torch.Generator().manual_seed(0)), rising * 0])
    y = torch.full_like(x, float("nan"))
    softmax_passes.softmax_by(kernel, x, y)
    torch.testing.assert_close(y.double(), x.double().softmax(-1), rtol=1e-5, atol=1e-30)


def test_a_softmax_that_leaves_numbers_out_is_refused():
    x = torch.randn(3, 8)
    y, exact = torch.empty_like(x), x.double().softmax(-1)
    with pytest.raises(WrongResult, match="online, 2 passes is nan"):
        softmax_passes.checked("online", lambda: y[:, :7].copy_(exact[:, :7]), y, exact)


def test_every_pass_of_a_softmax_counts():
    """1,000 numbers of 4 bytes, read three times or twice and written once, in a microsecond."""
    row = {"length": 100, "rows": 10, "ms": 1e-3}
    speeds = [softmax_passes.gigabytes_per_second(row | {"passes": passes}) for passes in (3, 2, None)]
    assert speeds == [pytest.approx(16), pytest.approx(12), None]


@pytest.mark.parametrize("make", [memory_hierarchy.read_call, memory_hierarchy.copy_call])
def test_bytes_that_are_not_moved_are_found(make, monkeypatch):
    _, moved = make(2**16, 3 * 2**16, 2, "cpu")
    assert moved == 3 * 2**16
    for name in ("read_kernel", "copy_kernel"):
        monkeypatch.setattr(memory_hierarchy, name, {(2,): lambda *arguments, **options: None})
    with pytest.raises(WrongResult, match="of (65536|32768) bytes is wrong"):
        make(2**16, 3 * 2**16, 2, "cpu")


def test_a_level_shows_the_working_sets_that_fit():
    """L2 of 8 MiB: 4 MiB fit, 16 MiB do not. HBM's speed is from the largest set, though a smaller one was faster."""
    sizes = {"hbm_bytes": 80 * 2**30, "l2_bytes": 2**23, "shared_bytes": 132 * 228 * 1024, "multiprocessors": 132}
    row = {"memory": "HBM and L2", "kernel": "read", "moved": 6e9, "status": "ok", **sizes}
    rows = [row | {"working_set": n * 2**20, "ms": ms} for n, ms in ((1, 2.0), (4, 1.0), (16, 0.5), (2048, 3.0))]
    rows += [row | {"memory": "shared memory", "working_set": 4096, "ms": 0.25}]
    made = memory_hierarchy.markdown(rows)
    assert "| HBM | 80 GiB | 2,000 | - |" in made
    assert "| L2 | 8 MiB | 6,000 | - |" in made
    assert "| shared memory | 29.4 MiB | 24,000 | - |" in made
    assert "| 16 MiB | 12,000 | - |" in made


COMPILE = f"""
from bench.common.compilation import compile_triton
from bench.paper.triton_kernels import shared_kernel
types = "*i32", "*i32", "i32", "constexpr", "constexpr"
constants = {{"TILE": {memory_hierarchy.TILE}, "READS": {memory_hierarchy.READS}}}
compiled = compile_triton(shared_kernel, types, constants, "sm_90", num_warps={memory_hierarchy.TILE_WARPS})
print(compiled.asm["ptx"])
"""


def test_the_reads_of_shared_memory_stay_in_the_loop():
    """Each of 256 threads loads READS / 256 numbers in each round, and stores its part of the tile."""
    variables = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE]
    ptx = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True).stdout
    (loop,) = re.findall(r"^(\$L__BB0_\d+):.*?bra\s+\1;", ptx, flags=re.DOTALL | re.MULTILINE)
    body = ptx[ptx.index(f"{loop}:") :].partition("bra")[0]
    loaded, stored = (
        sum(int(width or 1) for width in re.findall(rf"{kind}\.shared(?:::cta)?(?:\.v(\d))?\.b32", body))
        for kind in ("ld", "st")
    )
    threads = 32 * memory_hierarchy.TILE_WARPS
    assert (loaded * threads, stored * threads) == (memory_hierarchy.READS, memory_hierarchy.TILE)


def test_without_a_gpu_no_size_is_known():
    assert set(memory_hierarchy.sizes_of(Cpu()).values()) == {None}
