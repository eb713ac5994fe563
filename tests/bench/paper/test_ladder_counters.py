"""The counters of the ladder's steps: from ncu's output to the table, and what happens without some or all of them."""

import subprocess

import pytest

from bench.attention.shapes import AttentionShape
from bench.paper import hbm_counters, ladder_counters
from bench.paper.ladder_counters import COUNTS, METRICS, PERCENT, TIME, WAVES
from bench.paper.tables import ladder
from tests.bench.stopwatch import Stopwatch

SHAPE = AttentionShape("ladder", batch=2, seq_len=4096, heads=32, head_dim=64)
COLUMNS = "ID,Process ID,Process Name,Host Name,Kernel Name,Context,Stream,Block Size,Grid Size,Device,CC,Section Name"
COLUMNS += ",Metric Name,Metric Unit,Metric Value"
MARK = "at::cuda::spin_kernel(long)"
# Time, waves and the rest of three kernels: two of the first step and one of the second.
SCORES = {TIME: 3000.0, WAVES: 124.1, PERCENT["l1"]: 90.0, PERCENT["tensor"]: 0.0}
SCORES |= {COUNTS["load_sectors"]: 32e6, COUNTS["load_requests"]: 1e6}
SOFTMAX = SCORES | {TIME: 1000.0, WAVES: 4.0, PERCENT["l1"]: 50.0, COUNTS["load_requests"]: 3e6}
FUSED = {TIME: 500.0, WAVES: 7.75, PERCENT["l1"]: 40.0, PERCENT["tensor"]: 62.25}
FUSED |= {COUNTS["shared_loads"]: 1_500_000.0, COUNTS["load_conflicts"]: 250_000.0}
FUSED |= {COUNTS["shared_stores"]: 500_000.0, COUNTS["store_conflicts"]: 250_000.0}
KERNELS = [(MARK, {}), ("scores_kernel", SCORES), ("softmax_kernel", SOFTMAX), (MARK, {}), ("kernel", FUSED)]


def output_of(kernels, unknown=()):
    """Return what ncu prints with --csv: a line per kernel and metric. Other metrics are 0."""
    lines = ["==PROF== Connected to process 7 (/usr/bin/python3)", ",".join(f'"{x}"' for x in COLUMNS.split(","))]
    for i, (kernel, found) in enumerate(kernels):
        fixed = i, 7, "python3", "127.0.0.1", kernel, 1, 7, "(128, 1, 1)", "(64, 64, 1)", 0, "9.0"
        for metric in METRICS:
            value = "(!) n/a" if metric in unknown else f"{found.get(metric, 0):,}"
            cells = *fixed, "Command line profiler metrics", metric, "", value
            lines.append(",".join(f'"{x}"' for x in cells))
    return "\n".join(lines) + "\n"


@pytest.fixture
def profile(monkeypatch):
    """Measure a ladder of two steps and no GPU, with an ncu that answers with these outputs. Return its page."""

    def measured(*outputs) -> tuple[str, list[list[str]]]:
        commands, answers = [], iter(outputs)

        def run(command, **_):
            commands.append(command)
            answer = next(answers)
            return subprocess.CompletedProcess(command, int("==ERROR==" in answer), answer, "")

        gpu = Stopwatch()
        gpu.device = "cuda"
        monkeypatch.setattr(hbm_counters.shutil, "which", lambda name: "/usr/bin/ncu" if outputs else None)
        monkeypatch.setattr(hbm_counters.subprocess, "run", run)
        monkeypatch.setitem(ladder.STEPS, "forward", ("step_01_scores",))
        monkeypatch.setattr(ladder_counters, "run_once", lambda *_: None)
        cell = {"measured": "counters", "pass": "forward"}
        rows = [{**cell, **row} for row in ladder_counters.measure_counters("forward", [SHAPE], gpu, 1)]
        assert {row["status"] for row in rows} == {"ok"}
        return ladder.markdown(rows), commands

    return measured


def line_of(page: str, title: str) -> list[str]:
    (line,) = (line for line in page.splitlines() if line.startswith(f"| {title} |"))
    return line.strip("| ").split(" | ")[1:]


def test_the_counters_of_a_step_come_from_all_its_kernels(profile):
    """Percentages are weighted by time, counts are added up, and waves are of the longest kernel."""
    page, _ = profile(output_of(KERNELS))
    assert "## Counters of the forward pass, 2 x 32 causal heads of 64, 4,096 tokens" in page
    step = dict(zip(ladder_counters.HEADER, line_of(page, "01 scores"), strict=True))
    assert (step["L1"], step["waves/SM"], step["sectors/load"], step["sectors/store"]) == (
        "80.0%",
        "124.1",
        "16.0",
        "-",
    )
    assert step["shared efficiency"] == "-" and step["tensor pipe"] == "0.0%"
    shipped = dict(zip(ladder_counters.HEADER, line_of(page, "flash2 (ours)"), strict=True))
    assert (shipped["L1"], shipped["tensor pipe"], shipped["waves/SM"]) == ("40.0%", "62.2%", "7.8")
    conflicts = [shipped[key] for key in ("conflicts of loads, M", "of stores, M", "shared efficiency")]
    assert conflicts == ["0.25", "0.25", "75.0%"]


def test_a_metric_without_a_value_is_a_dash_and_keeps_the_others(profile):
    unknown = PERCENT["tensor"], COUNTS["store_conflicts"], WAVES
    page, _ = profile(output_of(KERNELS, unknown))
    shipped = dict(zip(ladder_counters.HEADER, line_of(page, "flash2 (ours)"), strict=True))
    assert [shipped[key] for key in ("tensor pipe", "of stores, M", "shared efficiency", "waves/SM")] == ["-"] * 4
    assert (shipped["L1"], shipped["conflicts of loads, M"]) == ("40.0%", "0.25")


def test_a_metric_that_ncu_refuses_is_left_out_of_a_second_run(profile):
    refused = PERCENT["l1"]
    error = f"==ERROR== Failed to find metric regex:^{refused.split('.')[0]}.(sum|avg)$\n"
    page, commands = profile(error, output_of(KERNELS, [refused]))
    assert [refused in command[command.index("--metrics") + 1] for command in commands] == [True, False]
    step = dict(zip(ladder_counters.HEADER, line_of(page, "01 scores"), strict=True))
    assert (step["L1"], step["L2"], step["sectors/load"]) == ("-", "0.0%", "16.0")


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ((), "ncu not found"),
        (("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n",), "ERR_NVGPUCTRPERM - The user does not"),
    ],
)
def test_without_counters_the_page_has_one_sentence_with_the_reason(profile, outputs, reason):
    page, _ = profile(*outputs)
    assert page.count(f"The GPU's counters were not read: {reason}") == 1 and "Counters of the" not in page


def test_a_step_that_raises_is_a_failed_row_and_not_given_to_ncu(monkeypatch):
    def call_of(name, *_):
        if name == "step_01_broken":
            raise RuntimeError("no such instruction")
        return lambda: None

    given = []
    gpu = Stopwatch()
    monkeypatch.setattr(ladder_counters, "draw_inputs", lambda *_: None)
    monkeypatch.setattr(ladder_counters, "call_of", call_of)
    monkeypatch.setattr(ladder_counters, "compile_together", list)
    monkeypatch.setattr(ladder_counters, "profiled", lambda calls, *_: (given.extend(calls) or [[FUSED]], None))
    monkeypatch.setitem(ladder.STEPS, "forward", ("step_01_broken",))
    gpu.device = "cuda"
    broken, shipped = ladder_counters.measure_counters("forward", [SHAPE], gpu, 1)
    assert (broken["status"], broken["message"], broken["counters"]) == ("failed", "no such instruction", None)
    assert given == [(SHAPE, "flash2", "forward", None)] and shipped["counters"]["tensor"] == 62.25
