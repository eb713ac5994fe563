"""Where a training step goes, from torch's profiler: every kernel is put into a class by its name."""

import re
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

STEPS = 3
# The first that a name matches. Compiled kernels carry the names of the operations fused in them. The matrix products
# of the head, and of naive attention, are found among the matrix products, whose names do not tell them apart.
CLASSES = {
    "attention": r"^(forward|backward|main|delta|finish|key_gradient|query_gradient|add_pieces)_kernel"
    r"|^softmax(_gradient)?_kernel|flash|fmha|sdpa|cudnn::fusion"
    r"|softmax_warp|(?<!log)_softmax(?!.*nll)|cunn_SoftMax(?!.*LogSoftMax)",
    "head and loss": r"cross_entropy|log_softmax|nll_loss|cunn_SoftMax",
    "matmul": r"nvjet|gemm|cutlass|cublas|splitK|xmma|^linear_(gelu|exponentials|sum)_kernel",
    "optimizer": r"multi_tensor_apply|[Aa]dam|lpnorm|foreach",
}
REST = "normalisation and elementwise"


def class_of(kernel: str) -> str:
    """The class of a kernel's name."""
    for name, pattern in CLASSES.items():
        if re.search(pattern, kernel):
            return name
    return REST


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of spans (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total


def summarise(kernels: list[tuple[str, float, float]], steps: int) -> dict[str, float]:
    """Milliseconds a step of each class, and idle: the time between the first kernel and the last with none running.

    `kernels` are (name, start, end) in microseconds.
    """
    totals = dict.fromkeys((*CLASSES, REST), 0.0)
    for name, start, end in kernels:
        totals[class_of(name)] += (end - start) / 1000 / steps
    spans = [(start, end) for _, start, end in kernels]
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    return {**totals, "idle": (whole - covered(spans)) / 1000 / steps}


def breakdown(step: Callable[[], object]) -> dict[str, float]:
    """summarise() of a few steps of a warm trainer."""
    for _ in range(2):  # the first is queued as it is, the second may capture what is profiled
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [(event.name, event.time_range.start, event.time_range.end) for event in events]
    return summarise([kernel for kernel in kernels if not kernel[0].startswith("Optimizer.")], STEPS)
