"""Micro-steps as CUDA graphs: the host queues one graph instead of each kernel.

With small batches, the GPU would otherwise wait for the host.
"""

import gc
from collections.abc import Callable

import torch
from torch import Tensor, nn

from errors import UserError, first_line, is_out_of_gpu_memory
from trainer.build import is_compiled
from trainer.config import TrainConfig
from trainer.precision import Compute

MicroStep = Callable[[Tensor, Tensor], Tensor]


def check_graphs(settings: TrainConfig, compute: Compute) -> None:
    """Refuse train.cuda_graphs=true on a CPU, or with several processes, which exchange gradients during the step."""
    if settings.cuda_graphs and (compute.device.type != "cuda" or compute.world.parallel != "none"):
        raise UserError(f"train.cuda_graphs=true needs one process with a GPU, not {compute}; leave it out")


def are_graphs_wanted(settings: TrainConfig, compute: Compute) -> bool:
    """Return whether to capture micro-steps: train.cuda_graphs, or if that is null, whether graphs can help.

    After the first step, the GPU must have the memory of a second step free, because graphs keep their memory and
    evaluation needs its own. Full checkpointing and uncompiled models may draw random numbers that a graph cannot hold.
    """
    if settings.cuda_graphs is not None:
        return settings.cuda_graphs
    is_alone_on_gpu = compute.world.parallel == "none" and compute.device.type == "cuda"
    if not is_alone_on_gpu or not is_compiled(settings, compute) or settings.activation_checkpointing == "full":
        return False
    return torch.cuda.memory_reserved(compute.device) <= torch.cuda.mem_get_info(compute.device)[0]


def capture(
    micro_step: MicroStep, model: nn.Module, context_length: int, settings: TrainConfig, compute: Compute
) -> MicroStep:
    """Return micro_step as CUDA graphs if they are wanted, else micro_step itself. Call this after the first step."""
    if not are_graphs_wanted(settings, compute):
        return micro_step
    shape = settings.batch_size, context_length
    return MicroStepGraphs(micro_step, model, shape, accumulates=settings.micro_steps > 1)


class MicroStepGraphs:
    """The captured forward and backward pass of a micro-batch of one shape, called like the micro-step itself.

    The first micro-step of an optimizer step makes the gradients, in memory that they keep. A second graph adds to
    them. The weights and the loss scale must stay at their addresses. torch draws new dropout masks at each replay.
    """

    def __init__(self, micro_step: MicroStep, model: nn.Module, shape: tuple[int, int], accumulates: bool):
        """Capture micro_step for inputs and targets of `shape` (B, T), int64. This clears the gradients of `model`.

        micro_step must have run before, so that it is compiled. Without `accumulates`, a step has one micro-step.
        """
        self.parameters, self.pool = list(model.parameters()), torch.cuda.graph_pool_handle()
        self.inputs, self.targets = torch.zeros((2, *shape), dtype=torch.int64, device=self.parameters[0].device)
        model.zero_grad(set_to_none=True)
        self.first = self._capture(micro_step)
        self.gradients = [parameter.grad for parameter in self.parameters]
        self.further = self._capture(micro_step) if accumulates else None
        model.zero_grad(set_to_none=True)

    def _capture(self, micro_step: MicroStep) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # reference cycles left by the compiler may hold memory that the graph needs
        try:
            # The loader's thread pins memory meanwhile. In the default mode, that would end the capture.
            with torch.cuda.graph(graph, self.pool, capture_error_mode="thread_local"):
                loss = micro_step(self.inputs, self.targets)
        except RuntimeError as error:
            cause = error.__context__ or error  # the error that ended the capture
            if memory_error := next(filter(is_out_of_gpu_memory, (error, cause)), None):
                raise memory_error from None
            raise UserError(
                f"a training step cannot be captured as a CUDA graph ({first_line(cause)}); set train.cuda_graphs=false"
            ) from error
        return graph, loss

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss (a scalar, which the next call overwrites) of inputs and targets of the captured shape."""
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        is_first = self.parameters[0].grad is None  # the optimizer step has cleared the gradients
        graph, loss = self.first if is_first else self.further
        graph.replay()
        if is_first:
            for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
                parameter.grad = gradient
        return loss
