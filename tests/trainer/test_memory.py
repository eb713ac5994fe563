"""Out of memory: on a CPU by a model that refuses what is too large for it, on a GPU by a limit."""

import re

import pytest
import torch

from kernels.naive.definition import standard_attention
from model.gpt2 import GPT2, ModelConfig
from tests.e2e import train
from trainer.config import TrainConfig
from trainer.distributed.world import World
from trainer.memory import candidates, out_of_memory
from trainer.precision import Compute

pytest_plugins = ["tests.e2e"]


def limit(monkeypatch, tokens: int, kept: float) -> None:
    """A model that runs out of memory above so many tokens; with full checkpointing above 1 / `kept` as many."""
    forward = GPT2.forward

    def limited(self, inputs, *args, **kwargs):
        if inputs.numel() > tokens / (kept if self.h[0].activation_checkpointing == "full" else 1):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity")
        return forward(self, inputs, *args, **kwargs)

    monkeypatch.setattr(GPT2, "forward", limited)


def test_candidates_keep_the_sequences_of_a_step():
    found = list(candidates(batch_size=6, micro_steps=2, context=128, own="none"))
    assert [settings for settings, *_ in found] == [
        "train.batch_size=4 train.grad_accumulation=3",
        "train.batch_size=3 train.grad_accumulation=4",
        "train.batch_size=2 train.grad_accumulation=6",
        "train.batch_size=1 train.grad_accumulation=12",
        "train.batch_size=1 train.grad_accumulation=12 train.activation_checkpointing=selective",
        "train.batch_size=1 train.grad_accumulation=12 train.activation_checkpointing=full",
        "train.batch_size=1 train.grad_accumulation=12 train.activation_checkpointing=full model.context_length=64",
    ]
    sizes = [(1, 128, "none"), (1, 128, "selective"), (1, 128, "full"), (1, 64, "full")]
    assert [tuple(size) for _, *size in found[-4:]] == sizes
    forgetful = list(candidates(batch_size=6, micro_steps=2, context=128, own="full"))
    assert [settings for settings, *_ in forgetful] == [settings for settings, *_ in found[:4] + found[6:]]
    assert {checkpointing for *_, checkpointing in forgetful} == {"full"}


@pytest.mark.parametrize(
    ("tokens", "kept", "remedy"),
    [
        (300, 1, "train.batch_size=4 train.grad_accumulation=2"),
        (50, 0.5, "train.batch_size=1 train.grad_accumulation=8 train.activation_checkpointing=full"),
        (
            32,
            0.5,
            "train.batch_size=1 train.grad_accumulation=8 train.activation_checkpointing=full model.context_length=64",
        ),
        (10, 1, None),
    ],
    ids=["smaller micro-batches", "checkpointing", "a shorter context", "nothing"],
)
def test_settings_that_fit_are_named_and_do(workplace, monkeypatch, tokens, kept, remedy):
    limit(monkeypatch, tokens, kept)
    large = ("train.batch_size=8", f"model.context_length={128 if tokens == 32 else 64}", "train.max_steps=2")
    outcome = train("run", *large)
    (sentence,) = outcome.err.splitlines()
    assert outcome.code == 2 and "CUDA out of memory. Tried to allocate 2.00 GiB" in sentence
    assert "train.batch_size=8, model.context_length=" in sentence and "M parameters" in sentence
    if remedy is None:
        assert sentence.endswith("choose a smaller model")
    else:
        assert sentence.endswith(f"what fits is {remedy}")
        train("again", *large, *remedy.split()).ok()


@pytest.mark.gpu
def test_settings_that_are_named_fit_on_the_gpu(workplace):
    torch.cuda.set_per_process_memory_fraction(2**30 / torch.cuda.get_device_properties(0).total_memory)
    try:
        large = ("device=cuda", "model.n_embd=256", "train.batch_size=4096", "train.max_steps=3", "train.compile=false")
        outcome = train("run", *large)
        assert outcome.code == 2 and re.search(r"out of memory at a peak of [01]\.\d GiB", outcome.err)
        train("again", *large, *re.search(r"what fits is (.*)", outcome.err).group(1).split()).ok()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize(
    ("parallel", "own", "remedy"),
    [
        ("ddp", "none", "lower train.batch_size or set train.activation_checkpointing=full or set parallel=fsdp"),
        ("ddp", "full", "lower train.batch_size or set parallel=fsdp"),
        ("fsdp", "full", "lower train.batch_size"),
    ],
)
def test_one_of_several_processes_names_its_share_and_what_is_left_to_set(parallel, own, remedy):
    compute = Compute(torch.device("cpu"), torch.float32, World(rank=1, size=2, parallel=parallel))
    shape = ModelConfig(n_layer=1, n_head=2, n_embd=32, context_length=64, vocab_size=65)
    told = out_of_memory("no room", GPT2(shape, standard_attention, own), None, compute, TrainConfig(batch_size=8))
    assert told.startswith("process 1 of 2: out of memory (no room): a GPT-2 of ")
    assert told.endswith(f"train.batch_size=4, model.context_length=64; {remedy}")
