"""How many programs of a kernel are resident on a multiprocessor, and which resource limits them.

The rules come from NVIDIA's cuda_occupancy.h for compute capability 8.0 and later. A program is a thread block.
"""

import ctypes
from math import ceil
from typing import NamedTuple

import torch

WARP = 32
PARTITIONS = 4  # of a multiprocessor; each has a quarter of the registers and runs whole warps
REGISTER_UNIT = 256  # registers are allocated to a warp in multiples of this number
SHARED_UNIT = 128  # bytes
MAX_PROGRAMS, RESERVED_SHARED = 106, 111  # CU_DEVICE_ATTRIBUTE_* of the driver, which torch does not report


class Limits(NamedTuple):
    """What a multiprocessor has."""

    registers: int
    """32-bit registers."""
    shared_bytes: int
    reserved_bytes: int
    """Shared memory that the driver adds to each program's own."""
    threads: int
    programs: int


class Residency(NamedTuple):
    """The resident programs of a kernel, and how many programs each resource alone would allow."""

    by_cause: dict[str, int]
    """Programs by cause: registers, shared memory, warps, programs."""
    occupancy: float
    """Theoretical occupancy: resident warps as a share of the most that a multiprocessor can have."""

    @property
    def programs(self) -> int:
        return min(self.by_cause.values())

    @property
    def cause(self) -> str:
        """Return the resource with the lowest limit, or several with the same limit, joined by "and"."""
        return limiting(self.by_cause)


def limiting(by_cause: dict[str, int]) -> str:
    """Return the causes with the lowest limit, joined by "and"."""
    return " and ".join(cause for cause, programs in by_cause.items() if programs == min(by_cause.values()))


def residency(registers: int, shared_bytes: int, threads: int, limits: Limits) -> Residency:
    """Return the resident programs of a kernel.

    Args:
        registers: Registers of a thread. A warp-specialised kernel counts the number at its launch.
        shared_bytes: Static and dynamic shared memory of a program.
        threads: Threads of a program, including all specialised warps.
        limits: The resources of a multiprocessor.
    """
    warps = ceil(threads / WARP)
    of_warp = ceil(max(registers, 1) * WARP / REGISTER_UNIT) * REGISTER_UNIT
    of_program = ceil((shared_bytes + limits.reserved_bytes) / SHARED_UNIT) * SHARED_UNIT
    by_cause = {
        "registers": limits.registers // PARTITIONS // of_warp * PARTITIONS // warps,
        "shared memory": limits.shared_bytes // max(of_program, 1),
        "warps": limits.threads // WARP // warps,
        "programs": limits.programs,
    }
    return Residency(by_cause, min(by_cause.values()) * warps / (limits.threads // WARP))


def waves(programs: int, resident: int, multiprocessors: int) -> float:
    """Return how often a grid of `programs` fills the GPU. The last wave can be partly empty."""
    return programs / (resident * multiprocessors)


def device_limits() -> Limits:
    """Return the limits of the first CUDA device."""
    has = torch.cuda.get_device_properties()
    programs, reserved = map(_attribute, (MAX_PROGRAMS, RESERVED_SHARED))
    sizes = has.regs_per_multiprocessor, has.shared_memory_per_multiprocessor
    return Limits(*sizes, reserved, has.max_threads_per_multi_processor, programs)


def _attribute(number: int) -> int:
    value = ctypes.c_int()
    status = ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(value), number, 0)
    if status:
        raise RuntimeError(f"cuDeviceGetAttribute({number}) returned {status}")
    return value.value
