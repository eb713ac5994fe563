"""Finds the fastest tiles of flash2's kernels on this GPU and writes them into kernels/flash2/tiles.json.

The settings of Hopper's warp-specialised kernels are written where they beat the plain kernels by 3 %. Candidates are
compiled by many processes at once, each checked against the fp64 definition on random inputs; those that are right are
then timed one after another in this process, sampled as bench.timing does.
"""

import argparse
import itertools
import json
import re
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from bench.attention.accuracy import relative_error
from bench.attention.shapes import HIDDEN, TOKENS
from bench.common.command_line import output_file, sizes
from bench.common.timing import Gpu, sampler_of
from errors import UserError, refusing
from kernels.common import dropout
from kernels.common import launching as launcher
from kernels.flash2 import definition, launch
from kernels.flash2.options import Options
from kernels.flash2.tiles import LENGTHS, SPECIALISED, TABLE, Tile, Tiles, length_bucket, padded_head_dim
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
SPECIALISED_CANDIDATES = {
    "forward": [(64, 3, 2), (64, 4, 2), (64, 5, 2), (128, 2, 2), (128, 3, 2), (128, 4, 2), (128, 3, 3)],
    "backward": [
        *itertools.product((64,), (64,), (4,), (2, 3), (2,), (True,)),
        *itertools.product((64,), (128,), (8,), (2,), (1,), (True, False)),
        (128, 128, 8, 2, 1, True),
    ],
}
SPECIALISED_HEAD_DIMS = 64, 80, 96, 128
MAX_SPILLS = 4  # registers
SPILLS = {"forward specialised": 160, "backward specialised": 40}  # outside of inner loops: test_ahead_of_time.py
GAIN = 1.03  # over the plain kernels, for which the specialised ones are used
MASKS = "causal", "full", "dropout"
Job = tuple[str, int, str, tuple]  # kernel, head_dim, mask, tile


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


def with_tile(kernel: str, tile: tuple) -> launch.Chosen:
    """What makes launch run a candidate: of the three plain kernels, or of the specialised one of a pass."""
    pass_, _, specialised = kernel.partition(" ")
    return SPECIALISED[pass_](*tile) if specialised else SAFE._replace(**{kernel: Tile(*tile)})


def pass_of(kernel: str) -> str:
    return "forward" if kernel.startswith("forward") else "backward"


def is_right(job: Job) -> bool:
    """Compiles a candidate and compares what it computes with the definition in fp64; False where it cannot run.

    One that spills registers is not right either.
    """
    kernel, head_dim, mask, tile = job
    torch.manual_seed(0)
    q, k, v, dout = inputs(1, 256, 16, head_dim)
    options = options_of(mask, q)
    launcher.compiled_kernels.clear()
    try:
        got = run(kernel, with_tile(kernel, tile), q, k, v, dout, options)
    except Exception:  # too much shared memory, or more registers than there are
        return False
    if any(compiled.n_spills > SPILLS.get(kernel, MAX_SPILLS) for compiled in launcher.compiled_kernels.values()):
        return False
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    out, logsumexp = definition.forward(q, k, v, *options)
    exact = (
        [out]
        if pass_of(kernel) == "forward"
        else definition.backward(dout, q, k, v, out, logsumexp, None, True, *options)
    )
    return all(relative_error(x, y) < 1e-2 for x, y in zip(got, exact, strict=True))  # NaN fails


def run(kernel: str, tiles: launch.Chosen, q, k, v, dout, options) -> list[torch.Tensor]:
    """The outputs of the pass that `kernel` belongs to."""
    if pass_of(kernel) == "forward":
        return [launch.forward(q, k, v, *options, tiles=tiles)[0]]
    out, logsumexp = launch.forward(q, k, v, *options, tiles=SAFE)
    return list(launch.backward(dout, q, k, v, out, logsumexp, None, False, *options, tiles=tiles))


def milliseconds(call: Callable[[], object]) -> float:
    """Median time of a call on the device."""
    call()
    sampler, _ = sampler_of(call, GPU)
    return statistics.median(sampler.sample(GPU) for _ in range(7))


def times_of(
    kernel: str, head_dim: int, mask: str, seq_len: int, candidates: dict[tuple | None, launch.Chosen | None]
) -> dict[tuple | None, float]:
    """Milliseconds of the pass that `kernel` belongs to, by candidate."""
    q, k, v, dout = inputs(TOKENS // seq_len, seq_len, HIDDEN // head_dim, head_dim)
    options = options_of(mask, q)
    out, logsumexp = launch.forward(q, k, v, *options, tiles=SAFE)
    times = {}
    for tile, chosen in candidates.items():
        if pass_of(kernel) == "forward":
            times[tile] = milliseconds(lambda: launch.forward(q, k, v, *options, tiles=chosen))  # noqa: B023
        else:
            arguments = dout, q, k, v, out, logsumexp, None, False, *options
            times[tile] = milliseconds(lambda: launch.backward(*arguments, tiles=chosen))  # noqa: B023
    return times


def right_ones(jobs: list[Job]) -> list[Job]:
    """The candidates that run and are right."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        right = [job for job, ok in zip(jobs, pool.map(is_right, jobs, chunksize=2), strict=True) if ok]
    print(f"{len(right)} of {len(jobs)} candidates run and are right", flush=True)
    return right


def candidates_of(jobs: list[Job], kernel: str, head_dim: int, mask: str) -> dict[tuple, launch.Chosen]:
    return {t: with_tile(kernel, t) for name, d, m, t in jobs if (name, d, m) == (kernel, head_dim, mask)}


def speed(kernel: str, head_dim: int, mask: str, seq_len: int, ms: float) -> str:
    """TFLOP/s."""
    shape = TOKENS // seq_len, HIDDEN // head_dim, seq_len, head_dim, mask != "full"
    return f"{attention_flops(*shape, pass_=pass_of(kernel)) / ms / 1e9:.0f}"


def tune(head_dims: tuple[int, ...]) -> dict:
    """The plain kernels' table of this architecture: head size -> mask -> length -> tiles of the three kernels."""
    right = right_ones([(x, d, m, t) for x in KERNELS for d in head_dims for m in MASKS for t in CANDIDATES[x]])
    table: dict = {}
    for head_dim, mask, seq_len in itertools.product(head_dims, MASKS, SEQ_LENS):
        chosen, speeds = [], []
        for kernel in KERNELS:
            times = times_of(kernel, head_dim, mask, seq_len, candidates_of(right, kernel, head_dim, mask))
            tile = min(times, key=times.get)
            chosen.append(list(tile))
            speeds.append(speed(kernel, head_dim, mask, seq_len, times[tile]))
        table.setdefault(str(head_dim), {}).setdefault(mask, {})[length_bucket(seq_len)] = chosen
        print(f"d{head_dim} {mask} {seq_len}: {chosen} {' / '.join(speeds)} TFLOP/s", flush=True)
    return table


def tune_specialised(plain_tiles: dict) -> dict:
    """The table of the warp-specialised kernels, where they beat `plain_tiles`: pass, head size, mask, length."""
    passes = SPECIALISED_CANDIDATES
    asked = itertools.product(passes, SPECIALISED_HEAD_DIMS, MASKS)
    right = right_ones([(f"{x} specialised", d, m, t) for x, d, m in asked for t in passes[x]])
    table: dict = {}
    for pass_, head_dim, mask, seq_len in itertools.product(passes, SPECIALISED_HEAD_DIMS, MASKS, SEQ_LENS):
        kernel, bucket = f"{pass_} specialised", length_bucket(seq_len)
        plain = Tiles(*(Tile(*tile) for tile in plain_tiles[str(padded_head_dim(head_dim))][mask][bucket]))
        candidates = {None: plain, **candidates_of(right, kernel, head_dim, mask)}
        times = times_of(kernel, head_dim, mask, seq_len, candidates)
        best = min(times, key=times.get)
        if times[None] > GAIN * times[best]:
            table.setdefault(pass_, {}).setdefault(str(head_dim), {}).setdefault(mask, {})[bucket] = list(best)
        speeds = [speed(kernel, head_dim, mask, seq_len, times[tile]) for tile in (best, None)]
        print(f"d{head_dim} {mask} {seq_len} {pass_}: {best} {speeds[0]}, plain {speeds[1]} TFLOP/s", flush=True)
    return table


def render(table: dict) -> str:
    """The table as JSON with the tiles of an entry on one line."""
    text = json.dumps(table, indent=2)
    text = re.sub(r"\[([\d\s,truefals]+)\]", lambda numbers: f"[{' '.join(numbers[1].split())}]", text)
    return re.sub(r"\[\s+(\[[^{}]+?\])\s+\]", lambda tiles: f"[{' '.join(tiles[1].split())}]", text) + "\n"


@refusing()
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tune", description=__doc__)
    help_ = "padded head sizes, powers of two, separated by commas"
    parser.add_argument("--head-dims", type=sizes, default="64,128", help=help_)
    parser.add_argument(
        "--only", choices=("plain", "specialised"), help="one kind of kernels; by default all there are"
    )
    parser.add_argument("--out", type=output_file, default=TABLE, help="the table to write to")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("bench.tune measures on a GPU, and torch sees none here; run it where there is one")
    arch = launch.arch_of(torch.device("cuda", torch.cuda.current_device()))
    table = json.loads(TABLE.read_text())
    if arguments.only != "specialised":
        table.setdefault(arch, {}).update(tune(arguments.head_dims))
    if arguments.only != "plain" and arch == "sm_90":
        table["specialised"] = tune_specialised(table[arch])
    arguments.out.write_text(render(table))
    print(f"tiles for {arch} written to {arguments.out}")


if __name__ == "__main__":
    main()
