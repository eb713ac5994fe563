"""The numbers of the tables: fits on known data, and Markdown from made-up rows."""

import json

import numpy as np
import pytest

from bench.attention.rows import empty_row
from bench.common.formatting import at_least, at_most, cost_text, rounded, speed_text
from bench.common.timing import Cpu
from bench.paper import training_steps
from bench.paper.settings import PaperSettings
from bench.paper.tables import (
    TABLES,
    attention_memory,
    attention_speed,
    gpt2_contexts,
    gpt2_training,
    gpt3_training,
    grid_scaling,
    hbm_traffic,
    load_table,
    tile_sizes,
)
from kernels.naive.definition import standard_attention
from tests.bench.stopwatch import TINY, Stopwatch

FULL = PaperSettings()


def test_days_are_for_the_papers_budget_on_eight_devices():
    """400,000 x 512 x 1024 tokens are 2.097e11; at 8 x 100,000 a second they take 262,144 s."""
    assert training_steps.days(100_000) == pytest.approx(262_144 / 86_400)


def test_nothing_is_rounded_in_our_favour():
    assert (at_least(1.999), at_most(2.001), at_most(2.0)) == ("1.99", "2.01", "2.00")
    assert [speed_text(1234.56, ours, 0) for ours in (True, False)] == ["1,234", "1,235"]
    assert [cost_text(5.04, ours, 1) for ours in (True, False)] == ["5.1", "5.0"]


def test_small_numbers_keep_two_digits():
    """A CPU's TFLOP/s, rounded to whole numbers, were 1 for rivals and 0 for flash2."""
    assert [speed_text(0.00423, ours, 0) for ours in (True, False)] == ["0.0042", "0.0043"]
    assert [speed_text(7.96, ours, 0) for ours in (True, False)] == ["7.9", "8.0"]
    assert (rounded(1.234e-5), rounded(0.0), at_most(0.0, 0)) == ("0.000012", "0.00", "0")


def speed_row(trainer, attention, model, context, speed, status="ok"):
    row = training_steps.speed_cell(trainer, attention, model, context, 32, FULL)
    return row | {"tokens_per_second": speed, "tflops": 123.6, "peak_gib": 5.04, "status": status}


def test_gpt2s_table_has_ours_beside_the_papers():
    """Our numbers are rounded against us, the others in their favour: 3.034, 1.0117 days, 2.999 times."""
    rows = [
        speed_row("huggingface", "naive", "gpt2", 1024, 100_000),
        speed_row("ours", "naive", "gpt2", 1024, None, status="oom"),
        speed_row("ours", "flash1", "gpt2", 1024, 299_900),
        speed_row("ours", "flash2", "gpt2", 1024, 299_900),
    ]
    made = gpt2_training.markdown(rows)
    assert "Hugging Face, eager | 100,000 | 124 | 5.0 | 3.03 | 1.00 | - | Huggingface | 18.2 | 9.5 | 1.0 |" in made
    assert "| gpt2 | `naive` | OOM | OOM | OOM | - | - | - | - | - | - | - |" in made
    assert "| gpt2 | `flash1` | 299,900 | 124 | 5.0 | 1.01 | 3.00 | - | FlashAttention | 18.2 | 2.7 | 3.5 |" in made
    assert "| gpt2 | `flash2` | 299,900 | 123 | 5.1 | 1.02 | 2.99 |" in made
    assert "Perplexity: validation, needs tokens=FOLDER." in made


def test_contexts_are_compared_with_the_fused_softmax_at_the_shortest():
    speeds = [("fused_softmax", 1024, 200_000), ("flash2", 1024, 350_000), ("flash2", 4096, 250_000)]
    made = gpt2_contexts.markdown([speed_row("ours", name, "gpt2", n, speed) for name, n, speed in speeds])
    assert "| `fused_softmax` | 1,024 | 200,000 | 124 | 1.51 | 1.00 | Megatron-LM 1k | 18.2 | 4.7 | 1.0 |" in made
    assert "| `flash2` | 4,096 | 250,000 | 123 | 1.22 | 1.25 | FlashAttention 4k | 17.5 | 3.6 | 1.3 |" in made


def test_gpt3s_table_has_tflops_and_what_ran_out_of_memory():
    rows = [
        speed_row("ours", "naive", "gpt3-2.7b", 8192, None, status="oom"),
        speed_row("ours", "flash2", "gpt3-2.7b", 8192, 1000),
    ]
    assert "| gpt3-2.7b | 8k | OOM | - | - | - | 123 | 80 | 175 | 225 |" in gpt3_training.markdown(rows)


def test_the_full_tables_have_the_cells_of_the_papers():
    of_gpt2 = gpt2_training.cells(FULL)
    assert [cell["model"] for cell in of_gpt2] == ["gpt2"] * 6 + ["gpt2-medium"] * 6
    assert {training_steps.label(cell) for cell in of_gpt2} == set(gpt2_training.NAMES)
    shapes = {(cell["model"], cell["context_length"]) for cell in gpt3_training.cells(FULL)}
    assert shapes == set(gpt3_training.PAPER) and len(gpt3_training.cells(FULL)) == 4 * 5
    contexts = [(c["attention"], c["context_length"], c["batch_size"]) for c in gpt2_contexts.cells(FULL)]
    assert contexts == [("fused_softmax", 1024, 32), ("flash2", 1024, 32), ("flash2", 2048, 16), ("flash2", 4096, 8)]
    assert len(attention_speed.cells(FULL)) == 4 and len(hbm_traffic.cells(FULL)) == 3
    every = [cell for name in TABLES for cell in load_table(name).cells(FULL)]
    assert json.loads(json.dumps(every)) == every


def test_speeds_are_listed_by_pass_and_out_of_memory_is_shown():
    cell = attention_speed.cells(FULL)[0]
    shape = TINY
    rows = [cell | empty_row(shape, "naive", pass_) | {"status": "ok", "tflops": 12.3} for pass_ in ("forward", "both")]
    rows += [cell | empty_row(shape, "naive", "backward") | {"status": "oom"}]
    assert "| causal | 16 | 33 | 2 x 2 | 13 / OOM / 13 |" in attention_speed.markdown(rows)


def test_a_fit_has_its_largest_error():
    """Of sizes 10 and 30 at 1 and 2: the errors of a n, a / 10 - 1 and a / 15 - 1, are least at a = 150 / 13."""
    lengths = [512, 1024, 2048, 4096]
    assert attention_memory.fit(lengths, [2 * n * n for n in lengths], 2) == pytest.approx((2, 0))
    assert attention_memory.fit([1, 2], [10, 30], 1) == pytest.approx((150 / 13, 3 / 13))


def test_a_length_that_ran_out_of_memory_does_not_change_the_fit():
    rows = [{"variant": "flash2", "seq_len": n, "peak_mib": n / 64, "status": "ok"} for n in (512, 1024, 2048)]
    rows += [{"variant": "flash2", "seq_len": 4096, "peak_mib": None, "status": "oom"}]
    assert "| `flash2` | 8.0 | 16.0 | 32.0 | OOM | 16.00 | 0.0% | 10.67 | 66.7% |" in attention_memory.markdown(rows)


def test_memory_is_read_after_autograds_thread_released_the_call_before(monkeypatch):
    class Lingering(Stopwatch):
        """A thread holds 2 MiB after a call until it gets its next task."""

        lingers = False

        def allocated(self):
            return super().allocated() + self.lingers * 2**21

        def wake(self):
            self.lingers = False

    def attention(*inputs, **options):
        gpu.lingers = True
        return standard_attention(*inputs, **options)

    gpu = Lingering()
    monkeypatch.setattr(attention_memory, "attention_named", lambda name: attention)
    rows = list(attention_memory.measure({"variant": "naive"}, gpu, PaperSettings(size="smoke")))
    assert [row["peak_mib"] for row in rows] == [3.0] * 2


def test_peak_memory_on_a_cpu_counts_what_is_alive_at_once():
    def call():
        a = np.zeros(1)  # not torch's
        b = attention_memory.draw_inputs(TINY, "cpu").q  # q, k, v and dout are alive together
        del a, b

    sizes = attention_memory.draw_inputs(TINY, "cpu")
    assert 4 * sizes.q.nbytes <= Cpu().peak(call) < 6 * sizes.q.nbytes


def test_the_slope_is_the_exponent():
    assert grid_scaling.slope({n: 3e-4 * n**2 for n in (512, 1024, 4096)}) == pytest.approx(2)


def test_tiles_are_listed_with_their_resources_and_the_fastest_is_marked():
    found = {"registers": 168, "spills": 0, "shared_bytes": 49152, "resident_blocks": 2}
    rows = [
        {"B_r": 64, "B_c": 64, "warps": 4, "ms": 1.25, "tflops": 100.0, "status": "ok", **found},
        {"B_r": 64, "B_c": 128, "warps": 4, "ms": 1.5, "tflops": 83.0, "status": "ok", **found},
        {"B_r": 64, "B_c": 256, "warps": 4, "status": "oom", "message": "out of resource: shared memory"},
    ]
    made = tile_sizes.markdown(rows)
    assert "| 64 | 64 | 4 | **1.250** | 100.0 | 168 | 0 | 49152 | 2 |" in made
    assert "| 64 | 128 | 4 | 1.500 |" in made
    assert "| 64 | 256 | 4 | does not fit | - | - | - | - | - |" in made
    assert "GB/s" not in made, "rows of older releases have no bytes"


def test_tiles_have_their_limits_and_the_speed_of_caches_and_shared_memory():
    """In a millisecond, 10^9 bytes are 1,000 GB/s; an access of a warp to shared memory is 128 bytes."""
    row = {"B_r": 64, "B_c": 64, "warps": 4, "ms": 1.0, "tflops": 100.0, "status": "ok", "resident_blocks": 4}
    row |= {
        "limits": {"registers": 4, "shared memory": 6, "warps": 16, "programs": 32},
        "occupancy": 0.25,
        "waves": 15.5,
    }
    row["computed"] = {"cached": 10**9, "shared_stored": 2 * 10**9, "shared_loaded": 4 * 10**9}
    made = tile_sizes.markdown([row | {"counters": None, "not_measured": "ncu not found"}])
    assert "| 4 | 4, 6, 16 | registers | 25.0% | 15.5 |" in made
    assert "L2, GB/s (computed)" in made and "| 64 | 64 | - | 1,000 | 1,000 | 4,000 | 2,000 |" in made
    assert "The counters were not read: ncu not found." in made
    counters = {"achieved": 23.4, "l1": 3e9, "l2": 2e9, "shared_loads": 10**7, "shared_stores": 5 * 10**6}
    made = tile_sizes.markdown([row | {"counters": counters, "not_measured": None}])
    assert "| 64 | 64 | 23.4% | 3,000 | 2,000 | 1,280 | 640 |" in made and "computed)" not in made


def test_waves_have_a_panel_and_a_table_of_their_own():
    """The other tables of that page must not take their rows, which also have heads."""
    shape = {"grows": grid_scaling.WAVES, "pass": "forward", "batch": 1, "seq_len": 512, "multiprocessors": 132}
    rows = [
        shape | {"variant": v, "heads": n, "ms": n / 1e3, "status": "ok"}
        for v in ("flash1", "flash2")
        for n in (12, 24)
    ]
    made = grid_scaling.markdown(rows)
    assert "with sequence length 512, batch 1; milliseconds:" in made and "| 24 | 0.0240 | 0.0240 |" in made
    assert made.count("| 24 |") == 1
    panel = grid_scaling.pictures(rows, "GPU")[""].axes[-1]
    assert [list(line.get_xdata()) for line in panel.lines] == [[12, 24]] * 2
    assert len(grid_scaling.pictures([row | {"status": "failed"} for row in rows], "GPU")[""].axes) == 3


def test_the_law_of_l2_is_a_line_through_zero():
    row = {"batch": 1, "heads": 1, "seq_len": 1024, "B_c": 64, "ms": 1.0, "status": "ok", "l2_bytes": None}
    rows = [row | {"B_r": n, "l2_computed": 10**9 // n, "not_measured": "ncu not found"} for n in (64, 16, 32)]
    assert "L2 moves (not measured: ncu not found)" in hbm_traffic.markdown(rows)
    law, computed = hbm_traffic.pictures(rows, "GPU")[""].axes[0].lines
    x, y = law.get_xdata(), law.get_ydata()
    assert (x[0], y[0]) == (0, 0) and y[1:] / x[1:] == pytest.approx([y[-1] * 16] * 3)
    assert list(computed.get_xdata()) == [1 / 16, 1 / 32, 1 / 64]
