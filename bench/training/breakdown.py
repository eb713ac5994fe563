"""Where the time of a training step goes. torch's profiler lists the kernels; their names sort them into classes."""

import re
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

STEPS = 3
# The first pattern that matches decides. The name of a compiled kernel lists the operations fused in it. The matrix
# products of the head and of naive attention count as "matmul", because their names do not tell them apart.
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
    """Return the class of a kernel's name."""
    return next((name for name, pattern in CLASSES.items() if re.search(pattern, kernel)), REST)


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total


def summarise(kernels: list[tuple[str, float, float]], steps: int) -> dict[str, float]:
    """Return milliseconds a step of each class, and of "idle": between the first and last kernel with none running.

    `kernels` are (name, start, end) in microseconds.
    """
    totals = dict.fromkeys((*CLASSES, REST), 0.0)
    for name, start, end in kernels:
        totals[class_of(name)] += (end - start) / 1000 / steps
    spans = [(start, end) for _, start, end in kernels]
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    return {**totals, "idle": (whole - covered(spans)) / 1000 / steps}


def breakdown(step: Callable[[], object]) -> dict[str, float]:
    """Profile a few steps of a warm trainer and return the summary of `summarise`."""
    for _ in range(2):  # The second step may capture CUDA graphs.
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [(event.name, event.time_range.start, event.time_range.end) for event in events]
    return summarise([kernel for kernel in kernels if not kernel[0].startswith("Optimizer.")], STEPS)
