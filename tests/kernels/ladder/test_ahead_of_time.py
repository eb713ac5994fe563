"""Every step of the ladder compiles without a GPU, and its machine code has the instructions that the step is about."""

import json
import os
import subprocess
import sys

import pytest

from kernels import ladder
from tests.e2e import ROOT, python_path
from tests.kernels.ahead_of_time import SHARED_MEMORY

pytestmark = pytest.mark.slow
STEPS = *ladder.FORWARD, *ladder.BACKWARD
# Instructions of the PTX for sm_90, by the idea of the step. compile_steps.py says what the words stand for.
FORWARD = {
    "scores_in_memory": set(),
    "coalesced_reads": set(),
    "online_softmax": set(),
    "shared_memory": set(),
    "swizzled_tiles": set(),
    "tensor_cores": {"mma"},
    "flash_attention_2": {"mma"},
    "two_stages": {"mma", "cp.async"},
    "three_stages": {"mma", "cp.async"},
    "split_causal_loop": {"mma", "cp.async"},
    "wgmma": {"wgmma", "cp.async"},
    "tma": {"wgmma", "tma"},
    "specialised_warps": {"wgmma", "tma", "setmaxnreg"},
    "overlapped_softmax": {"wgmma", "tma", "setmaxnreg"},
}
BACKWARD = {
    "separate_gradients": {"wgmma", "cp.async"},
    "atomic_adds": {"wgmma", "cp.async", "atomic"},
    "tma_adds": {"wgmma", "cp.async", "tma add"},
    "specialised_warps": {"wgmma", "tma", "tma add", "setmaxnreg"},
}
ON_AMPERE = [idea for idea, claim in FORWARD.items() if not claim & {"wgmma", "tma"}] + [
    "separate_gradients",
    "atomic_adds",
]
ON_AMD = "separate_gradients", "atomic_adds"  # plain Triton; the layouts of the Gluon steps are for warps of 32 threads
SLOW = "online_softmax", "shared_memory", "swizzled_tiles"  # to compile: thousands of multiply-adds without a loop
SHAPES = "64:causal", "128:full"
SPILLS = {"64": 64, "128": 256}  # bytes that a thread may spill on sm_90, by head size


def idea_of(step: str) -> str:
    """Return the name of a step without its number."""
    return step.removeprefix("step_")[3:]


def compiled(jobs: list[str]) -> dict[str, list[dict]]:
    """Compile in a process without Triton's interpreter. Return the rows of each job's kernels."""
    command = [sys.executable, "-m", "tests.kernels.ladder.compile_steps", *jobs]
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": python_path()}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {job: [] for job in jobs}
    for line in done.stdout.splitlines():
        row = json.loads(line)
        found[row["job"]].append(row)
    return found


def check(job: str, rows: list[dict]) -> None:
    """Check a job's kernels: they fit, they spill little, and together they have the claimed instructions."""
    errors = [f"{job}: {row['error']}" for row in rows if "error" in row]
    assert rows and not errors, "\n".join(errors)
    step, target, head_dim, _ = job.split(":")
    claim = (FORWARD if step in ladder.FORWARD else BACKWARD)[idea_of(step)]
    assert all(row["shared"] <= SHARED_MEMORY.get(target, 163 * 1024) for row in rows), rows
    if target.startswith("sm_"):
        expected = claim if target == "sm_90" else {"mma" if word == "wgmma" else word for word in claim}
        assert {word for row in rows for word in row["has"]} == expected, rows
        assert target != "sm_90" or all(row["spilled"] <= SPILLS[head_dim] for row in rows), rows
        assert not any(row["serialised"] for row in rows), rows


@pytest.fixture(scope="module")
def on_hopper() -> dict[str, list[dict]]:
    """Compile the steps that compile fast, for sm_90. Return the rows by job."""
    return compiled([f"{step}:sm_90:{SHAPES[0]}" for step in STEPS if idea_of(step) not in SLOW])


def test_each_step_has_the_instructions_that_it_is_about(on_hopper):
    assert ([*map(idea_of, ladder.FORWARD)], [*map(idea_of, ladder.BACKWARD)]) == ([*FORWARD], [*BACKWARD])
    for job, rows in on_hopper.items():
        check(job, rows)


def test_warps_that_split_queries_need_few_barriers(on_hopper):
    """The step before splits the keys: each row of S is spread over all warps."""
    found = {idea_of(job.partition(":")[0]): rows for job, rows in on_hopper.items()}
    (split_keys,), (split_queries,) = found["tensor_cores"], found["flash_attention_2"]
    assert split_keys["barriers"] >= 10 and split_queries["barriers"] <= 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_each_step_compiles_for_every_gpu_that_it_is_for():
    targets = {"sm_90": {**FORWARD, **BACKWARD}, "sm_80": ON_AMPERE, "gfx90a": ON_AMD}
    jobs = [
        f"{step}:{target}:{shape}"
        for target, ideas in targets.items()
        for step in STEPS
        for shape in (SHAPES if target == "sm_90" else SHAPES[:1])
        if idea_of(step) in ideas
    ]
    for job, rows in compiled(jobs).items():
        check(job, rows)
