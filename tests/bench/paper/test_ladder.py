"""The table of the ladder, with made-up steps: each is checked, timed and compared with the step before it."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import JITFunction

from bench.attention.rows import empty_row
from bench.attention.shapes import AttentionShape
from bench.paper import ladder_steps, launches
from bench.paper.occupancy import Limits
from bench.paper.settings import PaperSettings
from bench.paper.tables import ladder
from errors import UserError
from kernels.naive.definition import standard_attention
from tests.bench.stopwatch import TINY, Stopwatch

SMOKE = PaperSettings(size="smoke")
CELL = {"measured": "kernel", "pass": "forward"}
HOPPER = Limits(registers=65536, shared_bytes=228 * 1024, reserved_bytes=1024, threads=2048, programs=32)


def exact(q, k, v, causal):
    return standard_attention(q, k, v, causal=causal, scale=q.shape[3] ** -0.5).detach()


@pytest.fixture
def climb(monkeypatch):
    """Measure a forward ladder of made-up steps, by name, with no other kernels."""

    def measured(gpu=None, **steps) -> dict[str, dict]:
        monkeypatch.setitem(ladder.STEPS, "forward", tuple(steps))
        monkeypatch.setattr(ladder.ladder, "FORWARD", tuple(steps))
        monkeypatch.setattr(ladder, "RIVALS", ())
        monkeypatch.setattr(ladder.ladder, "load", lambda name: SimpleNamespace(forward=steps[name]))
        return {row["variant"]: row for row in ladder.measure(CELL, gpu or Stopwatch(), SMOKE)}

    return measured


def test_a_step_that_is_wrong_or_raises_is_a_failed_row_and_the_others_go_on(climb):
    def raising(*_):
        raise RuntimeError("no such\ninstruction")

    rows = climb(
        step_01_wrong=lambda *x: 1.1 * exact(*x),
        step_02_unwritten=lambda q, *_: q.new_empty(q.shape),
        step_03_raising=raising,
        step_04_right=exact,
    )
    assert [row["status"] for row in rows.values()] == ["failed"] * 3 + ["ok"]
    assert rows["step_01_wrong"]["message"].startswith("out is off by 1.0e-01")
    assert rows["step_02_unwritten"]["message"] == "out is not finite"
    assert rows["step_03_raising"]["message"] == "no such"
    assert 0 < rows["step_04_right"]["error"] < 1e-3 and rows["step_04_right"]["ms"] == 2.0
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_slow_step_has_few_samples(climb):
    calls = dict.fromkeys(("slow", "fast"), 0)

    class Clock(Stopwatch):
        def milliseconds(self, call, calls, spin_ms):
            return 1000.0 if call() is None else 1.0

    def step(name):
        def forward(*inputs):
            calls[name] += 1
            return exact(*inputs) if name == "fast" or calls[name] == 1 else None

        return forward

    rows = climb(Clock(), step_01_slow=step("slow"), step_02_fast=step("fast"))
    assert calls["slow"] == 1 + 1 + ladder.SLOW_ROUNDS  # the check, the first timing and the samples
    assert (rows["step_01_slow"]["ms"], rows["step_02_fast"]["ms"]) == (1000.0, 1.0)


def test_one_process_measures_all_head_sizes_and_masks_of_a_pass_and_forward_comes_first(monkeypatch):
    forward, backward, *others = ladder.cells(PaperSettings())
    assert (forward, backward) == (CELL, CELL | {"pass": "backward"}) and others[-1] == {"measured": "training"}
    monkeypatch.setitem(ladder.SIZES, "full", ladder.SIZES["smoke"])
    monkeypatch.setitem(ladder.ROUNDS, "full", 1)
    monkeypatch.setitem(ladder.STEPS, "forward", ("step_01_any",))
    monkeypatch.setattr(ladder.ladder, "FORWARD", ("step_01_any",))
    monkeypatch.setattr(ladder.ladder, "load", lambda name: SimpleNamespace(forward=exact))
    monkeypatch.setattr(ladder, "RIVALS", ())
    rows = [{**forward, **row} for row in ladder.measure(forward, Stopwatch(), PaperSettings())]
    assert [(row["head_dim"], row["causal"], row["status"]) for row in rows] == [(*x, "ok") for x in ladder.PANELS]


def test_a_triton_without_gluon_is_refused_in_one_sentence(climb, monkeypatch):
    monkeypatch.setattr(ladder_steps, "triton_version", lambda: (3, 5))
    with pytest.raises(UserError, match=r"triton=.* is too old for kernels/ladder; install Triton 3\.6 or later"):
        ladder_steps.step_named("step_01")
    assert climb(step_01_any=exact)["step_01_any"]["status"] == "failed"


def test_the_table_has_gains_over_the_step_before_and_the_resources_of_each_kernel(monkeypatch):
    monkeypatch.setitem(
        ladder.STEPS, "forward", ("step_01_slow", "step_02_broken", "step_03_two_kernels", "step_04_last")
    )
    shape = AttentionShape("ladder", batch=4, seq_len=4096, heads=32, head_dim=64)
    kernel = {"registers": 168, "spills": 0, "shared_bytes": 49152, "warps": 4, "resident": 3, "limit": "registers"}
    kernel |= {"occupancy": 12 / 64, "waves": 5.17}
    rows = []
    for name, ms, kernels in [
        ("step_01_slow", 100.0, [kernel]),
        ("step_02_broken", None, None),
        ("step_03_two_kernels", 8.0, [kernel, kernel | {"registers": 32, "spills": 12, "limit": "warps"}]),
        ("step_04_last", 3.0, [kernel]),
        ("sdpa_flash", 2.5, None),
    ]:
        found = {"ms": ms, "tflops": ms and 1000 / ms, "peak_share": ms and 1 / ms, "kernels": kernels}
        status = {"status": "ok"} if ms else {"status": "failed", "message": "lost"}
        rows.append({"measured": "kernel"} | empty_row(shape, name, "forward") | found | status)
    trained = {"measured": "training", "variant": "step_15_atomics", "model": "gpt2", "context_length": 1024}
    rows.append(trained | {"tokens_per_second": 123_456.7, "peak_gib": 39.01, "status": "ok"})
    made = ladder.markdown(rows)
    assert "| 01 slow | 10 | - |\n| 02 broken | FAILED | - |\n| 03 two kernels | 125 | - |" in made
    assert "| 04 last | 333 | 2.66 |\n| SDPA FlashAttention-2 | 400 | - |" in made
    assert "| 15 atomics | 123,456 | 39.1 |" in made
    assert "| 01 slow | 100.000 | 10.0 | - | 1.0% | 168 | 0 | 48.0 | 4 | 3 (registers) | 19% | 5.2 |" in made
    assert "| 168 / 32 | 0 / 12 | 48.0 / 48.0 | 4 / 4 | 3 (registers) / 3 (warps) |" in made
    assert list(ladder.pictures(rows, "a GPU")) == ["-forward"]


def test_the_launches_of_a_call_are_listed(monkeypatch):
    compiled = SimpleNamespace()
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, grid, warmup, **options: compiled)
    launching = launches.launching
    monkeypatch.setattr(launching, "compiled_kernels", {"key": "a kernel that would bypass Triton's launcher"})
    with launches.launches() as found:
        assert JITFunction.run(SimpleNamespace(__name__="kernel"), grid=(99, 8), warmup=False) is compiled
        assert launching.compiled_kernels == {}
    JITFunction.run(SimpleNamespace(__name__="later"), grid=(1,), warmup=False)
    assert found == [("kernel", compiled, 99 * 8)]


def test_a_checked_step_has_the_resources_of_its_kernels(monkeypatch):
    """96 registers and 73,752 bytes allow 3 programs of 4 warps, and 792 programs are two waves on 132 SMs."""
    metadata = SimpleNamespace(num_warps=4, shared=73_752)
    compiled = SimpleNamespace(metadata=metadata, n_regs=96, n_spills=0)
    has = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: has)
    monkeypatch.setattr(launches, "device_limits", lambda: HOPPER)
    monkeypatch.setattr(ladder, "launches", lambda: nullcontext([launches.Launch("kernel", compiled, 792)]))
    monkeypatch.setattr(ladder, "judge", lambda *_: 0.0)
    assert ladder.checked({"variant": "flash2", "pass": "forward"}, lambda: torch.zeros(1), TINY, None) == [
        {
            "kernel": "kernel",
            "warps": 4,
            "registers": 96,
            "spills": 0,
            "shared_bytes": 73_752,
            "resident": 3,
            "limit": "shared memory",
            "occupancy": 12 / 64,
            "waves": 2.0,
        }
    ]


def test_kernels_are_compiled_side_by_side_and_not_launched(monkeypatch):
    """A call that raises does not stop the others. Its error comes again at its launch."""
    runs = []

    def run(self, *args, grid, warmup, **options):
        runs.append((self, warmup, active_mode.get() is not None))

    def raising():
        JITFunction.run("first", grid=(1,), warmup=False)
        raise RuntimeError

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(launches.launching, "compiled_kernels", {"key": "a promise"})
    launches.compile_together([raising, lambda: JITFunction.run("second", grid=(1,), warmup=False)])
    assert runs == [("first", True, True), ("second", True, True)] and launches.launching.compiled_kernels == {}
    JITFunction.run("later", grid=(1,), warmup=False)
    assert runs[-1] == ("later", False, False)
