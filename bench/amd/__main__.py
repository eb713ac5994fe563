"""Compile flash2's kernels for AMD GPUs without one, and read registers, LDS and instructions from the assembly.

Examples:
  python -m bench.amd                                        the tiles of kernels/flash2/tiles.json
  python -m bench.amd search=true arch=[gfx90a] out=rows.json
  python -m bench.amd rocprof=results.csv                    counters of a run on an AMD GPU, as GOPS and GB/s

gfx90a is the MI200 series (MI210, MI250), gfx942 the MI300 series. `waves` is the number of waves per SIMD, at most 8.
It takes Triton's LDS into account, which LLVM's own figure leaves out. MFMA, LDS, VMEM and VALU count instructions of
one wave in the inner loop, over tiles without a mask. `work` divides the loop's multiply-adds by the number that a tile
needs: above 1, waves compute the same products. `per kMAC` is the loop's instructions per 1,000 needed multiply-adds.
A tile is queries x keys, w warps, s stages.

`search` compiles many tiles, in bf16 and with a causal mask. The best one has no scratch memory, fits the LDS, and has
the fewest instructions per needed multiply-add. These count twice for a single wave per SIMD, because it hides no
latency. Nothing runs, so the search knows no times: `python -m bench.tune` measures on an AMD GPU.

For rocprof: an input file with the line
  pmc: SQ_INSTS_VALU SQ_INSTS_VMEM_RD SQ_INSTS_VMEM_WR SQ_INSTS_LDS SQ_LDS_BANK_CONFLICT
then rocprof -i FILE --timestamp on python -m bench.attention variants=[flash2]
"""

import itertools
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import torch

from bench.amd import rocprof
from bench.amd.candidates import CANDIDATES, compiled_row, mark_best
from bench.common.command_line import check_choice, check_output_file, check_positive, launch
from bench.common.console import print_rows
from bench.common.results import environment, write
from kernels.flash2.tiles import PlainTiles, plain_tiles_for

ARCHITECTURES = "gfx90a", "gfx942"
HEAD_DIMS = 16, 32, 64, 128, 256
LONG = 16384  # tokens, beyond the limits of the table of tiles
SHORT = {"forward": "O", "key_gradient": "dK dV", "query_gradient": "dQ"}
COLUMNS = {
    "arch": "{arch}",
    "head": "{head_dim:d}",
    "kernel": "{short}",
    "tile": "{queries}x{keys} w{warps} s{stages}",
    "VGPR": "{vgpr:d}",
    "SGPR": "{sgpr:d}",
    "LDS": "{lds:,}",
    "scratch": "{scratch:d}",
    "waves": "{waves:g}",
    "MFMA": "{mfma:d}",
    "LDS ops": "{lds_ops:d}",
    "VMEM": "{vmem:d}",
    "VALU": "{valu:d}",
    "work": "{work:.2f}",
    "per kMAC": "{cost:.2f}",
}
RATES = {
    "kernel": "{kernel:.60}",
    "launches": "{launches:d}",
    "ms": "{ms:.3f}",
    "GOPS": "{gops:,.0f}",
    "GB/s": "{gb_per_s:,.0f}",
    "LDS Ginst/s": "{lds_ginsts:,.1f}",
    "conflict cycles": "{conflict_cycles:.2f}",
}


@dataclass
class AmdSettings:
    """What `python -m bench.amd` reads."""

    arch: list[str] = field(default_factory=lambda: list(ARCHITECTURES))
    """Architectures to compile for."""
    head_dims: list[int] = field(default_factory=lambda: [64, 128])
    """Padded head sizes: powers of two."""
    search: bool = False
    """Compile all candidate tiles, not only the tiles in tiles.json, and mark the best of each kernel."""
    rocprof: Path | None = None
    """A CSV file of rocprof (version 1). It is converted, and nothing is compiled."""
    bytes_per_thread: int = 16
    """For rocprof: bytes that one thread loads or stores in one instruction. flash2 loads 16."""
    out: Path | None = None
    """Results file. null only prints."""

    def __post_init__(self):
        check_choice("arch", self.arch, ARCHITECTURES)
        check_choice("head_dims", self.head_dims, HEAD_DIMS)
        check_positive(self, "bytes_per_thread", most=16)
        check_output_file("out", self.out)


def jobs(settings: AmdSettings) -> list[tuple]:
    """List the arguments of compiled_row."""
    listed = []
    for arch, head_dim, kernel in itertools.product(settings.arch, settings.head_dims, PlainTiles._fields):
        shipped = getattr(plain_tiles_for(arch, head_dim, torch.bfloat16, True, LONG), kernel)
        tiles = [shipped, *(CANDIDATES[kernel] if settings.search else [])]
        listed += [(arch, head_dim, kernel, tile) for tile in dict.fromkeys(map(tuple, tiles))]
    return listed


def short_name(row: dict, search: bool) -> str:
    """Return what a kernel computes, with a star if its tile is the best of the search."""
    return SHORT[row["kernel"]] + (" *" if search and row["best"] else "")


def run(settings: AmdSettings) -> None:
    if settings.rocprof:
        sums = rocprof.read(settings.rocprof)
        rows = [{"kernel": name} | rocprof.rates(x, settings.bytes_per_thread) for name, x in sums.items()]
        print_rows(f"rocprof, {settings.bytes_per_thread} bytes per load of a thread", rows, RATES)
    else:
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            rows = list(pool.map(compiled_row, *zip(*jobs(settings), strict=True)))
        mark_best(rows)
        title = "flash2 on AMD: compiled, not run" + (" (* the best tile)" if settings.search else "")
        print_rows(
            title, [row | {"short": short_name(row, settings.search)} for row in rows if row["status"] == "ok"], COLUMNS
        )
        for row in rows:
            if row["status"] != "ok":
                print(f"{row['arch']} {row['head_dim']} {row['kernel']}: {row['message']}")
    if settings.out:
        write(settings.out, {"environment": environment(), "rows": rows})
        print(f"written to {settings.out}")


if __name__ == "__main__":
    launch(run, AmdSettings)
