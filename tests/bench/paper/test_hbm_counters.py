"""The bytes that Nsight Compute reports, and the reasons why it reports none."""

import subprocess

import pytest

from bench.attention.rows import empty_row
from bench.paper import hbm_counters
from bench.paper.tables import hbm_traffic
from tests.bench.stopwatch import TINY

NCU = """==PROF== Connected to process 7 (/usr/bin/python3)
==PROF== Profiling "forward_kernel": 0%....100% - 1 pass
output of the process
==PROF== Disconnected from process 7
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","at::cuda::spin_kernel(long)","dram__bytes_read.sum","byte","64"
"0","at::cuda::spin_kernel(long)","dram__bytes_write.sum","byte","32"
"1","forward_kernel","dram__bytes_read.sum","byte","1,000"
"1","forward_kernel","dram__bytes_write.sum","byte","20"
"2","at::cuda::spin_kernel(long)","dram__bytes_read.sum","byte","64"
"2","at::cuda::spin_kernel(long)","dram__bytes_write.sum","byte","32"
"3","delta_kernel","dram__bytes_read.sum","byte","300"
"3","delta_kernel","dram__bytes_write.sum","byte","4"
"4","dkdv_kernel","dram__bytes_read.sum","byte","5"
"4","dkdv_kernel","dram__bytes_write.sum","byte","1"
"""


def ncu(monkeypatch, output, status=0):
    monkeypatch.setattr(hbm_counters.shutil, "which", lambda name: "/usr/bin/ncu")
    ended = subprocess.CompletedProcess([], status, output, "")
    monkeypatch.setattr(hbm_counters.subprocess, "run", lambda command, **_: ended)


def test_the_counters_of_all_kernels_of_a_call_are_added(monkeypatch):
    ncu(monkeypatch, NCU)
    found = hbm_counters.hbm_bytes([("flash2", TINY)], ["forward", "backward"], 1)
    assert found == ({("flash2", True, "forward"): (1000, 20), ("flash2", True, "backward"): (305, 5)}, None)


@pytest.mark.parametrize(
    ("output", "status", "reason"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", 1, "ERR_NVGPUCTRPERM - The user"),
        (NCU.replace('"byte","4"', '"","(!) n/a"'), 0, "ncu has no dram__bytes_write.sum"),
        ("==WARNING== No kernels were profiled.\n", 0, "ncu saw no kernel"),
        (NCU + "==ERROR== The application returned an error code (1).\n", 1, "The application returned an error"),
    ],
)
def test_counters_that_cannot_be_read_say_why(output, status, reason, monkeypatch):
    ncu(monkeypatch, output, status)
    found, why = hbm_counters.hbm_bytes([("flash2", TINY)], ["forward"], 1)
    assert found == {} and why.startswith(reason)


def test_without_ncu_the_table_says_so(monkeypatch):
    monkeypatch.setattr(hbm_counters.shutil, "which", lambda name: None)
    assert hbm_counters.hbm_bytes([("flash2", TINY)], ["forward"], 1) == ({}, "ncu not found")
    row = {"paper_bytes": 2_000_000_000, "counted_bytes": None, "sram_bytes": 233_472, "share": 1.0, "causal": False}
    row |= {"ms": 1.5, "status": "ok", "read_bytes": None, "written_bytes": None, "not_measured": "ncu not found"}
    made = hbm_traffic.markdown([empty_row(TINY, "sdpa_flash", "forward") | row])
    assert "| `sdpa_flash` | forward | 2 x 2 x 33 | 100.0% | - | 2.00 | - | - | - | 1.500 |" in made
    assert "M = 228 KiB" in made and "(not measured: ncu not found)" in made
