"""How processes share a model."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from errors import UserError
from model.attention import SdpaConfig, build_attention
from model.gpt2 import GPT2, ModelConfig
from trainer.distributed.parallel import data_parallel, shard, synchronise_gradients
from trainer.distributed.world import World
from trainer.precision import Compute


@pytest.fixture
def group() -> Iterator[None]:
    """A process group with one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_gradients_are_exchanged_once_for_all_micro_steps(group):
    sent, tokens = [], torch.zeros((1, 8), dtype=torch.int64)
    model = GPT2(ModelConfig(1, 1, 8, 8, 11), build_attention(SdpaConfig()))
    model = data_parallel(model, World(parallel="ddp"))
    for i in range(4):
        synchronise_gradients(model, wanted=i == 3)
        with CommDebugMode() as seen:
            model(tokens, tokens).backward()
        sent.append(seen.get_total_counts())
    assert sent == [0, 0, 0, 1]


@pytest.mark.filterwarnings("error::UserWarning")
def test_fsdp_does_not_warn_of_views_that_blocks_return(group):
    compute = Compute(torch.device("cpu"), torch.float32, World(parallel="fsdp"))
    model = shard(GPT2(ModelConfig(2, 1, 8, 8, 11), build_attention(SdpaConfig())), compute, False)
    tokens = torch.zeros((1, 8), dtype=torch.int64)
    model(tokens, tokens)


def test_fp16_is_refused_with_fsdp():
    compute = Compute(torch.device("cpu"), torch.float16, World(size=2, parallel="fsdp"))
    with pytest.raises(UserError, match="precision=fp16 does not work with parallel=fsdp; set precision=bf16"):
        shard(nn.Linear(1, 1), compute, reshard_after_forward=True)
