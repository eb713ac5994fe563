"""Micro-steps as CUDA graphs: the GPU goes from one kernel to the next by itself, where else the host queues each.

Where micro-batches are small, the host takes longer to queue the kernels of a step than the GPU to run them. A graph of
them all is queued at once, and runs the same kernels on the same numbers.
"""

import gc
from collections.abc import Callable

import torch
from torch import Tensor, nn

from errors import UserError, first_line, is_of_gpu_memory
from trainer.config import TrainConfig
from trainer.parts import is_compiled
from trainer.precision import Compute


def check_graphs(settings: TrainConfig, compute: Compute) -> None:
    """Refuses CUDA graphs where there are none.

    Raises:
        UserError: train.cuda_graphs=true on a CPU, or with several processes, whose gradients meet during the step.
    """
    if settings.cuda_graphs and compute.device.type != "cuda":
        raise UserError("train.cuda_graphs=true needs a GPU; leave it out, or set device=cuda where there is one")
    if settings.cuda_graphs and compute.world.parallel != "none":
        raise UserError(
            f"train.cuda_graphs=true does not go with parallel={compute.world.parallel}; leave it out, or start one "
            "process, without torchrun"
        )


def are_graphs_wanted(settings: TrainConfig, compute: Compute) -> bool:
    """Whether micro-steps are to be graphs, by train.cuda_graphs or, where that says nothing, by what it tells of null;
    asked once a step has run, which has taken the memory that it needs.

    As much again has to be free: graphs keep what they need, which an evaluation might lack, and would gain nothing
    where micro-batches are so large. Full activation checkpointing, which is for such, and a model that is not compiled
    may draw and look at random numbers in ways that no graph can hold.
    """
    device = compute.device
    if settings.cuda_graphs is not None:
        return settings.cuda_graphs
    if compute.world.parallel != "none" or not is_compiled(settings, compute) or device.type != "cuda":
        return False
    has_room = torch.cuda.memory_reserved(device) <= torch.cuda.mem_get_info(device)[0]
    return has_room and settings.activation_checkpointing != "full"


class MicroStepGraphs:
    """The forward and backward pass of a micro-batch, captured for one shape, to be called in their place.

    The first of a step makes the gradients, in memory that stays theirs; those after it add to them, by a graph of
    their own, which uses the same memory for all else. What the captured kernels read has to stay where it is: the
    weights, and a loss scale. Dropout draws anew each time, since torch moves its generator on with every replay.
    """

    def __init__(
        self,
        micro_step: Callable[[Tensor, Tensor], Tensor],
        model: nn.Module,
        shape: tuple[int, int],
        accumulates: bool,
    ):
        """Captures micro_step, which takes inputs and targets of `shape` (B, T), int64, adds to the gradients of
        `model`, and returns the loss; it has run before, so that all that it needs is compiled.

        The gradients are cleared. Without `accumulates` a step has one micro-step.

        Raises:
            UserError: it does what a graph cannot hold, as to wait for the device.
        """
        self.parameters, self.pool = list(model.parameters()), torch.cuda.graph_pool_handle()
        self.inputs, self.targets = torch.zeros((2, *shape), dtype=torch.int64, device=self.parameters[0].device)
        model.zero_grad(set_to_none=True)
        self.first = self._capture(micro_step)
        self.gradients = [parameter.grad for parameter in self.parameters]
        self.further = self._capture(micro_step) if accumulates else None
        model.zero_grad(set_to_none=True)

    def _capture(self, micro_step: Callable[[Tensor, Tensor], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """A graph of a micro-step, and where it leaves the loss."""
        graph, device = torch.cuda.CUDAGraph(), self.inputs.device
        stream, random_state = torch.cuda.current_stream(device), torch.cuda.get_rng_state(device)
        gc.collect()  # what compiling leaves in cycles may hold memory that the graph is to have
        try:
            # The loader's thread pins memory meanwhile, which by default would end the capture.
            with torch.cuda.graph(graph, self.pool, capture_error_mode="thread_local"):
                loss = micro_step(self.inputs, self.targets)
        except RuntimeError as error:
            cause = error.__context__ or error  # which ends the capture; that it has failed is then an error too
            # Both of which torch leaves in the capture, where the next job of a sweep would find them.
            torch.cuda.set_stream(stream)
            torch.cuda.default_generators[device.index].graphsafe_set_state(torch.Generator(device))
            torch.cuda.set_rng_state(random_state, device)
            for each in (error, cause):
                if is_of_gpu_memory(each):
                    raise each from None
            told = f"a step cannot be captured as a CUDA graph ({first_line(cause)})"
            raise UserError(f"{told}; set train.cuda_graphs=false") from error
        return graph, loss

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss (a scalar, which the next call overwrites) of inputs and targets of the captured shape.

        A step's first is told by gradients that are None, as optimizer_step leaves them.
        """
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        is_first = self.parameters[0].grad is None
        graph, loss = self.first if is_first else self.further
        graph.replay()
        if is_first:
            for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
                parameter.grad = gradient
        return loss
