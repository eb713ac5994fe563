"""Compile the Triton kernels for NVIDIA GPUs other than Hopper, and print one JSON line per kernel and GPU.

Run it in a process of its own and without Triton's interpreter: python -m tests.kernels.cards

Triton writes the same PTX for all GPUs of a family. So a family is compiled once, and ptxas assembles the PTX for each
GPU that has the same tiles. Rows of the group "same" say whether the PTX is the same.

A row names the GPU ("arch") and the kernel ("group" and "name"). It has the bytes of shared memory, the registers of a
thread and the bytes that it spills.
"""

import itertools
import json
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from bench.common.compilation import compile_attention, compile_flash2
from kernels.flash1 import launch as flash1_launch
from kernels.flash1 import triton_kernels as flash1
from kernels.flash2.options import Options
from kernels.flash2.tiles import TileConfig, plain_tiles_for
from kernels.flash2.triton_kernels import host as plain
from tests.kernels.ahead_of_time import DTYPES, LONG, compile_other, others
from tests.kernels.machine_code import assembler_report

FAMILIES = {"sm_86": ["sm_80", "sm_86", "sm_89"], "sm_120": ["sm_120"], "sm_100": ["sm_100", "sm_103"]}
"""The GPU that a family is compiled for, and the GPUs that its PTX is assembled for."""
OLD = "sm_75"  # a T4, which runs the kernels without matrix products
KERNELS = "forward", "key_gradient", "query_gradient"
# Head size, dtype, mask, dropout, documents: each value of one with each head size, and all pairs of the others.
CONFIGS = [
    (16, "bf16", "full", False, False),
    (16, "fp16", "causal", True, True),
    (32, "bf16", "window", False, True),
    (32, "fp16", "causal", True, False),
    (64, "bf16", "causal", True, True),
    (64, "fp16", "causal", False, False),
    (80, "bf16", "causal", True, False),
    (80, "fp16", "causal", False, True),
    (128, "bf16", "causal", False, False),
    (128, "fp16", "causal", True, True),
    (256, "bf16", "causal", False, True),
    (256, "fp16", "causal", True, False),
]
SHARES = {"sm_86": CONFIGS, "sm_120": CONFIGS[::4] + CONFIGS[3::4], "sm_100": CONFIGS[1::4] + CONFIGS[2::4]}
"""The configurations of a family: two families share them, each with each head size once and with both dtypes."""


def options_of(mask: str, dropout: bool, documents: bool) -> Options:
    window = 1024 if mask == "window" else 0
    return Options(documents=documents or None, causal=mask != "full", window=window, dropout_p=0.1 * dropout)


def compiled_flash2(arch: str, kernel: str, head_dim: int, dtype: str, options: Options):
    """Compile one of flash2's plain kernels at its tile."""
    kind = head_dim, DTYPES[dtype], options.causal, LONG, options.dropout_p > 0
    tiles = plain_tiles_for(arch, *kind)
    assert all(plain_tiles_for(card, *kind) == tiles for card in FAMILIES.get(arch, [])), "split the family"
    return compile_flash2(kernel, getattr(tiles, kernel), head_dim, options, dtype, arch)


def rows_of(arch: str, group: str, name: list, compiled, cards: list[str] | None = None) -> list[dict]:
    """Return a row for each of `cards`, or for each GPU of the family."""
    common = {"group": group, "name": name, "shared": compiled.metadata.shared}
    return [{"arch": card} | common | assembler_report(compiled, card) for card in cards or FAMILIES.get(arch, [arch])]


def flash2_rows(arch: str, kernel: str, head_dim: int, dtype: str, *kind) -> list[dict]:
    compiled = compiled_flash2(arch, kernel, head_dim, dtype, options_of(*kind))
    return rows_of(arch, "flash2", [kernel, head_dim, dtype, *kind], compiled)


def flash1_rows(arch: str, pass_: str, head_dim: int) -> list[dict]:
    """Compile flash1's kernel of one pass, with documents, for the GPUs of the family that have its tiles."""
    tiles = flash1_launch.tiles_for(arch, head_dim, DTYPES["bf16"])
    cards = [x for x in FAMILIES.get(arch, [arch]) if flash1_launch.tiles_for(x, head_dim, DTYPES["bf16"]) == tiles]
    runs = {"forward": (flash1.forward_kernel, tiles[0], "out"), "backward": (flash1.backward_kernel, tiles[1], "dq")}
    kernel, tile, summed = runs[pass_]
    values = flash1_launch.constants_of(tile, head_dim, True, True, False, interpreted=False)
    compiled = compile_attention(kernel, values, tile, "bf16", arch, fp32=(summed,))
    return rows_of(arch, "flash1", [pass_, head_dim], compiled, cards)


def block_sparse_rows(arch: str) -> list[dict]:
    """Compile flash2's block-sparse kernels for one shape."""
    options, rows = Options(blocks=True, causal=True), []
    for kernel in KERNELS:
        rows += rows_of(arch, "block_sparse", [kernel], compiled_flash2(arch, kernel, 64, "bf16", options))
    pieces = compile_attention(plain.add_pieces_kernel, (64, 80, 128, False), TileConfig(0, 0, 4, 1), "bf16", arch)
    return rows + rows_of(arch, "block_sparse", ["add_pieces"], pieces)


def other_rows(arch: str, dtype: str) -> list[dict]:
    """Compile the kernels that are not attention."""
    rows = []
    for job in others(dtype, arch):
        rows += rows_of(arch, "other", [job[0], dtype, *job[3]], compile_other(job, dtype, arch))
    return rows


def ptx_of(arch: str) -> str:
    """Return the PTX of one kernel without the lines that name the architecture."""
    ptx = compiled_flash2(arch, "query_gradient", 64, "bf16", Options(causal=True)).asm["ptx"]
    return re.sub(r"^\.target .*$", "", ptx, flags=re.MULTILINE)


def same_rows(arch: str, card: str) -> list[dict]:
    """Compare the PTX of a GPU with the PTX that its family is compiled to."""
    return [{"arch": card, "group": "same", "name": [arch], "same": ptx_of(arch) == ptx_of(card)}]


def jobs() -> list[tuple]:
    """List the functions to call with their arguments, the slowest first."""
    listed = [
        (flash2_rows, arch, kernel, *config)
        for arch, kernel in itertools.product(FAMILIES, KERNELS)
        for config in SHARES[arch]
    ]
    listed.sort(key=lambda job: -job[3])  # wide heads first
    listed += [
        (flash1_rows, arch, pass_, head_dim)
        for head_dim, arch, pass_ in itertools.product((128, 64), ("sm_80", *FAMILIES), ("forward", "backward"))
    ]
    listed += [(block_sparse_rows, arch) for arch in FAMILIES]
    listed += [(other_rows, arch, "bf16") for arch in FAMILIES] + [(other_rows, OLD, "fp16")]
    listed += [(same_rows, arch, card) for arch, cards in FAMILIES.items() for card in cards if card != arch]
    return listed


def run(job: tuple) -> list[dict]:
    function, *arguments = job
    return function(*arguments)


def main() -> None:
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for row in itertools.chain.from_iterable(pool.map(run, jobs())):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
