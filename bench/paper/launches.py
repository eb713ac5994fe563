"""The Triton and Gluon kernels that a call launches, with their resources, and their compilation side by side."""

import ctypes
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from math import prod
from unittest.mock import patch

from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction

from bench.paper.occupancy import WARP, device_limits, residency, waves
from kernels.common import launching


class Launch:
    """A kernel that was launched: its name, its compilation and the number of programs."""

    def __init__(self, name: str, compiled, grid: tuple[int, ...]):
        self.name, self.compiled, self.programs = name, compiled, prod(grid)

    def resources(self, driver: ctypes.CDLL, multiprocessors: int) -> dict:
        """Return the kernel's registers of a thread, spills, shared memory and residency."""
        compiled, warps = self.compiled, self.compiled.metadata.num_warps
        held = residency(compiled.n_regs, compiled.metadata.shared, WARP * warps, device_limits(driver))
        found = {"kernel": self.name, "warps": warps, "registers": compiled.n_regs, "spills": compiled.n_spills}
        found |= {"shared_bytes": compiled.metadata.shared, "resident": held.programs, "limit": held.cause}
        return found | {"occupancy": held.occupancy, "waves": waves(self.programs, held.programs, multiprocessors)}


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Return the list of kernels that Triton's launcher starts inside the block, in order."""
    found, run = [], JITFunction.run

    def record(self, *args, grid, warmup, **options):
        compiled = run(self, *args, grid=grid, warmup=warmup, **options)
        found.append(Launch(self.__name__, compiled, grid))
        return compiled

    launching.compiled_kernels.clear()  # launch_kernel starts a kernel that it knows without Triton's launcher
    with patch.object(JITFunction, "run", record):
        yield found


def compile_together(calls: Iterable[Callable[[], object]]) -> None:
    """Compile the kernels of all calls side by side and launch none of them. Errors wait for the first launch."""
    run = JITFunction.run

    def only_compile(self, *args, grid, warmup, **options):
        return run(self, *args, grid=grid, warmup=True, **options)

    with (
        ThreadPoolExecutor() as pool,
        AsyncCompileMode(pool, ignore_errors=True),
        patch.object(JITFunction, "run", only_compile),
    ):
        for call in calls:
            with suppress(Exception):
                call()
    launching.compiled_kernels.clear()  # launch_kernel stored promises of kernels
