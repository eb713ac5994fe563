"""Every Triton kernel compiles for the NVIDIA GPUs that people own, and fits their shared memory and registers."""

import itertools
import json
import os
import subprocess
import sys

import pytest

from tests.e2e import ROOT, python_path
from tests.kernels import cards
from tests.kernels.ahead_of_time import others

# The largest shared memory of a block in bytes, by NVIDIA's programming guide.
SHARED_MEMORY = {"sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_100": 227, "sm_103": 227, "sm_120": 99}
SPILLED = 160  # bytes of a thread in flash2's largest kernels
SMALL = 48  # in the gradients of softmax (1,024 threads share the registers) and of LayerNorm (Triton 3.8)


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    """Compile everything, and return one row per kernel and GPU."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", "tests.kernels.cards"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_kernels_fit_each_card(arch, compiled):
    rows = [row for row in compiled if row["arch"] == arch and row["group"] != "same"]
    n_others = len(others("bf16", arch))
    configs = next((cards.SHARES[family] for family, members in cards.FAMILIES.items() if arch in members), [])
    assert len(rows) == n_others + (3 * len(configs) + 4 + 4 if configs else 0)
    for row in rows:
        assert row["shared"] <= SHARED_MEMORY[arch] * 1024, row
        assert row["registers"] <= 255, row
        assert row["group"] == "flash1" or row["spilled"] <= (SMALL if row["group"] == "other" else SPILLED), row


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_cards_of_a_family_have_the_same_ptx(compiled):
    rows = [row for row in compiled if row["group"] == "same"]
    assert [row["arch"] for row in rows] == ["sm_80", "sm_89", "sm_103"] and all(row["same"] for row in rows), rows


def test_the_configurations_cover_all_pairs():
    """Each head size occurs with each dtype, dropout and documents, and these occur in each combination of two."""
    columns = list(zip(*cards.CONFIGS, strict=True))
    head_dims, dtypes, masks, dropouts, documents = columns
    for one, other in itertools.combinations((head_dims, dtypes, dropouts, documents), 2):
        assert set(zip(one, other, strict=True)) == set(itertools.product(one, other))
    assert set(masks) == {"causal", "full", "window"}
