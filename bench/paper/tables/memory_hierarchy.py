"""Size and measured bandwidth of this GPU's HBM, second-level cache (L2) and shared memory."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from matplotlib.figure import Figure
from torch import Tensor

from bench.attention.accuracy import WrongResult
from bench.common.drawing import SMALL, WIDTH, styled
from bench.common.formatting import rounded, table
from bench.common.timing import Gpu, median_milliseconds
from bench.paper.settings import PaperSettings
from bench.paper.triton_kernels import copy_kernel, read_kernel, shared_kernel

TITLE = "The memories of this GPU"
GLOBAL, SHARED = "HBM and L2", "shared memory"
MIB = 2**20
UNITS = {2**30: "GiB", MIB: "MiB", 1024: "KiB"}
WORKING_SETS = {  # bytes
    "full": [size * MIB for size in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 2048)],
    "smoke": [2**16, 2**17],
}
MOVED = {"full": 4 * 2**30, "smoke": 2**18}  # bytes of one call, at least
BLOCK, BLOCK_WARPS = 4096, 4  # numbers of 4 bytes; 8 loads of 16 bytes are in flight in each thread
TILE, READS, TILE_WARPS, TILE_ROUNDS = 1024, 8192, 8, {"full": 2000, "smoke": 2}
PROGRAMS = 8  # for each multiprocessor
ROUNDS = {"full": 10, "smoke": 1}
COLOURS = {"read": "#d62728", "copy": "#1f77b4"}


def cells(settings: PaperSettings) -> list[dict]:
    return [{"memory": GLOBAL}, {"memory": SHARED}]


def measure(cell: dict, gpu: Gpu, settings: PaperSettings) -> Iterator[dict]:
    """Yield a row for each kernel and working set, after a check of what the kernel read or wrote."""
    sizes, size = sizes_of(gpu), settings.size
    programs = PROGRAMS * (sizes["multiprocessors"] or 1)
    if cell["memory"] == SHARED:
        found = [("read", 4 * TILE, partial(shared_call, TILE_ROUNDS[size], programs))]
    else:
        calls = {"read": read_call, "copy": copy_call}
        sets = WORKING_SETS[size]
        found = [(name, n, partial(call, n, MOVED[size], programs)) for n in sets for name, call in calls.items()]
    for name, working_set, make in found:
        call, moved = make(gpu.device)
        (ms,) = median_milliseconds([call], gpu, ROUNDS[size])
        yield {"kernel": name, "working_set": working_set, "moved": moved, "ms": ms, "status": "ok", **sizes}


def sizes_of(gpu: Gpu) -> dict:
    """Return the bytes of each memory and the number of multiprocessors; without a GPU, nothing is known."""
    names = "hbm_bytes", "l2_bytes", "shared_bytes", "multiprocessors"
    if gpu.device == "cpu":
        return dict.fromkeys(names)
    has = torch.cuda.get_device_properties()
    shared = has.shared_memory_per_multiprocessor * has.multi_processor_count
    return dict(zip(names, (has.total_memory, has.L2_cache_size, shared, has.multi_processor_count), strict=True))


def numbers(count: int, device: str) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randint(-1000, 1000, (count,), generator=generator, device=device, dtype=torch.int32)


def require(right: bool, what: str) -> None:
    if not right:
        raise WrongResult(f"{what} is wrong")


Call = tuple[Callable[[], object], int]


def read_call(working_set: int, moved: int, programs: int, device: str) -> Call:
    """Return a checked call that reads this many bytes again and again, and the bytes that it reads."""
    x = numbers(working_set // 4, device)
    sums = torch.full((programs, BLOCK), -1, dtype=torch.int32, device=device)
    blocks, rounds = len(x) // BLOCK, max(1, moved // working_set)

    def call():
        read_kernel[(programs,)](x, sums, blocks, rounds * blocks, BLOCK=BLOCK, num_warps=BLOCK_WARPS)

    call()
    exact = rounds * x.sum(dtype=torch.int64)
    require(bool((sums.sum(dtype=torch.int64) - exact) % 2**32 == 0), f"the sum of {working_set} bytes")
    return call, rounds * working_set


def copy_call(working_set: int, moved: int, programs: int, device: str) -> Call:
    """Return a checked call that copies half of the working set to the other half, and the bytes read and written."""
    x = numbers(working_set // 8, device)
    y = torch.full_like(x, 2**31 - 1)
    blocks, rounds = len(x) // BLOCK, max(1, moved // working_set)

    def call():
        copy_kernel[(programs,)](x, y, blocks, rounds * blocks, BLOCK=BLOCK, num_warps=BLOCK_WARPS)

    call()
    require(torch.equal(x, y), f"the copy of {working_set // 2} bytes")
    return call, rounds * working_set


def shared_call(rounds: int, programs: int, device: str) -> Call:
    """Return a checked call that reads a tile in shared memory, and the bytes read and written there."""
    x = numbers(programs * TILE, device)
    sums = torch.full((programs, READS), -1, dtype=torch.int32, device=device)

    def call():
        shared_kernel[(programs,)](x, sums, rounds, TILE=TILE, READS=READS, num_warps=TILE_WARPS)

    call()
    # Round i adds the tile + i. Each of READS / 256 rows of 32 numbers is read by 8 warps.
    of_tile = x.view(programs, TILE // 32, 1, 32).expand(-1, -1, READS // TILE, -1).reshape(programs, READS)
    exact = rounds * of_tile.long() + rounds * (rounds - 1) // 2
    require(bool(((sums - exact) % 2**32 == 0).all()), "the sum of tiles in shared memory")
    return call, 4 * rounds * programs * (READS + TILE)


def speed(row: dict) -> float:
    """Return GB/s."""
    return row["moved"] / row["ms"] / 1e6


def fastest(rows: list[dict], kernel: str, fits: Callable[[dict], bool]) -> str:
    """Return the highest GB/s of the rows of a kernel whose working set fits, or a dash."""
    speeds = [speed(row) for row in rows if row["kernel"] == kernel and fits(row)]
    return rounded(max(speeds), 0) if speeds else "-"


def markdown(rows: list[dict]) -> str:
    done = [row for row in rows if row["status"] == "ok"]
    in_global, in_shared = ([row for row in done if row["memory"] == memory] for memory in (GLOBAL, SHARED))
    largest = max((row["working_set"] for row in in_global), default=0)
    lines = []
    for memory, key, found, fits in (
        ("HBM", "hbm_bytes", in_global, lambda row: row["working_set"] == largest),
        ("L2", "l2_bytes", in_global, lambda row: row["working_set"] <= (row["l2_bytes"] or 0)),
        ("shared memory", "shared_bytes", in_shared, lambda row: True),
    ):
        size = next((row[key] for row in done if row[key]), None)
        lines.append([memory, size_text(size), *(fastest(found, kernel, fits) for kernel in COLOURS)])
    by_set = {(row["working_set"], row["kernel"]): rounded(speed(row), 0) for row in in_global}
    sets = sorted({working_set for working_set, _ in by_set})
    of_sets = [[size_text(n), *(by_set.get((n, kernel), "-") for kernel in COLOURS)] for n in sets]
    header = ["read, GB/s", "copy, GB/s"]
    return (
        f"{table(['memory', 'size', *header], lines)}\n\nGB: 10^9 bytes; a copy counts bytes read and written. HBM: "
        f"the working set of {size_text(largest)}. L2: the fastest working set that fits. Shared memory: all "
        f"multiprocessors together; each program writes a tile of {4 * TILE // 1024} KiB and reads the tile "
        f"{READS // TILE} times, again and again. The working sets one by one:\n\n"
        f"{table(['working set', *header], of_sets, left=0)}"
    )


def size_text(size: int | None) -> str:
    """Return a number of bytes as KiB, MiB or GiB."""
    if size is None:
        return "-"
    unit = next(unit for unit in UNITS if size >= unit)
    return f"{size / unit:.{0 if size % unit == 0 else 1}f} {UNITS[unit]}"


@styled
def pictures(rows: list[dict], device: str) -> dict[str, Figure]:
    """Draw GB/s against the working set, with the size of L2 as a line."""
    done = sorted((r for r in rows if r["status"] == "ok" and r["memory"] == GLOBAL), key=lambda r: r["working_set"])
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    for kernel, colour in COLOURS.items():
        points = [(row["working_set"], speed(row)) for row in done if row["kernel"] == kernel]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=kernel)
    if l2 := next((row["l2_bytes"] for row in done if row["l2_bytes"]), None):
        axes.axvline(l2, color="#8a8a8a", linestyle=":")
        axes.text(l2, axes.get_ylim()[1], " size of L2", va="top", fontsize=SMALL)
    sets = sorted({row["working_set"] for row in done})[::2]
    axes.set_xticks(sets, map(size_text, sets))
    axes.set_ylim(bottom=0)
    axes.set(xlabel="working set", ylabel="GB/s", title=f"Reads and copies by working set, {device}")
    axes.grid(axis="y")
    axes.legend()
    return {"": figure}
