"""How processes share a model: DistributedDataParallel around the whole of it, or its weights split by FSDP2."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.distributed import World


def data_parallel(model: nn.Module, world: World) -> nn.Module:
    """The model as the loop calls it: where each process holds all of it, its gradient becomes the mean of theirs."""
    if world.parallel != "ddp":
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def synchronise_gradients(model: nn.Module, wanted: bool) -> None:
    """Whether the next backward pass exchanges gradients; those of the passes without add up in each process."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = wanted  # what its no_sync sets, which would indent the pass
