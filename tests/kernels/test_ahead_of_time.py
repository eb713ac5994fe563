"""Every kernel compiles for the GPUs that the README names, and fits their limits, on a machine without them."""

import json
import math
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.e2e import ROOT, python_path
from tests.kernels import ahead_of_time
from tests.kernels.ahead_of_time import SHAPES, SHARED_MEMORY
from tests.kernels.machine_code import lost_operands, spills_beside_products

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # It takes three minutes on two idle cores without a cache


def compile_all(requirement: str, *arguments: str) -> list[dict]:
    """Compile with this Triton, installed into a folder, and return one row per kernel, shape and target."""
    with TemporaryDirectory() as folder:  # pytest's tmp_path would keep a gigabyte
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, requirement]
        subprocess.run(pip, check=True)
        command = [sys.executable, "-m", "tests.kernels.ahead_of_time", *arguments]
        environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": f"{folder}{os.pathsep}{python_path()}"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        (installed,) = Path(folder).glob("triton-*.dist-info")
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {f"triton-{row['triton']}.dist-info" for row in rows} == {installed.name}
    return rows


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    """Compile everything with Triton 3.7, because `allowed_spills` belongs to its assembler."""
    return compile_all("triton==3.7.*")


def supported_releases() -> tuple[str, str]:
    """Return pip's requirements of the oldest and of the newest Triton that pyproject.toml allows."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    newest = next(x for x in dependencies if x.startswith("triton")).partition(";")[0]  # "triton>=3.5,<3.10"
    return newest.partition(",")[0].replace(">=", "==") + ".*", newest


@pytest.mark.parametrize("requirement", supported_releases())
def test_the_oldest_and_the_newest_triton_compile_every_kernel(requirement):
    rows = compile_all(requirement, "few")
    groups = {"shape", "other", "block_sparse", "flash1", "fp8"}
    assert {row["group"] for row in rows} == groups | (set() if "==3.5." in requirement else {"hopper", "fused"})
    for row in rows:
        assert row["bytes"] > 0 and row["shared"] <= SHARED_MEMORY["sm_90"] and not row.get("lost"), row
        assert not row.get("moves"), row


def test_the_oldest_triton_with_gluon_compiles_the_kernels_in_gluon():
    rows = compile_all("triton==3.6.*", "gluon")
    assert {row["group"] for row in rows} == {"hopper", "fused"}
    for row in rows:
        assert row["bytes"] > 0 and row["shared"] <= SHARED_MEMORY["sm_90"] and not row.get("lost"), row


@pytest.mark.parametrize("target", SHARED_MEMORY)
def test_kernels_compile_and_fit(target, compiled):
    rows = [row for row in compiled if row["target"] == target]
    assert len(rows) >= 3 * len(SHAPES[target]) and all(row["bytes"] > 0 for row in rows)
    for row in rows:
        assert row["shared"] <= SHARED_MEMORY[target] and row["threads"] <= 1024, row


def allowed_spills(row: dict) -> float:
    """Return the bytes of registers that a kernel for sm_90 may spill."""
    if row["group"] in ("flash1", "fp8"):
        return math.inf  # their fastest tiles spill
    if row["group"] == "fused":
        return 32  # a few words of GELU's epilogue, which runs beside the products
    if row["group"] != "hopper":
        return 0
    pass_, head_dim, _, mask, config, *_ = row["name"]
    if pass_ == "forward" and config[2] == 3:
        return 640  # three consumers share the registers; they spill state of the next tile, outside of the loop
    if pass_ == "forward" and config[0] == 128:
        return 160 if head_dim > 80 else 8  # the same, for blocks of 128 keys
    if pass_ == "backward" and 128 in (head_dim, config[0]):
        return 160  # the position in the loops, outside of the inner loop
    return 48 if mask == "dropout" else 0


def test_kernels_for_hopper_spill_few_registers_and_keep_the_tensor_cores_busy(compiled):
    rows = {
        group: [row for row in compiled if row["target"] == "sm_90" and row["group"] == group]
        for group in ("tuned", "hopper", "other", "block_sparse", "flash1", "fused", "fp8")
    }
    assert len(rows["tuned"]) == 3 * len(ahead_of_time.tuned_jobs())
    assert [row["name"] for row in rows["hopper"]] == json.loads(json.dumps(ahead_of_time.hopper_jobs()))
    assert len(rows["other"]) == len(ahead_of_time.DTYPES) * len(ahead_of_time.others("bf16", "sm_90"))
    assert (len(rows["block_sparse"]), len(rows["flash1"]), len(rows["fp8"])) == (4, 10, 10)
    assert len(rows["fused"]) == len(ahead_of_time.fused_jobs())
    for row in [row for group in rows.values() for row in group]:
        assert not row["serialised"], row
        assert row["spilled"] <= allowed_spills(row), row
        assert row.get("beside_products", 0) == 0, row


def test_fp8_kernels_fit_ada_and_hopper_and_never_move_an_fp8_tile(compiled):
    """Triton 3.6 moves the bytes of an FP8 tile to wrong places when it changes the tile's layout."""
    rows = [row for row in compiled if row["group"] == "fp8"]
    assert [row["target"] for row in rows].count("sm_89") == len(rows) // 2 == 10
    for row in rows:
        assert row["shared"] <= 99 * 1024 and row["moves"] == [], row


def test_no_loop_of_the_backward_pass_loses_an_operand_that_it_holds(compiled):
    """The forward pass is left out: its loops multiply P in the next round, and Q changes from tile to tile."""
    backward = [row for row in compiled if row["group"] == "hopper" and row["name"][0] == "backward"]
    assert backward and all(row["lost"] == [] for row in backward), backward


def test_a_lost_operand_is_seen():
    """The loop holds R8 to R11 and R16 to R19, and overwrites R18. R4 to R7 are set again in each round."""
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
    assert lost_operands(code) == ["R18"]


def test_a_wait_behind_the_last_exit_is_no_loop():
    """It branches back between the load of R8 to R11 and their product, and so would take the next load for a loss."""
    body = ["LDSM.16.M88.4 R8, [R2]", "@!P0 BRA 0x0160", "HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR4], RZ, gsb0"]
    body += ["@P1 BRA 0x0100", "MOV R8, RZ", "EXIT", "@!P0 BRA 0x0160", "BRA 0x0120"]
    code = "\n".join(f"/*{16 * i:04x}*/   {text} ;" for i, text in enumerate(body, 16))
    assert lost_operands(code) == []


def test_spills_beside_products_are_counted():
    """Only the inner loop counts, not a store before it or a load in the loop around it."""
    body = ["STL [R1], R8", "HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR4], RZ", "LDL R8, [R1]", "@P0 BRA 0x0110"]
    body += ["LDL R9, [R1+0x4]", "@P1 BRA 0x0140", "@P2 BRA 0x0100"]
    code = "\n".join(f"/*{16 * i:04x}*/   {text} ;" for i, text in enumerate(body, 16))
    assert spills_beside_products(code, 1) == 1
