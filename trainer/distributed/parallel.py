"""Share a model among processes: DistributedDataParallel around the whole model, or FSDP2 with split weights."""

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from errors import UserError
from model.gpt2 import GPT2
from trainer.distributed.world import World
from trainer.precision import Compute

BUCKET_MIB = 200
"""Size of a gradient bucket, which is sent while earlier layers compute: one block of gpt3-1.3b, four of gpt2. torch's
25 MiB cuts the compiled model too often: on two H200, gpt2 1k ran at 96.1 % of a single GPU's speed, now at 98.2 %."""


def check_sharding(optimizer: str, compute: Compute) -> None:
    """Refuse a precision or an optimizer that does not work with split weights, before the data are made."""
    parallel = compute.world.parallel
    if compute.world.is_sharded and compute.dtype == torch.float16:
        raise UserError(f"precision=fp16 does not work with parallel={parallel}; set precision=bf16")
    if compute.world.is_sharded and optimizer == "muon":
        raise UserError(
            f"optimizer=muon needs whole matrices, and parallel={parallel} splits them; set parallel=ddp, or "
            "optimizer=adamw"
        )


def shard(model: GPT2, compute: Compute, reshard_after_forward: bool) -> GPT2:
    """Split the weights for fsdp and hsdp, and return the model. For none and ddp, return it unchanged.

    A block gathers its weights, in the compute dtype, before it runs. Gradients are summed in fp32. With
    `reshard_after_forward`, a block frees the gathered weights between its forward and its backward pass.
    """
    world = compute.world
    if not world.is_sharded:
        return model
    sizes = (world.size,) if world.parallel == "fsdp" else (world.size // world.ranks_per_node, world.ranks_per_node)
    names = ("replicate", "shard")[-len(sizes) :]  # for hsdp, the rows are replicas of the model
    mesh = init_device_mesh(compute.device.type, sizes, mesh_dim_names=names)
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(compute.dtype, torch.float32)}
    for block in model.h:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    return fully_shard(model, reshard_after_forward=False, **options)


def data_parallel(model: nn.Module, world: World) -> nn.Module:
    """Return the model that the loop calls. With ddp, its gradient is the mean over all processes.

    The buffers are the scales of FP8 and their statistics. Each process collects its own statistics.
    """
    if world.parallel != "ddp":
        return model
    known = signature(DistributedDataParallel).parameters
    syncs = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # until torch 2.12
    return DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MIB, **{syncs: False})


def synchronise_gradients(model: nn.Module, wanted: bool) -> None:
    """Set whether the next backward pass exchanges gradients. Without it, each process accumulates its own."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = wanted  # as no_sync() does
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)


def split_weights(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split whole weights, given by name, in the same way as the model's weights."""
    parameters = dict(model.named_parameters())
    return {name: _split_like(x, parameters[name]) for name, x in weights.items()}


def split_moments(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Split whole moments in an optimizer's state in the same way as the optimizer's parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments = {
        i: {key: _split_like(x, parameters[i]) if x.ndim else x for key, x in of_one.items()}
        for i, of_one in state["state"].items()
    }
    return state | {"state": moments}


def _split_like(x: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor) or isinstance(x, DTensor):
        return x
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(x.to(parameter.device), mesh, placements, src_data_rank=None)  # Each process has all of x.
