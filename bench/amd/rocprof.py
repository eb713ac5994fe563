"""Convert the counters in a CSV file of rocprof into operations and bytes per second.

rocprof counts the instructions of waves. A wave has 64 threads, so a vector instruction is 64 operations, and a load or
store moves 64 times the bytes of one thread. An MFMA instruction counts as 64 operations too, although it does more.
Caches are not seen: the bytes are the bytes that the threads ask for.
"""

import csv
import math
from collections import defaultdict
from pathlib import Path

from errors import UserError

WAVE = 64  # threads
COUNTERS = (
    "SQ_INSTS_VALU",
    "SQ_INSTS_VMEM_RD",
    "SQ_INSTS_VMEM_WR",
    "SQ_INSTS_LDS",
    "SQ_LDS_BANK_CONFLICT",  # in cycles
)
COLUMNS = "KernelName", "BeginNs", "EndNs", *COUNTERS


def read(path: Path) -> dict[str, dict[str, float]]:
    """Return the sums over all launches of each kernel: launches, ns and the counters, by the kernel's name."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file, restval=""))
            for row in rows:
                of_kernel = sums[row["KernelName"].removesuffix(".kd")]
                of_kernel["launches"] += 1
                of_kernel["ns"] += int(row["EndNs"]) - int(row["BeginNs"])
                for counter in COUNTERS:
                    of_kernel[counter] += count(row[counter])
    except OSError as error:
        raise UserError(f"rocprof={path} cannot be read ({error.strerror}); give a CSV file of rocprof") from error
    except KeyError as error:
        raise UserError(
            f"rocprof={path} has no column {error.args[0]}; run rocprof with --timestamp on and a line "
            f"'pmc: {' '.join(COUNTERS)}' in its input file"
        ) from error
    except (ValueError, csv.Error) as error:
        raise UserError(f"rocprof={path} has a broken row ({error}); profile again") from error
    if not rows:
        raise UserError(f"rocprof={path} has no rows; profile a run that launches kernels")
    if name := next((name for name, of_kernel in sums.items() if of_kernel["ns"] <= 0), None):
        raise UserError(f"rocprof={path} has no time for {name}; run rocprof with --timestamp on")
    return {name: dict(of_kernel) for name, of_kernel in sums.items()}


def count(text: str) -> float:
    """Return a counter. Raise ValueError if it is negative or not finite."""
    if not 0 <= float(text) < math.inf:
        raise ValueError(f"{text} is not a count")
    return float(text)


def rates(sums: dict[str, float], bytes_per_thread: int) -> dict[str, float]:
    """Return GOPS, GB/s of global memory, and cycles of bank conflicts per LDS instruction."""
    moved = (sums["SQ_INSTS_VMEM_RD"] + sums["SQ_INSTS_VMEM_WR"]) * WAVE * bytes_per_thread
    lds = sums["SQ_INSTS_LDS"]
    return {
        "launches": int(sums["launches"]),
        "ms": sums["ns"] / 1e6,
        "gops": sums["SQ_INSTS_VALU"] * WAVE / sums["ns"],
        "gb_per_s": moved / sums["ns"],
        "lds_ginsts": lds / sums["ns"],
        "conflict_cycles": sums["SQ_LDS_BANK_CONFLICT"] / lds if lds else 0.0,
    }
