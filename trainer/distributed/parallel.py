"""How processes share a model: DistributedDataParallel around the whole of it, or its weights split by FSDP2.

FSDP2 and its tensors are imported where they are used: that takes two seconds, which a process alone does not spend.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from errors import UserError
from model.gpt2 import GPT2
from trainer.checkpoint import State
from trainer.distributed.world import World
from trainer.precision import Compute

BUCKET_MIB = 200
"""Gradients that travel together, while those of earlier layers are computed: a block of gpt3-1.3b, four of gpt2.

At torch's 25 MiB the compiled model is cut, and the products disturbed, more often than the overlap is worth: on two
H200, gpt2 1k in steps of 128 sequences ran at 96.1 % of each GPU alone, and 8 layers of gpt3-1.3b at 94.8 %; with 100
and 200 MiB at 98.2 and 96.1 %.
"""


def shard(model: GPT2, compute: Compute, reshard_after_forward: bool) -> GPT2:
    """The model itself; for fsdp and hsdp each process keeps its part of every weight, and they gather a block's whole
    weights, in the precision of the products, when it computes. Gradients are summed in fp32.

    With `reshard_after_forward` they are given up until the backward pass; those outside of the blocks never are.

    Raises:
        UserError: fp16, which needs a loss scale that is agreed on by all processes.
    """
    if not compute.world.is_sharded:
        return model
    if compute.dtype == torch.float16:
        raise UserError(f"precision=fp16 does not go with parallel={compute.world.parallel}; set precision=bf16")
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options = {"mesh": _mesh(compute), "mp_policy": MixedPrecisionPolicy(compute.dtype, torch.float32)}
    for block in model.h:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    return fully_shard(model, reshard_after_forward=False, **options)


def _mesh(compute: Compute) -> DeviceMesh:
    """All processes in a row; for hsdp a row for each node, among which weights are split, and alike in all rows."""
    world = compute.world
    if world.parallel == "fsdp":
        return init_device_mesh(compute.device.type, (world.size,), mesh_dim_names=("shard",))
    shape = world.size // world.ranks_per_node, world.ranks_per_node
    return init_device_mesh(compute.device.type, shape, mesh_dim_names=("replicate", "shard"))


def data_parallel(model: nn.Module, world: World) -> nn.Module:
    """The model as the loop calls it: where each process holds all of it, its gradient becomes the mean of theirs."""
    options = {"gradient_as_bucket_view": True, "bucket_cap_mb": BUCKET_MIB}
    return DistributedDataParallel(model, **options) if world.parallel == "ddp" else model


def synchronise_gradients(model: nn.Module, wanted: bool) -> None:
    """Whether the next backward pass exchanges gradients; those of the passes without add up in each process."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = wanted  # what its no_sync sets, which would indent the pass
    elif dist.is_initialized():
        from torch.distributed.fsdp import FSDPModule

        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(wanted)


def split_weights(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights by name, those that are whole split as those of the model are."""
    parameters = dict(model.named_parameters())
    return {name: _split_like(x, parameters[name]) for name, x in weights.items()}


def split_moments(optimizer: torch.optim.Optimizer, state: State) -> State:
    """An optimizer's state, moments that are whole split as the optimizer's parameters are."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments = {
        i: {key: _split_like(x, parameters[i]) if x.ndim else x for key, x in of_one.items()}
        for i, of_one in state["state"].items()
    }
    return state | {"state": moments}


def _split_like(x: Tensor, parameter: Tensor) -> Tensor:
    if not dist.is_initialized():
        return x
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor) or isinstance(x, DTensor):
        return x
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(x.to(parameter.device), mesh, placements, src_data_rank=None)  # each process has all of x
