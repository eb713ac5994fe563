"""Every kernel compiles for the GPUs we name, and fits their shared memory, on a machine that has none of them."""

import json
import math
import os
import subprocess
import sys

import pytest

from kernels.common.launching import triton_version
from tests.e2e import ROOT, python_path
from tests.kernels import ahead_of_time
from tests.kernels.ahead_of_time import SHAPES, SHARED_MEMORY

pytestmark = pytest.mark.timeout(900)  # three minutes on two cores that do nothing else, without a cache


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    """A row per kernel, shape and target."""
    command = [sys.executable, "-m", "tests.kernels.ahead_of_time"]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": python_path()}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("target", SHARED_MEMORY)
def test_kernels_compile_and_fit(target, compiled):
    rows = [row for row in compiled if row["target"] == target]
    assert len(rows) >= 3 * len(SHAPES[target]) and all(row["bytes"] > 0 for row in rows)
    for row in rows:
        assert row["shared"] <= SHARED_MEMORY[target], row


@pytest.mark.skipif(triton_version() < (3, 7), reason="older ones serialise tiles that were measured as the fastest")
def test_tuned_tiles_of_hopper_spill_no_registers_and_keep_the_tensor_cores_busy(compiled):
    tuned = [row for row in compiled if row["target"] == "sm_90" and len(row.get("shape", [])) == 5]
    assert len(tuned) == 3 * len(ahead_of_time.tuned())
    specialised = [row for row in compiled if "specialised" in row]
    assert [row["specialised"] for row in specialised] == json.loads(json.dumps(ahead_of_time.specialised()))
    others = [row for row in compiled if row["target"] == "sm_90" and "other" in row]
    assert len(others) == len(ahead_of_time.DTYPES) * len(ahead_of_time.others("bf16"))
    baselines = [row for row in compiled if row["target"] == "sm_90" and "baseline" in row]
    assert len(baselines) == 14
    fused = [row for row in compiled if "fused" in row]
    assert len(fused) == len(ahead_of_time.fused())
    for row in tuned + specialised + others + baselines + fused:
        assert not row["serialised"], row
        # flash1's tiles are fastest where some are spilled; a few words of GELU's epilogue, which runs beside products;
        # from tile to tile, outside of the loop, what the forward with blocks of 128 keys knows of the next tile, and
        # most where three consumers share the registers; and outside of the inner loop what the backward of heads of
        # 128, or of 128 queries at a time, knows of its place; and a little with dropout
        pass_, head_dim, *_, drops, config = row.get("specialised", ("", 0, False, ()))
        wide = head_dim > 80 and config[0] == 128 if pass_ == "forward" else pass_ and 128 in (head_dim, config[0])
        three = pass_ == "forward" and config[-1] == 3
        few = 32 if "fused" in row else 8 if pass_ == "forward" and config[0] == 128 else 48 if drops else 0
        allowed = math.inf if "flash1" in row.get("baseline", "") else 640 if three else 160 if wide else few
        assert row["spilled"] <= allowed, row
        assert row.get("beside_products", 0) == 0, row


def test_no_loop_of_the_backward_loses_an_operand_it_holds(compiled):
    """The forward's loops are left out: P of one round is multiplied in the next, and Q changes from tile to tile."""
    if not ahead_of_time.specialised():
        pytest.skip("the specialised kernels are for Triton 3.6 and later")
    backward = [row for row in compiled if row.get("specialised", [""])[0] == "backward"]
    assert backward and all(row["lost"] == [] for row in backward), backward


def test_a_lost_operand_is_seen():
    """Of two held in a loop, R8 to R11 and R16 to R19, the second is overwritten; R4 to R7 are made anew each round."""
    body = [
        "HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR4], RZ, !UPT",
        "HGMMA.64x64x16.F32.BF16 R56, R16, gdesc[UR4], RZ, !UPT, gsb0",
        *(f"F2FP.BF16.F32.PACK_AB R{register}, R25, R24" for register in range(4, 6)),
        "CS2R R6, SRZ",
        "HGMMA.64x64x16.F32.BF16 R88, R4, gdesc[UR8].tnspB, R88, gsb0",
        "@P1 FMUL R18, R56, R57",
        "STS [R18+0x10], R8",
        "MOV R7, RZ",
        "@P0 BRA 0x0110",
    ]
    code = "\n".join(f"/*{16 * i:04x}*/   {text} ;" for i, text in enumerate(["LDSM.16.M88.4 R8, [R2]", *body], 16))
    assert ahead_of_time.lost_operands(code) == ["R18"]


def test_what_is_spilled_beside_products_is_counted():
    """In the shorter of two loops of products; not what is stored before it, nor loaded in the loop around it."""
    body = ["STL [R1], R8", "HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR4], RZ", "LDL R8, [R1]", "@P0 BRA 0x0110"]
    body += ["LDL R9, [R1+0x4]", "@P1 BRA 0x0140", "@P2 BRA 0x0100"]
    code = "\n".join(f"/*{16 * i:04x}*/   {text} ;" for i, text in enumerate(body, 16))
    assert ahead_of_time.spills_beside_products(code, 1) == 1
