"""Find the fastest tiles of flash2's kernels on this GPU and write them to kernels/flash2/tiles.json.

The file has rows for each architecture, such as sm_89 of an RTX 4090. A new architecture gets rows of its own, and the
next program that runs flash2 on this GPU reads them.

Many processes compile the candidates and compare them with the fp64 definition on random inputs. This process times the
candidates that are right, one after another. On Hopper, the settings of the warp-specialised kernels are written if
they beat the plain kernels by 3 %.

Examples:
  python -m bench.tune
  python -m bench.tune 'head_dims=[128]' out=tiles.json
"""

import itertools
import json
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from bench.attention.accuracy import relative_error
from bench.attention.shapes import HIDDEN, TOKENS
from bench.common.command_line import check_choice, check_output_file, launch
from bench.common.results import write_text
from bench.common.timing import Gpu, median_milliseconds
from errors import UserError
from kernels.common import dropout
from kernels.common import launching as launcher
from kernels.common.checks import document_bounds
from kernels.flash2 import definition, dispatch
from kernels.flash2.options import Options
from kernels.flash2.tiles import (
    HOPPER_CONFIGS,
    LENGTHS,
    TABLE,
    PlainTiles,
    TileConfig,
    check_arch,
    find_row,
    max_seq_len,
    padded_head_dim,
    plain_tiles_for,
    plain_tiles_of,
)

KERNELS = PlainTiles._fields
SEQ_LENS = (*LENGTHS, 16384)
SAFE = PlainTiles(TileConfig(64, 32, 4, 2), TileConfig(32, 64, 4, 2), TileConfig(64, 32, 4, 2))
# The fields of TileConfig: queries, keys, warps, stages
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
# The fields of HopperForwardConfig and HopperBackwardConfig
HOPPER_CANDIDATES = {
    "forward": [(64, 3, 2), (64, 4, 2), (64, 5, 2), (64, 6, 2), (128, 2, 2), (128, 3, 2), (128, 4, 2), (128, 3, 3)],
    "backward": [
        *itertools.product((64,), (64,), (4,), (2, 3), (2,), (True,)),
        *itertools.product((64,), (128,), (8,), (2,), (1,), (True, False)),
        (128, 128, 8, 2, 1, True),
    ],
}
HEAD_DIMS, HOPPER_HEAD_DIMS = (16, 32, 64, 128, 256), (64, 80, 96, 128)
MAX_SPILLS = 4  # registers
SPILLS = {"forward hopper": 160, "backward hopper": 40}  # outside of inner loops; see test_ahead_of_time.py
GAIN = 1.03  # the least speed over the plain kernels that makes the Hopper kernels worthwhile
MASKS = "causal", "full", "dropout"
HOPPER_MASKS = *MASKS, "window", "documents"
CHECKED = 65  # tokens of a window and of a document, when results are checked
DOCUMENT = 1000  # tokens, when kernels are timed; the ends of the sequences cut documents
Job = tuple[str, int, str, tuple]  # kernel, head_dim, mask, tile
Candidates = dict[tuple | None, dispatch.Settings]  # by tile; None stands for the plain kernels beside Hopper's


def inputs(batch: int, seq_len: int, heads: int, head_dim: int) -> list[torch.Tensor]:
    """Return standard normal q, k, v and dout, (batch, seq_len, heads, head_dim) each, in bf16."""
    return list(torch.randn(4, batch, seq_len, heads, head_dim, device="cuda", dtype=torch.bfloat16).unbind())


def options_of(mask: str, q: torch.Tensor, window: int = CHECKED, document: int = CHECKED) -> Options:
    """Return the options of the kernels for one of HOPPER_MASKS. All except "full" are tuned with a causal mask."""
    batch, seq_len, heads, head_dim = q.shape
    options = Options(causal=mask != "full", scale=head_dim**-0.5)
    if mask == "dropout":
        return options._replace(numbers=dropout.draw(batch, heads, seq_len, seq_len, q.device), dropout_p=0.1)
    if mask == "window":
        return options._replace(window=window)
    if mask == "documents":
        cuts = torch.arange(0, batch * seq_len + document, document, dtype=torch.int32, device=q.device)
        return options._replace(documents=document_bounds(cuts.clamp(max=batch * seq_len), batch, seq_len))
    return options


def with_tile(kernel: str, tile: tuple) -> dispatch.Settings:
    """Return the argument with which dispatch runs a candidate of a plain kernel or of a pass's Hopper kernel."""
    pass_, _, hopper = kernel.partition(" ")
    return HOPPER_CONFIGS[pass_](*tile) if hopper else SAFE._replace(**{kernel: TileConfig(*tile)})


def pass_of(kernel: str) -> str:
    return "forward" if kernel.startswith("forward") else "backward"


def is_right(job: Job) -> bool:
    """Compile a candidate and return whether it runs, spills few registers, and agrees with the fp64 definition."""
    kernel, head_dim, mask, tile = job
    torch.manual_seed(0)
    q, k, v, dout = inputs(1, 256, 16, head_dim)
    options = options_of(mask, q)
    launcher.compiled_kernels.clear()
    try:
        got = call_of(kernel, q, k, v, dout, options)(tiles=with_tile(kernel, tile))
    except Exception:  # it needs too much shared memory or too many registers
        return False
    if any(compiled.n_spills > SPILLS.get(kernel, MAX_SPILLS) for compiled in launcher.compiled_kernels.values()):
        return False
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    out, logsumexp = definition.forward(q, k, v, *options)
    exact = [out]
    if pass_of(kernel) == "backward":
        exact = definition.backward(dout, q, k, v, out, logsumexp, None, True, *options)
    return all(relative_error(x, y) < 1e-2 for x, y in zip(got, exact, strict=False))  # NaN fails


def call_of(kernel: str, q, k, v, dout, options: Options) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return the pass that `kernel` belongs to, as a function of `tiles`."""
    if pass_of(kernel) == "forward":
        return partial(dispatch.forward, q, k, v, *options)
    out, logsumexp = dispatch.forward(q, k, v, *options, tiles=SAFE)
    return partial(dispatch.backward, dout, q, k, v, out, logsumexp, None, False, *options)


def times_of(kernel: str, head_dim: int, mask: str, seq_len: int, candidates: Candidates) -> dict[tuple | None, float]:
    """Return the milliseconds of the pass that `kernel` belongs to, by candidate.

    A window has `seq_len` tokens, but at most half of its one sequence of TOKENS.
    """
    length, window = (TOKENS, min(seq_len, TOKENS // 2)) if mask == "window" else (seq_len, 0)
    data = inputs(TOKENS // length, length, HIDDEN // head_dim, head_dim)
    call = call_of(kernel, *data, options_of(mask, data[0], window, DOCUMENT))
    return {t: median_milliseconds([partial(call, tiles=c)], Gpu(), rounds=7)[0] for t, c in candidates.items()}


def right_ones(jobs: list[Job]) -> list[Job]:
    """Return the jobs whose candidates run and are right."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        right = [job for job, ok in zip(jobs, pool.map(is_right, jobs, chunksize=2), strict=True) if ok]
    print(f"{len(right)} of {len(jobs)} candidates run and are right", flush=True)
    return right


def candidates_of(jobs: list[Job], kernel: str, head_dim: int, mask: str) -> Candidates:
    return {t: with_tile(kernel, t) for name, d, m, t in jobs if (name, d, m) == (kernel, head_dim, mask)}


def tune(arch: str, head_dims: list[int]) -> list[dict]:
    """Return the rows of this GPU's plain kernels. The tiles in use are always among the candidates."""
    right = right_ones([(x, d, m, t) for x in KERNELS for d in head_dims for m in MASKS for t in CANDIDATES[x]])
    rows = []
    for head_dim, mask, seq_len in itertools.product(head_dims, MASKS, SEQ_LENS):
        row = {"arch": arch, "head_dim": head_dim, "mask": mask, "max_seq_len": max_seq_len(seq_len)}
        used = plain_tiles_for(arch, head_dim, torch.bfloat16, mask != "full", seq_len, mask == "dropout")
        for kernel in KERNELS:
            now = tuple(getattr(used, kernel))
            candidates = {now: with_tile(kernel, now), **candidates_of(right, kernel, head_dim, mask)}
            times = times_of(kernel, head_dim, mask, seq_len, candidates)
            tile = min(times, key=times.get)
            row[kernel] = TileConfig(*tile)._asdict()
            print(f"d{head_dim} {mask} {seq_len} {kernel}: {tile} {times[tile]:.3f} ms", flush=True)
        rows.append(row)
    return rows


def tune_hopper(plain_rows: list[dict]) -> list[dict]:
    """Return the rows of the warp-specialised kernels that beat the plain kernels with the tiles of `plain_rows`."""
    passes = HOPPER_CANDIDATES
    asked = itertools.product(passes, HOPPER_HEAD_DIMS, HOPPER_MASKS)
    right = right_ones([(f"{x} hopper", d, m, t) for x, d, m in asked for t in passes[x]])
    rows = []
    for pass_, head_dim, mask, seq_len in itertools.product(passes, HOPPER_HEAD_DIMS, HOPPER_MASKS, SEQ_LENS):
        kernel, key = f"{pass_} hopper", {"mask": mask, "max_seq_len": max_seq_len(seq_len)}
        of_plain = key | {"mask": mask if mask in MASKS else "causal"}
        plain = plain_tiles_of(find_row(plain_rows, arch="sm_90", head_dim=padded_head_dim(head_dim), **of_plain))
        candidates = {None: plain, **candidates_of(right, kernel, head_dim, mask)}
        times = times_of(kernel, head_dim, mask, seq_len, candidates)
        best = min(times, key=times.get)
        if times[None] > GAIN * times[best]:
            rows.append({"pass": pass_, "head_dim": head_dim, **key, **HOPPER_CONFIGS[pass_](*best)._asdict()})
        print(f"d{head_dim} {mask} {seq_len} {pass_}: {best} {times[best]:.3f}, plain {times[None]:.3f} ms", flush=True)
    return rows


def render(table: dict) -> str:
    """Return the table as JSON with the settings of a kernel on one line."""
    text = json.dumps(table, indent=2)
    return re.sub(r"\{([^{}]+)\}", lambda settings: f"{{{' '.join(settings[1].split())}}}", text) + "\n"


@dataclass
class TuneSettings:
    """What `python -m bench.tune` reads."""

    head_dims: list[int] = field(default_factory=lambda: [64, 128])
    """Padded head sizes of the plain kernels: powers of two."""
    out: str = str(TABLE)
    """The table to write."""

    def __post_init__(self):
        check_choice("head_dims", self.head_dims, HEAD_DIMS)
        check_output_file("out", self.out)


def run(settings: TuneSettings) -> None:
    if not torch.cuda.is_available():
        raise UserError("bench.tune finds no GPU; run it on a machine with a GPU")
    arch = dispatch.arch_of(torch.device("cuda", torch.cuda.current_device()))
    try:
        check_arch(arch)
    except ValueError as error:
        raise UserError(f"bench.tune finds no kernels to tune: {error}") from error
    table = json.loads(TABLE.read_text())
    others = [row for row in table["plain"] if row["arch"] != arch or row["head_dim"] not in settings.head_dims]
    table["plain"] = others + tune(arch, settings.head_dims)
    if arch == "sm_90":
        table["hopper"] = tune_hopper(table["plain"])
    write_text(Path(settings.out), render(table))
    print(f"tiles for {arch} written to {settings.out}")


if __name__ == "__main__":
    launch(run, TuneSettings)
