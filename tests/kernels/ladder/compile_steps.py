"""Compile steps of kernels.ladder on a machine without a GPU, and print one JSON line per kernel.

Run it in a process of its own and without Triton's interpreter:
python -m tests.kernels.ladder.compile_steps STEP:TARGET:HEAD_DIM:MASK ..., for example step_11_wgmma:sm_90:64:causal

A step's own function runs on CPU tensors. Its launches compile for the target and start nothing. A row has the job, the
kernel's name, its warps and its bytes of shared memory. For an NVIDIA GPU it also has the INSTRUCTIONS and the number
of barriers in the PTX, and the results of machine_code.py.
"""

import itertools
import json
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels import ladder
from tests.kernels.machine_code import assembler_report

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
}
INSTRUCTIONS = {
    "mma": r"\bmma\.sync",
    "cp.async": r"\bcp\.async\.c[ag]\.",
    "wgmma": r"\bwgmma\.mma_async",
    "tma": r"\bcp\.async\.bulk\.tensor",
    "tma add": r"\bcp\.reduce\.async\.bulk\.tensor",
    "atomic": r"\b(atom|red)\.global",
    "setmaxnreg": r"\bsetmaxnreg",
}
BATCH, LENGTH, HEADS = 2, 512, 3  # Triton would compile a size of 1 as a constant


def compiled_kernels(step: str, target: str, head_dim: int, causal: bool) -> list[tuple[str, object]]:
    """Call a step on CPU tensors, and return the names and the compilations of the kernels that it launches."""
    fake = SimpleNamespace(
        get_current_device=lambda: target,  # a kernel's cache is by device, and keeps the first target of each
        get_current_stream=lambda _: 0,
        get_current_target=lambda: TARGETS[target],
    )
    compiled, launch = [], JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        compiled.append((self.__name__, kernel))
        return kernel

    qkv = torch.zeros(BATCH, LENGTH, 3, HEADS, head_dim, dtype=torch.bfloat16)
    q, k, v = qkv.unbind(2)
    out, logsumexp = torch.zeros(q.shape, dtype=q.dtype), torch.zeros(BATCH, HEADS, LENGTH)
    module = ladder.load(step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", fake)
        patch.setattr(JITFunction, "run", compile_only)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
        if step in ladder.FORWARD:
            module.forward(q, k, v, causal)
        else:
            module.backward(out, q, k, v, out, logsumexp, causal)
    return compiled


def rows_of(job: str) -> list[dict]:
    """Compile a step for one target, head size and mask, and return a row per kernel."""
    step, target, head_dim, mask = job.split(":")
    rows = []
    for name, kernel in compiled_kernels(step, target, int(head_dim), mask == "causal"):
        row = {"job": job, "step": step, "kernel": name, "warps": kernel.metadata.num_warps}
        row["shared"] = kernel.metadata.shared
        if target.startswith("sm_"):
            ptx = kernel.asm["ptx"]
            row["has"] = [word for word, pattern in INSTRUCTIONS.items() if re.search(pattern, ptx)]
            row["barriers"] = len(re.findall(r"\b(?:bar|barrier)(?:\.cta)?\.sync", ptx))
            row |= assembler_report(kernel, target)
        rows.append(row)
    return rows


def outcome_of(job: str) -> list[dict]:
    """Return the rows of a job, or one row with an error, so that the other jobs go on."""
    try:
        return rows_of(job)
    except Exception as error:
        return [{"job": job, "error": str(error)}]


def main() -> None:
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:  # spares the seconds of importing torch again
        for row in itertools.chain.from_iterable(pool.map(outcome_of, sys.argv[1:])):
            print(json.dumps(row))


if __name__ == "__main__":
    main()
