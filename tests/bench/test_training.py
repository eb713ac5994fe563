"""bench.training without a GPU: tiny models, and a stopwatch for a clock."""

import json
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench import environment, floor, steps, trainers, training
from bench.breakdown import class_of, covered, summarise
from bench.timing import Cpu
from bench.trainers import Cell, Trainer
from errors import UserError
from kernels.flash2 import flash2
from model.gpt2 import ModelConfig
from tests.bench.stopwatch import Stopwatch

EAGER = {"ours": Trainer("ours", "flash2", False), "huggingface": Trainer("huggingface", "naive", False)}


@pytest.fixture
def cell(monkeypatch):
    shape = ModelConfig(n_layer=2, n_head=2, n_embd=32, context_length=16, vocab_size=trainers.VOCABULARY)
    monkeypatch.setattr(Cell, "shape", lambda self: shape)
    return Cell("gpt2", 16, (1, 2, 4))


@pytest.mark.parametrize("name", EAGER)
def test_a_step_changes_every_weight_and_a_parked_trainer_holds_none(name, cell):
    job = {"ours": trainers.ours, "huggingface": trainers.huggingface}[name](cell, EAGER[name], "cpu")
    before = {name: p.clone() for name, p in job.model.named_parameters()}
    job.step(2)
    assert all(not torch.equal(p, before[name]) for name, p in job.model.named_parameters())
    job.park()
    tensors = [*job.model.parameters(), *(x for s in job.optimizer.state.values() for x in s.values() if x.ndim)]
    assert len(tensors) == 3 * len(before) and sum(x.untyped_storage().size() for x in tensors) == 0
    job.resume()
    assert all(p.eq(1).all() for n, p in job.model.named_parameters() if "ln_" in n and n.endswith("weight"))
    job.step(1)
    assert all(p.isfinite().all() for p in job.model.parameters())


class Job:
    """Takes steps whose speed the stopwatch decides."""

    def __init__(self, fails_at=None):
        self.fails_at, self.log = fails_at, []

    def step(self, batch):
        self.log.append(batch)
        if batch == self.fails_at:
            raise torch.OutOfMemoryError("of course")

    def park(self):
        self.log.append("park")

    def resume(self):
        self.log.append("resume")


def test_the_search_ends_where_the_speed_falls(cell):
    """First steps and second ones in turn: 16 tokens in 10 ms, 32 in 10 ms, 64 in 50 ms."""
    job, gpu = Job(), Stopwatch([9000.0, 10.0, 8000.0, 10.0, 7000.0, 50.0])
    rows, best = steps.search(cell, EAGER["ours"], lambda: job, gpu)
    assert [row["tokens_per_second"] for row in rows] == pytest.approx([1600, 3200, 1280])
    assert [row["first_step_s"] for row in rows] == [9, 8, 7]
    assert [row["best"] for row in rows] == [False, True, False]
    assert best.row is rows[1] and best.steps == steps.MOST_STEPS and job.log[-1] == "park"


def test_memory_is_that_of_a_step_with_the_moments_that_the_first_one_leaves(cell):
    class Growing(Stopwatch):
        def peak(self, call):
            call()
            return 2**30 * len(job.log)

    job = Job()
    rows, _ = steps.search(replace(cell, batches=(1,)), EAGER["ours"], lambda: job, Growing())
    assert (rows[0]["peak_gib"], rows[0]["peak_of"]) == (2, "second step")


def test_the_search_ends_where_memory_is_out(cell):
    rows, best = steps.search(cell, EAGER["ours"], lambda: Job(fails_at=2), Stopwatch([1.0, 100.0]))
    assert [row["status"] for row in rows] == ["ok", "oom"]
    assert best.row is rows[0] and best.steps == 6  # which fill 0.6 s


def test_a_first_step_of_minutes_is_the_only_one(cell):
    rows, best = steps.search(cell, EAGER["ours"], Job, Stopwatch([121e3] * 3))
    assert rows[0]["ms"] == 121e3 and rows[0]["message"] and best.steps == 0
    steps.alternate(cell, [best], rounds=2, gpu=Stopwatch())
    assert "samples" not in best.row


def test_contenders_are_timed_in_turn_each_alone(cell):
    jobs = [Job(), Job()]
    contenders = [steps.Contender(steps.empty_row(cell, EAGER["ours"], 2), job, 3) for job in jobs]
    steps.alternate(cell, contenders, rounds=3, gpu=Stopwatch([1.0, 10.0, 3.0, 30.0, 2.0, 90.0]))
    assert [contender.row["ms"] for contender in contenders] == [2, 30]
    assert jobs[0].log == jobs[1].log == ["resume", 2, "park"] * 3


def test_the_floor_is_every_product_of_the_model_and_the_fastest_attention(cell, monkeypatch):
    """Counted in multiplications, 6 a weight and token: those of 2 layers of 12 x 32^2 weights and of the head."""
    with FlopCounterMode(display=False) as counter:
        floor.products(cell, 2, "cpu")()
    assert counter.get_total_flops() == 6 * 2 * 16 * (2 * 12 * 32**2 + trainers.PADDED * 32)
    variants = {"slow": lambda *given, **options: time.sleep(0.02) or flash2(*given, **options), "flash2": flash2}
    parts = floor.contenders(cell, 2, variants, Cpu())
    steps.alternate(cell, list(parts.values()), rounds=1, gpu=Stopwatch([5.0, 3.0]))
    row = floor.row_of(cell, parts)
    assert row["parts_ms"] == {"matmul": 5, "attention": 3} and row["ms"] == 8
    assert (row["attention"], row["batch_size"], row["status"]) == ("flash2", 2, "ok")
    assert all(part.job.call is None for part in parts.values())


def test_speed_memory_and_floor_are_compared_at_the_best(cell):
    def row(trainer, attention, batch, speed, gib, best=True, compiled=True):
        made = steps.empty_row(cell, Trainer(trainer, attention, compiled), batch)
        return made | {"tokens_per_second": speed, "peak_gib": gib, "best": best, "status": "ok"}

    rows = [
        row("ours", "flash2", 2, 500.0, 3.0, best=False),
        row("ours", "flash2", 4, 600.0, 5.0),
        row("nanogpt", "sdpa", 2, 400.0, 6.0),
        row("huggingface", "naive", 1, 100.0, 9.0, compiled=False),
        row("floor", "flash2", 4, 800.0, None, best=False, compiled=False),
    ]
    text = training.ratios(rows)
    assert text.startswith("1.500 x nanogpt:sdpa, 6.000 x huggingface:naive:eager, 75.0% of the floor")
    assert text.endswith("; memory x nanogpt:sdpa 0.50 at batch 2")


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("main_kernel", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<...>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention"),
        ("triton_red_fused__softmax__to_copy_masked_fill_3", "attention"),
        ("cross_entropy_kernel", "head and loss"),
        ("triton_red_fused__log_softmax__log_softmax_backward_data__to_copy_nll_loss_backward", "head and loss"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "matmul"),
        ("void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata>", "optimizer"),
        ("gelu_gradient_kernel", "normalisation and elementwise"),
        ("linear_gelu_kernel", "matmul"),
        ("triton_per_fused__to_copy_add_native_layer_norm_5", "normalisation and elementwise"),
    ],
)
def test_a_kernel_is_told_by_its_name(kernel, kind):
    assert class_of(kernel) == kind


def test_idle_is_what_no_kernel_covers():
    assert covered([(0, 10), (5, 12), (20, 25), (21, 22)]) == 17
    kernels = [("nvjet", 0, 4000), ("gelu_kernel", 3000, 5000), ("main_kernel", 9000, 10000)]
    parts = summarise(kernels, steps=2)
    assert (parts["matmul"], parts["attention"], parts["idle"]) == (2, 0.5, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--cells", "gpt5"], "--cells gpt5 is unknown"),
        (["--trainers", "ours:magic"], "--trainers ours:magic is unknown"),
        (["--nanogpt", "nowhere.py"], "--nanogpt nowhere.py does not exist"),
    ],
)
def test_what_is_unknown_is_refused_before_anything_is_measured(given, message):
    with pytest.raises(UserError, match=message):
        training.run(training.parse(given))


def test_without_its_file_nanogpt_is_left_out():
    chosen = training.chosen_trainers(training.parse([]), Cell("gpt2", 2048, (1,)))
    assert list(map(str, chosen)) == ["ours:flash2"]


def test_rows_of_other_cells_stay_unless_they_are_of_another_machine(tmp_path, monkeypatch):
    here = {"gpu": "a", "driver": "b", "torch": "c", "triton": "d", "commit": "e"}
    monkeypatch.setattr(environment, "environment", lambda: dict(here))
    rows = [{"model": "gpt2", "context_length": n, "commit": "e"} for n in (1024, 8192)]
    out = tmp_path / "training.json"
    out.write_text(json.dumps({"environment": here, "rows": rows}))
    cells = [SimpleNamespace(model="gpt2", context_length=1024)]
    again = partial(training.is_of, cells=cells)
    assert environment.begin(out, False, again)["rows"] == []
    here["commit"] = "f"
    results = environment.begin(out, True, again)
    assert results["rows"] == rows[1:] and results["environment"] == here
    here["torch"] = "g"
    with pytest.raises(UserError, match="torch c, not g"):
        environment.begin(out, True, again)
