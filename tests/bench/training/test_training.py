"""bench.training without a GPU: tiny models, and made-up times."""

import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.common.timing import Cpu, in_turn
from bench.training import __main__ as compare
from bench.training import floor, steps, trainers
from bench.training.__main__ import TrainingSettings
from bench.training.breakdown import class_of, covered, summarise
from bench.training.trainers import Trainer, TrainingCell
from data.loader import TrainLoader
from errors import UserError
from kernels.flash2 import flash2
from model.gpt2 import GPT2
from tests.bench.stopwatch import JobsTell, Stopwatch

EAGER = {"ours": Trainer("ours", "flash2", False), "huggingface": Trainer("huggingface", "naive", False)}


@pytest.mark.parametrize("name", EAGER)
def test_a_step_changes_every_weight_and_a_parked_job_holds_no_memory(name, cell):
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


def test_second_step_of_a_micro_batch_captures_graphs_for_later_steps(cell, monkeypatch):
    taken = []

    def train_step(wrapped, micro_step, state, config, compute):
        taken.append((config.train.batch_size, micro_step if isinstance(micro_step, str) else None))

    monkeypatch.setattr(trainers.train, "train_step", train_step)
    monkeypatch.setattr(
        trainers, "capture", lambda queued, model, length, settings, _: f"graphs of {settings.batch_size}"
    )
    job = trainers.ours(cell, EAGER["ours"], "cpu")
    for batch in (2, 2, 2, 4, 4):
        job.step(batch)
    assert taken == [(2, None), (2, "graphs of 2"), (2, "graphs of 2"), (4, None), (4, "graphs of 4")]
    job.park()
    job.resume()
    job.step(4)
    job.step(4)
    assert taken[5:] == [(4, None), (4, "graphs of 4")]


def test_a_resumed_job_in_fp8_begins_with_empty_statistics(cell):
    """Its memory is newly allocated and may hold any numbers. The scales are those of the new weights."""
    job = trainers.ours(cell, Trainer("ours", "flash2", False, "fp8"), "cpu")
    weights = [layer.weight for layer in job.state.fp8_scales.layers]
    for buffer in job.model.buffers():
        buffer.fill_(1e30)
    job.resume()
    assert all((len(buffer) == 3 and not buffer.any()) if buffer.ndim else buffer < 1 for buffer in job.model.buffers())
    assert job.state.fp8_scales.peaks[1].tolist() == [weight.abs().max().item() for weight in weights]


@pytest.mark.parametrize("batch", [1, 3])
def test_random_tokens_have_the_strides_of_a_loader(batch):
    """Other strides compile the model again, and captured graphs do not survive that."""
    shape = {"batch_size": batch, "context_length": 16, "vocab_size": 50257, "device": torch.device("cpu")}
    with TrainLoader(np.zeros(99, np.uint16), seed=0, name="train.bin", **shape) as loader:
        ((theirs, _),) = loader.next_batches(1)
    inputs, targets = trainers.tokens(batch, 16, "cpu")
    assert inputs.shape == theirs.shape and inputs.stride() == targets.stride() == theirs.stride()
    assert torch.equal(inputs[:, 1:], targets[:, :-1]) and targets.data_ptr() % 16 == 0


class Job:
    """Takes steps that do nothing. The stopwatch makes their times up."""

    def __init__(self, fails_at=None):
        self.fails_at, self.log = fails_at, []

    def step(self, batch):
        self.log.append(batch)
        if batch == self.fails_at:
            raise torch.OutOfMemoryError("of course")

    def park(self):
        self.log.append("park")

    @contextmanager
    def alone(self):
        self.log.append("resume")
        try:
            yield
        finally:
            self.park()


def test_the_search_ends_when_the_speed_falls(cell):
    """The times are a first step, a second step and a sample: 16 tokens in 10 ms, 32 in 10 ms, 64 in 50 ms."""
    job, gpu = Job(), Stopwatch([9000.0, 40.0, 10.0, 8000.0, 20.0, 10.0, 7000.0, 5.0, 50.0])
    rows, best = steps.search(cell, EAGER["ours"], lambda: job, gpu)
    assert [row["tokens_per_second"] for row in rows] == pytest.approx([1600, 3200, 1280])
    assert [row["first_step_s"] for row in rows] == [9, 8, 7]
    assert best.row is rows[1] and best.steps == steps.MOST_STEPS and job.log[-1] == "park"
    assert not any(row["best"] for row in rows), "an interrupted run has no best rows"
    steps.alternate(cell, [best], rounds=1, gpu=Stopwatch([20.0]))
    assert [row["best"] for row in rows] == [False, True, False] and rows[1]["ms"] == 20


def test_peak_memory_is_of_the_second_step_which_has_moments(cell):
    class Growing(Stopwatch):
        def peak(self, call):
            call()
            return 2**30 * len(job.log)

    job = Job()
    rows, _ = steps.search(replace(cell, batches=(1,)), EAGER["ours"], lambda: job, Growing())
    assert (rows[0]["peak_gib"], rows[0]["peak_of"]) == (2, "second step")


def test_the_search_ends_when_memory_runs_out(cell, capsys):
    rows, best = steps.search(cell, EAGER["ours"], lambda: Job(fails_at=2), Stopwatch([1.0, 100.0]))
    assert [row["status"] for row in rows] == ["ok", "oom"]
    assert best.row is rows[0] and best.steps == 6  # which fill 0.6 s
    assert [line.split(":")[-1][:8] for line in capsys.readouterr().out.splitlines()] == [" batch 1", " batch 2"]


def test_a_step_of_minutes_is_timed_once_and_is_the_third(cell):
    job = Job()
    cell = replace(cell, batches=(1,))
    rows, best = steps.search(cell, EAGER["ours"], lambda: job, Stopwatch([200e3, 150e3]))
    assert (rows[0]["first_step_s"], rows[0]["ms"], best.steps, job.log) == (200, 150e3, 0, [1, 1, 1, "park"])
    steps.alternate(cell, [best], rounds=2, gpu=Stopwatch())
    assert "samples" not in best.row


def test_finalists_are_timed_in_balanced_turns_and_alone(cell, monkeypatch):
    turns, alone, jobs = [], Job.alone, [Job(), Job(), Job()]
    monkeypatch.setattr(Job, "alone", lambda job: (turns.append(job), alone(job))[1])
    finalists = [steps.Finalist(tried(cell), job, 3) for job in jobs]
    times = {jobs[0]: [1.0, 3.0, 2.0], jobs[1]: [10.0, 30.0, 90.0], jobs[2]: [7.0, 7.0, 7.0]}
    steps.alternate(cell, finalists, rounds=3, gpu=JobsTell(times))
    assert [finalist.row["ms"] for finalist in finalists] == [2, 30, 7]
    assert turns == [*in_turn(jobs, rounds=3)] != jobs * 3
    assert [job.log for job in jobs] == [["resume", 2, 2, "park"] * 3] * 3


def test_a_finalist_that_fails_does_not_stop_the_others(cell):
    """It frees its memory, takes no more turns, and its row has the status."""
    jobs = [Job(fails_at=2), Job()]
    finalists = [steps.Finalist(tried(cell), job, 3) for job in jobs]
    steps.alternate(cell, finalists, rounds=3, gpu=Stopwatch([10.0, 30.0, 90.0]))
    assert [finalist.row["status"] for finalist in finalists] == ["oom", "ok"]
    assert jobs[0].log == ["resume", 2, "park"] and finalists[1].row["ms"] == 30


def tried(cell) -> dict:
    """Return the row of a trainer after a successful search."""
    row = steps.empty_row(cell, EAGER["ours"], 2)
    steps.complete(row, cell, 1.0)
    return row


def test_speed_and_flops_of_a_step(cell, monkeypatch):
    """32 tokens in a millisecond; 6 FLOPs a weight except positions, and 12 x 2 layers x 32 wide x 16 tokens."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    row = tried(cell)
    weights = 2 * (12 * 32**2 + 13 * 32) + (50304 + 2) * 32
    assert weights == GPT2(cell.shape(), flash2).n_params() and row["tokens_per_second"] == 32_000
    assert row["tflops"] == pytest.approx(32_000 * (6 * weights + 12 * 2 * 32 * 16) / 1e12)
    assert row["mfu"] == pytest.approx(row["tflops"] / 989, rel=1e-3)


NANOGPT = """
from pathlib import Path
from types import SimpleNamespace
import torch
class GPTConfig:
    def __init__(self, **sizes):
        self.__dict__ |= sizes
class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.weight = config, torch.nn.Parameter(torch.ones(3, 3))
        attention = torch.nn.Module()
        attention.flash = True
        self.transformer = torch.nn.ModuleDict({"h": torch.nn.ModuleList([torch.nn.ModuleDict({"attn": attention})])})
    def forward(self, x, y):
        return None, 1e6 * self.weight.sum()
"""


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
def test_nanogpts_model_has_our_shape_and_its_gradient_is_clipped(cell, tmp_path, monkeypatch, attention):
    """The gradient norm is at most 1. Naive attention is nanoGPT's branch with a causal mask."""
    (tmp_path / "model.py").write_text(NANOGPT)
    job = trainers.nanogpt(
        cell, Trainer("nanogpt", attention, False), "cpu", trainers.load_nanogpt(tmp_path / "model.py")
    )
    config, norms = job.model.config, []
    assert (config.n_layer, config.n_head, config.n_embd, config.block_size) == (2, 2, 32, 16)
    assert (config.vocab_size, config.bias, config.dropout) == (50304, True, 0)
    attn = job.model.transformer.h[0].attn
    assert attn.flash == (attention == "sdpa")
    assert attention == "sdpa" or torch.equal(attn.bias[0, 0], torch.ones(16, 16).tril())
    take = job.optimizer.step
    monkeypatch.setattr(job.optimizer, "step", lambda: norms.append(job.model.weight.grad.norm()) or take())
    job.step(2)
    assert norms == [pytest.approx(1)]


def test_torchao_gets_all_linear_layers_of_nanogpt_but_the_head(cell, tmp_path, monkeypatch):
    """The recipe is the trainer's precision. `convert` stands for torchao's function."""
    (tmp_path / "model.py").write_text(NANOGPT)
    converted = []
    config = SimpleNamespace(from_recipe_name=lambda name: f"recipe {name}")

    def convert(model, *, config, module_filter_fn):
        names = ("transformer.h.0.attn.c_attn", "transformer.h.0.mlp.c_proj", "lm_head")
        converted.append((model, config, [name for name in names if module_filter_fn(None, name)]))

    fake = SimpleNamespace(Float8LinearConfig=config, convert_to_float8_training=convert)
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(float8=fake))
    monkeypatch.setitem(sys.modules, "torchao.float8", fake)
    module = trainers.load_nanogpt(tmp_path / "model.py")
    trainers.nanogpt(cell, Trainer("nanogpt", "sdpa", False), "cpu", module)
    job = trainers.nanogpt(cell, Trainer("nanogpt", "sdpa", False, "rowwise"), "cpu", module)
    assert converted == [(job.model, "recipe rowwise", ["transformer.h.0.attn.c_attn", "transformer.h.0.mlp.c_proj"])]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def", "cannot be run as Python"),
        ("exit(3)", r"cannot be run as Python \(SystemExit: 3\)"),
        ("GPT = 1", "has no GPT and GPTConfig"),
        (None, "does not exist"),
    ],
)
def test_a_file_that_is_not_nanogpts_is_refused(tmp_path, text, sentence):
    file = tmp_path / "model.txt"
    if text:
        file.write_text(text)
    with pytest.raises(UserError, match=sentence):
        compare.run(TrainingSettings(nanogpt=file))


def test_the_floor_is_all_matrix_products_and_the_fastest_attention(cell, monkeypatch, capsys):
    """The count is 6 FLOPs per weight and token, for 2 layers of 12 x 32^2 weights and the head."""
    with FlopCounterMode(display=False) as counter:
        floor.products(cell, 2, "cpu")()
    assert counter.get_total_flops() == 6 * 2 * 16 * (2 * 12 * 32**2 + trainers.PADDED * 32)

    def broken(*given, **options):
        raise OSError("libcudart.so.12: cannot open shared object file")

    variants = {"slow": lambda *given, **options: flash2(*given, **options), "broken": broken, "flash2": flash2}
    parts = floor.floor_finalists(cell, 2, variants, Stopwatch([9.0] * 4 + [1.0] * 4))  # four times of each variant
    assert capsys.readouterr().out == "  floor without broken: libcudart.so.12: cannot open shared object file\n"
    calls = []
    monkeypatch.setitem(variants, "flash2", lambda *given, **options: calls.append(1) or flash2(*given, **options))
    with parts["attention"].job.alone():
        parts["attention"].job.step(2)
    assert len(calls) == 2, "one call per layer"
    clock = JobsTell({parts["matmul"].job: [5.0], parts["attention"].job: [3.0]})
    steps.alternate(cell, list(parts.values()), rounds=1, gpu=clock)
    row = floor.floor_row(cell, parts)
    assert row["parts_ms"] == {"matmul": 5, "attention": 3} and row["ms"] == 8
    assert (row["attention"], row["batch_size"], row["status"]) == ("flash2", 2, "ok")
    assert all(part.job.call is None for part in parts.values())


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("main_kernel", "attention"),
        ("backward_kernel", "attention"),
        ("softmax_gradient_kernel", "attention"),
        ("add_pieces_kernel", "attention"),
        ("void at::native::cunn_SoftMaxForward<8, float, float, float, SoftMaxForwardEpilogue>", "attention"),
        ("void at::native::cunn_SoftMaxForward<8, float, float, float, LogSoftMaxForwardEpilogue>", "head and loss"),
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
        ("linear_exponentials_kernel", "matmul"),
        ("linear_sum_kernel", "matmul"),
        ("cross_entropy_sums_kernel", "head and loss"),
        ("triton_per_fused__to_copy_add_native_layer_norm_5", "normalisation and elementwise"),
    ],
)
def test_class_of_a_kernel(kernel, kind):
    assert class_of(kernel) == kind


def test_idle_time_is_time_without_a_kernel():
    assert covered([(0, 10), (5, 12), (20, 25), (21, 22)]) == 17
    kernels = [("nvjet", 0, 4000), ("gelu_kernel", 3000, 5000), ("main_kernel", 9000, 10000)]
    parts = summarise(kernels, steps=2)
    assert (parts["matmul"], parts["attention"], parts["idle"]) == (2, 0.5, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cells": ["gpt5"]}, "cells=gpt5 is unknown; choose one of gpt2_1k, "),
        ({"trainers": ["ours:magic"]}, "trainers=ours:magic is unknown; choose one of ours:flash2, "),
        ({"trainers": ["nanogpt:sdpa"]}, "trainers=nanogpt:sdpa needs nanoGPT's model.py; add nanogpt="),
        ({"trainers": ["nanogpt:sdpa:rowwise"], "nanogpt": "model.py"}, "needs the package torchao; install it with"),
        ({"batches": []}, r"batches=\[\] is empty"),
        ({"batches": [32, 0]}, r"batches=\[32,0\] is not positive; give a number above 0"),
        ({"batches": [10**20]}, r"batches=\[10+\] is too large; give at most 1048576"),
        ({"rounds": 2**62}, "rounds=4611686018427387904 is too large"),
        ({"rounds": 10_001}, "rounds=10001 is too large; give at most 10000"),
        ({"budget_seconds": float("nan")}, "budget_seconds=nan is not positive; give a number above 0"),
        ({"budget_seconds": float("inf")}, "budget_seconds=inf is too large; give at most 31536000"),
        ({"cells": [["gpt2_1k"]]}, "cells=.*gpt2_1k.* is unknown; choose one of gpt2_1k, "),
        ({"trainers": []}, r"trainers=\[\] is empty"),
    ],
)
def test_impossible_settings_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        TrainingSettings(**given)


def test_nanogpt_is_left_out_without_its_file():
    chosen = compare.chosen_trainers(TrainingSettings(), TrainingCell("gpt2", 2048, (1,)))
    assert list(map(str, chosen)) == ["ours:flash2"]


def test_a_trainer_in_fp8_is_refused_by_name_on_a_gpu_without_fp8(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compare, "has_fp8", lambda device: False)
    with pytest.raises(UserError, match="trainers=ours:flash2:fp8 needs an NVIDIA GPU from Ada or Hopper on; leave it"):
        TrainingSettings(trainers=["ours:flash2", "ours:flash2:fp8"])


@pytest.mark.parametrize(
    ("has_fp8", "installed", "added"),
    [
        (False, True, ["nanogpt:sdpa"]),
        (True, False, ["ours:flash2:fp8", "nanogpt:sdpa"]),
        (True, True, ["ours:flash2:fp8", "nanogpt:sdpa", "nanogpt:sdpa:tensorwise", "nanogpt:sdpa:rowwise"]),
    ],
)
def test_fp8_is_measured_where_gpu_and_packages_allow_it(monkeypatch, tmp_path, has_fp8, installed, added):
    monkeypatch.setattr(compare, "has_fp8", lambda device: has_fp8)
    monkeypatch.setattr(compare, "is_installed", lambda package: installed)
    chosen = compare.chosen_trainers(TrainingSettings(nanogpt=tmp_path), TrainingCell("gpt2", 2048, (1,)))
    assert list(map(str, chosen)) == ["ours:flash2", *added]


def test_only_complete_measurements_replace_the_published_results():
    some = ({"cells": ["gpt2_1k"]}, {"trainers": ["ours:flash2"]}, {"batches": [4]})
    assert all(TrainingSettings(**given).is_partial() for given in (*some, {"function": "a:b"}))
    assert TrainingSettings().is_partial()  # without nanoGPT, the main rival
    assert not TrainingSettings(nanogpt=Path("model.py"), breakdown=True, rounds=3).is_partial()


def test_micro_batches_are_tried_in_ascending_order():
    (cell,) = compare.chosen_cells(TrainingSettings(cells=["gpt2_1k"], batches=[64, 32, 64]))
    assert cell.batches == (32, 64)


def test_rows_before_an_interruption_are_written(tmp_path, monkeypatch):
    """The first cell is complete. The second is interrupted at its second trainer. The old file is kept beside."""
    monkeypatch.setattr(compare, "Gpu", Cpu)
    monkeypatch.setattr(compare, "environment", lambda: {"commit": "e"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")

    def search(cell, trainer, build, gpu):
        if (cell.context_length, trainer.attention) == (8192, "sdpa"):
            raise KeyboardInterrupt
        row = steps.empty_row(cell, trainer, 1) | {"status": "ok", "tokens_per_second": 1.0}
        return [row], steps.Finalist(row, Job(), 0)

    monkeypatch.setattr(compare, "search", search)
    monkeypatch.setattr(compare, "floor_parts", lambda cell, finalists, gpu: {})
    out = tmp_path / "training.json"
    out.write_text("old")
    trainers = ["ours:flash2", "ours:sdpa"]
    with pytest.raises(KeyboardInterrupt):
        compare.run(TrainingSettings(cells=["gpt2_1k", "gpt2_8k"], trainers=trainers, out=out))
    rows = [(r["context_length"], r["attention"], r["best"], r["commit"]) for r in json.loads(out.read_text())["rows"]]
    assert (tmp_path / "training.json.old").read_text() == "old"
    assert rows == [(1024, "flash2", True, "e"), (1024, "sdpa", True, "e"), (8192, "flash2", False, "e")]


def test_rows_are_shown_with_and_without_a_breakdown(cell, capsys):
    row = tried(cell) | {"best": True, "breakdown_ms": {"head and loss": 1.5, "idle": 0.25}}
    failed = steps.empty_row(cell, EAGER["huggingface"], 2) | {"best": True, "status": "oom"}
    compare.show([row, failed])
    text = capsys.readouterr().out
    assert "32,000" in text and "head and loss" in text and "0.25" in text and "oom" in text
