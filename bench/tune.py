"""Finds the fastest tiles of flash2's kernels on this GPU and writes them into kernels/flash2/tiles.json.

Candidates are compiled by many processes at once, each checked against the fp64 definition on random inputs; those that
are right are then timed one after another in this process, sampled as bench.timing does. python -m bench.tune --help
"""

import argparse
import itertools
import json
import re
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from bench.accuracy import relative_error
from bench.cells import HIDDEN, TOKENS
from bench.timing import Gpu, sampler_of
from kernels.flash2 import definition, dropout, launch
from kernels.flash2.options import Options
from kernels.flash2.tiles import LENGTHS, TABLE, Tile, Tiles, length_bucket
from trainer.flops import attention_flops

KERNELS = Tiles._fields
GPU = Gpu()
SEQ_LENS = (*LENGTHS, 16384)
SAFE = Tiles(Tile(64, 32, 4, 2), Tile(32, 64, 4, 2), Tile(64, 32, 4, 2))
CANDIDATES = {
    "forward": [
        *itertools.product((64,), (32, 64, 128), (4,), (2, 3, 4)),
        *itertools.product((128,), (32, 64, 128), (4, 8), (2, 3)),
    ],
    "key_gradient": [
        *itertools.product((32, 64), (64,), (4,), (1, 2, 3)),
        *itertools.product((32, 64, 128), (128,), (8,), (1, 2, 3)),
        *itertools.product((64, 128), (64,), (8,), (1, 2)),
        *itertools.product((16,), (64,), (4,), (2, 3)),
        *itertools.product((16,), (128,), (8,), (2, 3)),
    ],
    "query_gradient": [
        *itertools.product((64,), (32, 64), (4,), (1, 2, 3)),
        *itertools.product((128,), (32, 64, 128), (8,), (1, 2, 3)),
        *itertools.product((64,), (64, 128), (8,), (1, 2)),
    ],
}
MASKS = "causal", "full", "dropout"
Job = tuple[str, int, str, tuple[int, int, int, int]]  # kernel, head_dim, mask, tile


def inputs(batch: int, seq_len: int, heads: int, head_dim: int) -> list[torch.Tensor]:
    """Random q, k, v and dout."""
    return list(torch.randn(4, batch, seq_len, heads, head_dim, device="cuda", dtype=torch.bfloat16).unbind())


def options_of(mask: str, q: torch.Tensor) -> Options:
    """What the kernels are told for one of MASKS; dropout is tuned with a causal mask."""
    batch, seq_len, heads, head_dim = q.shape
    options = Options(causal=mask != "full", scale=head_dim**-0.5)
    if mask != "dropout":
        return options
    return options._replace(numbers=dropout.draw(batch, heads, seq_len, seq_len, q.device), dropout_p=0.1)


def with_tile(kernel: str, tile: tuple) -> Tiles:
    return SAFE._replace(**{kernel: Tile(*tile)})


def is_right(job: Job) -> bool:
    """Compiles a candidate and compares what it computes with the definition in fp64; False where it cannot run."""
    kernel, head_dim, mask, tile = job
    torch.manual_seed(0)
    q, k, v, dout = inputs(1, 256, 16, head_dim)
    options = options_of(mask, q)
    try:
        got = run(kernel, with_tile(kernel, tile), q, k, v, dout, options)
    except Exception:  # too much shared memory, or more registers than there are
        return False
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    out, logsumexp = definition.forward(q, k, v, *options)
    exact = [out] if kernel == "forward" else definition.backward(dout, q, k, v, out, logsumexp, None, True, *options)
    return all(relative_error(x, y) < 1e-2 for x, y in zip(got, exact, strict=True))  # NaN fails


def run(kernel: str, tiles: Tiles, q, k, v, dout, options) -> list[torch.Tensor]:
    """The outputs of the pass that `kernel` belongs to."""
    out, logsumexp = launch.forward(q, k, v, *options, tiles=tiles)
    if kernel == "forward":
        return [out]
    return list(launch.backward(dout, q, k, v, out, logsumexp, None, True, *options, tiles=tiles))


def milliseconds(call: Callable[[], object]) -> float:
    """Median time of a call on the device."""
    call()
    sampler, _ = sampler_of(call, GPU)
    return statistics.median(sampler.sample(GPU) for _ in range(7))


def best_tile(kernel: str, head_dim: int, mask: str, seq_len: int, tiles: list[tuple]) -> tuple[tuple, float]:
    """The fastest of the right candidates at one length, and the milliseconds of its pass."""
    q, k, v, dout = inputs(TOKENS // seq_len, seq_len, HIDDEN // head_dim, head_dim)
    options = options_of(mask, q)
    out, logsumexp = launch.forward(q, k, v, *options, tiles=SAFE)
    times = {}
    for tile in tiles:
        chosen = with_tile(kernel, tile)
        if kernel == "forward":
            times[tile] = milliseconds(lambda: launch.forward(q, k, v, *options, tiles=chosen))  # noqa: B023
        else:
            arguments = dout, q, k, v, out, logsumexp, None, True, *options
            times[tile] = milliseconds(lambda: launch.backward(*arguments, tiles=chosen))  # noqa: B023
    fastest = min(times, key=times.get)
    return fastest, times[fastest]


def tune(head_dims: list[int]) -> dict:
    """The table of this architecture: head size -> mask -> length -> tiles of the three kernels."""
    jobs = [(kernel, d, mask, t) for kernel in KERNELS for d in head_dims for mask in MASKS for t in CANDIDATES[kernel]]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        right = [job for job, ok in zip(jobs, pool.map(is_right, jobs, chunksize=2), strict=True) if ok]
    print(f"{len(right)} of {len(jobs)} candidates run and are right", flush=True)
    table: dict = {}
    for head_dim, mask, seq_len in itertools.product(head_dims, MASKS, SEQ_LENS):
        chosen, speeds = [], []
        for kernel in KERNELS:
            tiles = [t for name, d, c, t in right if (name, d, c) == (kernel, head_dim, mask)]
            tile, ms = best_tile(kernel, head_dim, mask, seq_len, tiles)
            shape = TOKENS // seq_len, HIDDEN // head_dim, seq_len, head_dim, mask != "full"
            pass_ = "forward" if kernel == "forward" else "backward"
            chosen.append(list(tile))
            speeds.append(f"{attention_flops(*shape, pass_=pass_) / ms / 1e9:.0f}")
        bucket = length_bucket(seq_len)
        table.setdefault(str(head_dim), {}).setdefault(mask, {})[bucket] = chosen
        print(f"d{head_dim} {mask} {seq_len}: {chosen} {' / '.join(speeds)} TFLOP/s", flush=True)
    return table


def render(table: dict) -> str:
    """The table as JSON with the tiles of an entry on one line."""
    text = json.dumps(table, indent=2)
    text = re.sub(r"\[([\d\s,]+)\]", lambda numbers: f"[{' '.join(numbers[1].split())}]", text)
    return re.sub(r"\[\s+(\[[^{}]+?\])\s+\]", lambda tiles: f"[{' '.join(tiles[1].split())}]", text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tune", description=__doc__)
    parser.add_argument("--head-dims", default="64,128", help="padded head sizes, powers of two, separated by commas")
    parser.add_argument("--out", type=Path, default=TABLE, help="the table to write to")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: bench.tune measures on a GPU, and torch sees none here; run it where there is one")
    arch = launch.arch_of(torch.device("cuda", torch.cuda.current_device()))
    table = json.loads(TABLE.read_text())
    table.setdefault(arch, {}).update(tune([int(d) for d in arguments.head_dims.split(",")]))
    arguments.out.write_text(render(table))
    print(f"tiles for {arch} written to {arguments.out}")


if __name__ == "__main__":
    main()
