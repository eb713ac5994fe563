"""Out of memory: the sentence that ends the run, and its remedies."""

import re

import pytest
import torch

from data.loader import TrainLoader
from model.attention import Flash2Config, NaiveConfig
from model.gpt2 import GPT2, ModelConfig
from tests.e2e import train
from trainer import memory
from trainer.config import TrainConfig
from trainer.distributed.world import World
from trainer.memory import memory_remarks, out_of_memory
from trainer.precision import Compute

pytest_plugins = ["tests.e2e"]


def compute_of(size: int, parallel: str) -> Compute:
    return Compute(torch.device("cpu"), torch.float32, World(rank=size - 1, size=size, parallel=parallel))


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"batch_size": 8}, "set train.batch_size=4 train.grad_accumulation=2 or set train.activation_checkpointing="),
        ({"batch_size": 6, "grad_accumulation": 2}, "set train.batch_size=3 train.grad_accumulation=4 or"),
        ({"batch_size": 5}, "set train.batch_size=1 train.grad_accumulation=5 or"),
        ({"batch_size": 1}, "set train.activation_checkpointing=selective or choose a shorter"),
        ({"batch_size": 1, "activation_checkpointing": "full"}, "choose a shorter model.context_length or a smaller m"),
        ({"batch_size": 1, "activation_checkpointing": "full", "cuda_graphs": True}, "set train.cuda_graphs=false or"),
    ],
)
def test_the_remedies_keep_the_sequences_of_a_step(settings, remedy):
    shape = ModelConfig(n_layer=1, n_head=2, n_embd=32, context_length=64, vocab_size=65)
    model = GPT2(shape, NaiveConfig().build())
    told = out_of_memory("no room", model, TrainConfig(**settings), compute_of(1, "none"))
    assert told.startswith("out of memory (no room): a GPT-2 of ") and "model.context_length=64; " + remedy in told


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity"),
            "CUDA out of memory. Tried to allocate 2.00 GiB",
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "CUDA error: CUBLAS_"),
        (MemoryError("Unable to allocate 2 GiB"), "Unable to allocate 2 GiB"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "[enforce fail] Default"),
    ],
)
def test_a_run_that_runs_out_of_memory_ends_with_a_sentence(workplace, monkeypatch, error, reason):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(TrainLoader, "next_batches", refuse)
    outcome = train("run", "train.batch_size=8")
    (sentence,) = outcome.err.splitlines()
    assert outcome.code == 2 and f"out of memory ({reason}" in sentence
    assert "train.batch_size=8, model.context_length=32; set train.batch_size=4 train.grad_accumulation=2" in sentence


@pytest.mark.gpu
def test_settings_that_need_too_much_memory_end_with_a_sentence_on_the_gpu(workplace):
    torch.cuda.set_per_process_memory_fraction(2**30 / torch.cuda.get_device_properties(0).total_memory)
    try:
        large = ("device=cuda", "model.n_embd=256", "train.batch_size=4096", "train.max_steps=3", "train.compile=false")
        outcome = train("run", *large)
        assert outcome.code == 2 and re.search(r"out of memory at a peak of [01]\.\d GiB", outcome.err)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize(
    ("parallel", "own", "remedy"),
    [
        ("ddp", "none", "set train.activation_checkpointing=selective or set parallel=fsdp or choose a shorter"),
        ("ddp", "full", "set parallel=fsdp or choose a shorter"),
        ("fsdp", "full", "choose a shorter"),
    ],
)
def test_one_of_several_processes_names_its_share(parallel, own, remedy):
    shape = ModelConfig(n_layer=1, n_head=2, n_embd=32, context_length=64, vocab_size=65)
    settings = TrainConfig(batch_size=8, activation_checkpointing=own)
    told = out_of_memory("no room", GPT2(shape, NaiveConfig().build(), own), settings, compute_of(2, parallel))
    assert told.startswith("process 1 of 2: out of memory (no room): a GPT-2 of ")
    shared = "train.batch_size=4, model.context_length=64; set train.batch_size=2 train.grad_accumulation=4 or "
    assert shared + remedy in told


@pytest.mark.parametrize(
    ("limit", "batch_size", "told"),
    [("max", 8, False), ("max", 2048, True), ("3000000000", 8, False), ("1100000000", 8, True)],
)
def test_a_step_that_a_cpu_may_lack_the_memory_for_is_told_before(tmp_path, monkeypatch, limit, batch_size, told):
    """6 GB are free on the machine. A step of 8 sequences needs 0.2 GB, and 1 GB is in use."""
    (tmp_path / "meminfo").write_text("MemFree:     100 kB\nMemAvailable:     6000000 kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.stat").write_text("anon 1000000000\nfile 5000000000\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    model = GPT2(
        ModelConfig(n_layer=1, n_head=2, n_embd=32, context_length=32, vocab_size=50257), NaiveConfig().build()
    )
    remarks = list(memory_remarks(model, TrainConfig(batch_size=batch_size), compute_of(1, "none")))
    assert bool(remarks) == told and all("are free: the system may end this run without" in x for x in remarks)


@pytest.mark.parametrize(
    ("n_layer", "context_length", "batch_size", "vocab_size", "kind", "measured"),
    [
        (4, 256, 8, 50257, "none", 1.52),
        (12, 512, 16, 256, "selective", 1.57),
        (12, 512, 16, 256, "full", 0.91),
    ],
)
def test_the_estimate_is_near_the_measured_peak(
    monkeypatch, n_layer, context_length, batch_size, vocab_size, kind, measured
):
    """The peaks are GiB above the model, of two steps with AdamW in a process of its own."""
    monkeypatch.setattr(memory, "free_host_memory", lambda: 0)
    sizes = {"n_layer": n_layer, "context_length": context_length, "vocab_size": vocab_size}
    with torch.device("meta"):
        model = GPT2(ModelConfig(n_head=4, n_embd=256, **sizes), Flash2Config().build(), kind)
    settings = TrainConfig(batch_size=batch_size, activation_checkpointing=kind)
    (remark,) = memory_remarks(model, settings, compute_of(1, "none"))
    assert float(re.search(r"needs about (\S+) GiB", remark)[1]) == pytest.approx(measured, rel=0.15)
