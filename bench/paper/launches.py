"""The Triton and Gluon kernels that a call launches, with their resources, and their compilation side by side."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from math import prod
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction

from bench.paper.occupancy import WARP, Residency, device_limits, residency, waves
from kernels.common import launching


class Launch(NamedTuple):
    """A kernel that was launched."""

    name: str
    compiled: Any
    """Triton's CompiledKernel."""
    programs: int

    def resources(self) -> tuple[dict, Residency]:
        """Return the registers of a thread, spills, bytes of shared memory, occupancy and waves, and the residency."""
        compiled, shared = self.compiled, self.compiled.metadata.shared
        held = residency(compiled.n_regs, shared, WARP * compiled.metadata.num_warps, device_limits())
        found = {"registers": compiled.n_regs, "spills": compiled.n_spills, "shared_bytes": shared}
        multiprocessors = torch.cuda.get_device_properties().multi_processor_count
        found |= {"occupancy": held.occupancy, "waves": waves(self.programs, held.programs, multiprocessors)}
        return found, held


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Return the list of kernels that Triton's launcher starts inside the block, in order."""
    found, run = [], JITFunction.run

    def record(self, *args, grid, warmup, **options):
        compiled = run(self, *args, grid=grid, warmup=warmup, **options)
        found.append(Launch(self.__name__, compiled, prod(grid)))
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
