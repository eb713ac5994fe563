"""bench.amd: assembly and counters by hand, and real compilations for GPUs that this machine does not have."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.amd import candidates, rocprof
from bench.amd.assembly import counts, describe, facts, inner_loop, loops, multiply_adds, waves_per_simd
from errors import UserError
from kernels.flash2.tiles import PlainTiles
from tests.e2e import ROOT, python_path

LISTING = """\
	s_load_dwordx4 s[0:3], s[4:5], 0x0
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
	s_waitcnt lgkmcnt(0)
	global_load_dwordx4 v[0:3], v[4:5], off
	ds_write_b128 v6, v[0:3]
	ds_read2_b64 v[8:11], v6 offset1:1
	v_mfma_f32_32x32x8bf16_1k a[0:15], v[8:9], v[10:11], a[0:15]
	v_mfma_f32_16x16x16_bf16 a[16:19], v[8:9], v[10:11], a[16:19]
	v_exp_f32_e32 v12, v12
	s_cbranch_scc1 .LBB0_1
; %bb.2:
.LBB0_3:
	v_mfma_f32_32x32x8bf16_1k a[0:15], v[8:9], v[10:11], a[0:15]
	v_cndmask_b32_e32 v1, v2, v3, vcc
	buffer_load_dword v1, off, s[0:3], 0
	scratch_store_dword off, v1, s32
.LBB0_4:
	v_add_f32_e32 v1, v2, v3
	s_cbranch_scc1 .LBB0_4
	s_cbranch_vccnz .LBB0_5
	v_mov_b32_e32 v1, v2
	v_mov_b32_e32 v1, v2
	s_branch .LBB0_3
.LBB0_5:
	global_store_dwordx2 v[0:1], v[2:3], off
	s_endpgm
; TotalNumSgprs: 71
; NumVgprs: 100
; NumAgprs: 68
; TotalNumVgprs: 168
; ScratchSize: 16
; Occupancy: 3
"""


def test_registers_and_instructions_are_read_from_the_assembly():
    """Three loops: the second is inside the third and has no products. The first is the shortest one with products."""
    assert facts(LISTING) == {"sgpr": 71, "vgpr": 168, "agpr": 68, "scratch": 16}
    assert [len(body) for body in loops(LISTING)] == [8, 2, 10]
    assert inner_loop(LISTING) == loops(LISTING)[0]
    of_loop = {"mfma": 2, "lds_ops": 2, "vmem": 1, "valu": 1, "instructions": 8, "macs": 8192 + 4096}
    assert counts(inner_loop(LISTING)) == of_loop
    assert counts(loops(LISTING)[2]) == {
        "mfma": 1,
        "lds_ops": 0,
        "vmem": 2,
        "valu": 4,
        "instructions": 10,
        "macs": 8192,
    }
    assert describe(LISTING, 40960, 4) == facts(LISTING) | {"lds": 40960, "waves": 1.0} | of_loop
    assert multiply_adds("v_mfma_f32_32x32x4_2b_bf16") == 8192 and multiply_adds("v_add_f32") == 0


@pytest.mark.parametrize(
    ("vgpr", "sgpr", "lds", "warps", "waves"),
    [
        (168, 71, 0, 4, 3),  # 512 / 168
        (168, 71, 40960, 4, 1),  # one workgroup of 40 KiB in 64 KiB
        (129, 16, 0, 4, 3),  # 129 registers take 136
        (128, 16, 0, 4, 4),
        (24, 16, 0, 4, 8),  # the limit
        (24, 106, 0, 4, 7),  # 106 scalar registers take 112 of 800
        (168, 71, 0, 8, 2),  # 8 warps are 2 waves on each SIMD; the third wave has no partner
        (256, 71, 32768, 8, 2),
        (100, 71, 20480, 4, 3),  # 60 of 64 KiB
        (100, 71, 21504, 4, 3),  # 63 of 64 KiB
        (100, 71, 21848, 4, 2),  # rounds up to 22,016 bytes
        (128, 16, 0, 2, 4),  # two workgroups share the four SIMDs
        (128, 16, 32768, 2, 1),
    ],
)
def test_waves_per_simd(vgpr, sgpr, lds, warps, waves):
    assert waves_per_simd(vgpr, sgpr, lds, warps) == waves


HEADER = "Index,KernelName,gpu-id,SQ_INSTS_VALU,SQ_INSTS_VMEM_RD,SQ_INSTS_VMEM_WR,SQ_INSTS_LDS,SQ_LDS_BANK_CONFLICT,"
ROWS = [
    '0,"forward_kernel.kd",0,1000000,20000,5000,40000,10000,0,1000,17000,18000',
    '1,"forward_kernel.kd",0,3000000,30000,5000,40000,30000,0,20000,44000,45000',
    '2,"delta_kernel.kd",0,100,10,0,0,0,0,50000,50064,60000',
]


def csv_of(path: Path, rows: list[str], header: str = HEADER) -> Path:
    path.write_text("\n".join([f"{header}DispatchNs,BeginNs,EndNs,CompleteNs", *rows]) + "\n")
    return path


def test_counters_become_rates(tmp_path):
    """forward_kernel: 16 + 24 us, 4 million VALU instructions, 60,000 loads and stores of 64 x 16 bytes."""
    sums = rocprof.read(csv_of(tmp_path / "results.csv", ROWS))
    assert list(sums) == ["forward_kernel", "delta_kernel"]
    assert rocprof.rates(sums["forward_kernel"], 16) == {
        "launches": 2,
        "ms": pytest.approx(0.04),
        "gops": pytest.approx(4e6 * 64 / 40_000),
        "gb_per_s": pytest.approx(60_000 * 1024 / 40_000),
        "lds_ginsts": pytest.approx(2.0),
        "conflict_cycles": pytest.approx(0.5),
    }
    of_delta = rocprof.rates(sums["delta_kernel"], 4)
    assert of_delta["gb_per_s"] == 10 * 64 * 4 / 64 and of_delta["conflict_cycles"] == 0


@pytest.mark.parametrize(
    ("header", "rows", "said"),
    [
        (
            HEADER.replace("SQ_INSTS_LDS,", "OTHER,"),
            ROWS,
            "has no column SQ_INSTS_LDS; run rocprof with --timestamp on",
        ),
        (HEADER, [ROWS[0].replace("1000000", "many")], "has a broken row"),
        (HEADER, [ROWS[0].replace("1000000", "nan")], r"has a broken row \(nan is not a count\)"),
        (HEADER, [ROWS[0].replace("1000000", "-1")], r"has a broken row \(-1 is not a count\)"),
        (HEADER, [ROWS[0][:40]], "has a broken row"),
        (HEADER, [ROWS[0].replace("17000", "1000")], "has no time for forward_kernel; run rocprof with --timestamp on"),
        (HEADER, [], "has no rows; profile a run"),
    ],
    ids=["column", "number", "nan", "negative", "short row", "no time", "empty"],
)
def test_a_csv_file_that_does_not_fit_is_refused(tmp_path, header, rows, said):
    with pytest.raises(UserError, match=f"rocprof=.*{said}"):
        rocprof.read(csv_of(tmp_path / "results.csv", rows, header))


def test_a_missing_csv_file_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"rocprof=.*missing.csv cannot be read \(No such file"):
        rocprof.read(tmp_path / "missing.csv")


def test_the_best_tile_has_the_fewest_instructions_of_those_that_fit():
    fine = {"arch": "gfx90a", "head_dim": 64, "kernel": "forward", "status": "ok", "scratch": 0, "lds": 8192}
    fine |= {"waves": 2.0, "mfma": 8}
    bad = [{"scratch": 4}, {"waves": 0.0}, {"lds": 65537}, {"mfma": 0}, {"status": "failed"}]
    rows = [fine | {"cost": 0.1} | change for change in bad] + [fine | {"cost": cost} for cost in (4.0, 2.0, 3.0)]
    rows += [fine | {"cost": 1.1, "waves": 1.0}]  # counts as 2.2
    rows += [fine | {"kernel": "query_gradient", "cost": cost, "waves": 1.0} for cost in (9.0, 8.0)]
    candidates.mark_best(rows)
    assert [row["best"] for row in rows] == [False] * 6 + [True] + [False] * 3 + [True]


def bench_amd(*arguments: str) -> list[dict]:
    """Run the program without Triton's interpreter, and return its rows."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", "bench.amd", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "flash2 on AMD: compiled, not run" in done.stdout, done.stderr[-2000:]
    out = next(Path(argument.partition("=")[2]) for argument in arguments if argument.startswith("out="))
    return json.loads(out.read_text())["rows"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_shipped_tiles_fit_both_architectures(tmp_path):
    """Every kernel at head sizes 64 and 128 has no scratch memory."""
    rows = bench_amd(f"out={tmp_path / 'rows.json'}")
    assert len(rows) == 2 * 2 * len(PlainTiles._fields)
    for row in rows:
        assert row["best"] and candidates.fits(row) and row["work"] >= 1, row
