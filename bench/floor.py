"""The least a training step can take: the model's matrix products through cuBLAS and the fastest attention, each alone.

Forward, gradient by input and gradient by weight, in bf16, sampled as bench.timing samples kernels: back to back, with
the launches hidden. No normalisation, activation, loss, optimizer or memory traffic between them is counted.
"""

from collections.abc import Callable

import torch

from bench.cells import Cell as AttentionCell
from bench.timing import Gpu, sampler_of
from bench.trainers import DTYPE, PADDED, Cell
from bench.variants import bind, draw
from model.attention import Attention

SAMPLES = 7


def milliseconds(call: Callable[[], object], gpu: Gpu) -> float:
    """Median time of one call."""
    call()
    sampler, _ = sampler_of(call, gpu)
    return sorted(sampler.sample(gpu) for _ in range(SAMPLES))[SAMPLES // 2]


def matmul_ms(tokens: int, k: int, n: int, gpu: Gpu) -> float:
    """The three products of a linear layer from k to n columns."""
    x, weight, dout = (
        torch.randn(*size, device=gpu.device, dtype=DTYPE) for size in ((tokens, k), (n, k), (tokens, n))
    )
    calls = lambda: x @ weight.T, lambda: dout @ weight, lambda: dout.T @ x
    return sum(milliseconds(call, gpu) for call in calls)


def attention_ms(cell: Cell, batch: int, variants: dict[str, Attention], gpu: Gpu) -> dict[str, float]:
    """Forward and backward of each variant at the model's shape, q, k and v as views of the packed projection."""
    shape = cell.shape()
    sizes = {"batch": batch, "seq_len": cell.context_length, "heads": shape.n_head, "head_dim": shape.head_dim}
    attention = AttentionCell(cell.name, **sizes, packed=True)
    data, times = draw(attention, gpu.device), {}
    for name, attend in variants.items():
        try:
            times[name] = milliseconds(bind(name, attend, attention, data).call("both"), gpu)
        except (ValueError, RuntimeError):
            continue  # a variant that cannot do this shape is not the fastest
    return times


def floor(cell: Cell, batch: int, variants: dict[str, Attention], gpu: Gpu) -> dict[str, float | str]:
    """Milliseconds of a step of this micro-batch: of each part, and of all; and which attention was fastest."""
    shape, tokens = cell.shape(), batch * cell.context_length
    layers, width = shape.n_layer, shape.n_embd
    sizes = {"qkv": (width, 3 * width), "proj": (width, width), "fc": (width, 4 * width), "fc2": (4 * width, width)}
    parts = {name: layers * matmul_ms(tokens, *size, gpu) for name, size in sizes.items()}
    parts["head"] = matmul_ms(tokens, width, PADDED, gpu)
    gpu.release()
    times = attention_ms(cell, batch, variants, gpu)
    fastest = min(times, key=times.get)
    parts["attention"] = layers * times[fastest]
    gpu.release()
    return {**parts, "ms": sum(parts.values()), "fastest_attention": fastest}
