"""How processes share a model."""

import re
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from conf.schema import TrainConfig
from errors import UserError
from model.attention import SdpaConfig, build_attention
from model.gpt2 import GPT2, ModelConfig
from tests.e2e import TINY, run, train
from trainer.distributed.parallel import check_sharding, data_parallel, shard, synchronise_gradients
from trainer.distributed.world import World
from trainer.precision import Compute

pytest_plugins = ["tests.e2e"]


SHAPE = ModelConfig(n_layer=2, n_head=1, n_embd=16, context_length=16, vocab_size=11)


@pytest.fixture
def group() -> Iterator[None]:
    """Start a process group with one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("fp8", [False, True])
def test_gradients_are_exchanged_once_for_all_micro_steps(group, fp8):
    """Each process keeps its own statistics of FP8 tensors, and all set the same scales. So no buffer is exchanged."""
    sent, tokens = [], torch.zeros((1, 16), dtype=torch.int64)
    model = GPT2(SHAPE, build_attention(SdpaConfig()), fp8=fp8)
    model = data_parallel(model, World(parallel="ddp"))
    for i in range(4):
        synchronise_gradients(model, wanted=i == 3)
        with CommDebugMode() as seen, torch.autocast("cpu", torch.bfloat16, enabled=fp8):
            model(tokens, tokens).backward()
        sent.append(seen.get_total_counts())
    assert sent == [0, 0, 0, 1]


@pytest.mark.filterwarnings("error::UserWarning")
def test_fsdp_does_not_warn_of_views_that_blocks_return(group):
    compute = Compute(torch.device("cpu"), torch.float32, World(parallel="fsdp"))
    model = shard(GPT2(SHAPE, build_attention(SdpaConfig())), compute, False)
    tokens = torch.zeros((1, 8), dtype=torch.int64)
    model(tokens, tokens)


@pytest.mark.parametrize(
    ("dtype", "optimizer", "sentence"),
    [
        (torch.float16, "adamw", "precision=fp16 does not work with parallel=fsdp; set precision=bf16"),
        (torch.bfloat16, "muon", "optimizer=muon needs whole matrices, and parallel=fsdp splits them; set "),
    ],
)
def test_what_does_not_work_with_split_weights_is_refused(dtype, optimizer, sentence):
    split, whole = (Compute(torch.device("cpu"), dtype, World(size=2, parallel=name)) for name in ("fsdp", "ddp"))
    check_sharding(optimizer, whole)
    with pytest.raises(UserError, match=sentence):
        check_sharding(optimizer, split)


def test_muon_with_split_weights_is_refused_before_tokens_are_made(workplace, group, monkeypatch):
    monkeypatch.setattr("trainer.distributed.world.join", lambda *settings: nullcontext(World(parallel="fsdp")))
    outcome = run("train.py", *TINY, "optimizer=muon", "data.dir=new", "data.source=nowhere.txt", "hydra.run.dir=run")
    assert outcome.code == 2 and "optimizer=muon needs whole matrices" in outcome.err


@pytest.mark.parametrize(
    ("settings", "processes", "share"),
    [
        ({"batch_size": 32, "grad_accumulation": 15}, 1, (32, 15)),
        ({"batch_size": 32, "grad_accumulation": 15}, 8, (30, 2)),
        ({"batch_size": 32, "global_batch_size": 512}, 8, (32, 2)),
        ({"batch_size": 8}, 2, (4, 1)),
        ({"batch_size": 5}, 5, (1, 1)),
    ],
    ids=str,
)
def test_the_processes_share_the_global_batch_in_equal_micro_steps(settings, processes, share):
    assert TrainConfig(**settings).share(processes) == share


@pytest.mark.parametrize(("sequences", "processes", "remedy"), [(8, 3, 9), (2, 8, 8), (10, 4, 8)])
def test_a_global_batch_that_does_not_divide_is_refused_with_one_that_does(sequences, processes, remedy):
    given = {
        f"train.global_batch_size={sequences}": {"batch_size": sequences, "global_batch_size": sequences},
        f"train.batch_size={sequences}": {"batch_size": sequences},
        f"train.batch_size x train.grad_accumulation={sequences}": {
            "batch_size": sequences // 2,
            "grad_accumulation": 2,
        },
    }
    for name, settings in given.items():
        with pytest.raises(UserError) as refusal:
            TrainConfig(**settings).share(processes)
        text = str(refusal.value)
        assert text.startswith(f"{name} does not divide among {processes} processes; ")
        assert int(re.search(r"set train.global_batch_size=(\d+)", text)[1]) == remedy


def test_micro_steps_but_the_last_keep_their_gradients(workplace, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "trainer.distributed.parallel.synchronise_gradients", lambda model, wanted: asked.append(wanted)
    )
    train("run", "train.grad_accumulation=3", "train.max_steps=2").ok()
    assert asked == [False, False, True] * 2
