"""The floor of a training step: the model's matrix products through cuBLAS, and the fastest attention, nothing else.

Both parts run forward and backward in bf16. Each part is timed in turn with the trainers. Its samples have the same
length, because a GPU's clock depends on how long the GPU has been computing. At its power limit a GPU runs these
products slower than the same products between kernels that draw less power.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from bench.attention.contenders import bind, draw_inputs
from bench.attention.shapes import AttentionShape
from bench.common.timing import Gpu, median_milliseconds, recorded
from bench.training.steps import Finalist, complete, empty_row, steps_of
from bench.training.trainers import DTYPE, PADDED, Trainer, TrainingCell
from model.attention import Attention


class FloorJob:
    """One part of the floor. Its tensors exist only inside alone()."""

    def __init__(self, build: Callable[[], Callable[[], object]]):
        self.build, self.call = build, None

    @contextmanager
    def alone(self) -> Iterator[None]:
        self.call = self.build()
        try:
            yield
        finally:
            self.call = None

    def step(self, batch: int) -> None:
        self.call()


def products(cell: TrainingCell, batch: int, device: str) -> Callable[[], None]:
    """Return a call of all matrix products of a step, in the step's order. All layers share the same tensors."""
    shape, tokens = cell.shape(), batch * cell.context_length
    width = shape.n_embd
    sizes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]

    def operands(k: int, n: int) -> list[torch.Tensor]:
        return [torch.randn(*size, device=device, dtype=DTYPE) for size in ((tokens, k), (n, k), (tokens, n))]

    layers = [operands(k, n) for k, n in sizes] * shape.n_layer
    layers.append(operands(width, PADDED))

    def call() -> None:
        for x, weight, _ in layers:
            torch.mm(x, weight.T)
        for x, weight, dout in reversed(layers):
            torch.mm(dout, weight)
            torch.mm(dout.T, x)

    return call


def fastest(shape: AttentionShape, variants: dict[str, Attention], gpu: Gpu) -> str:
    """Return the variant with the fastest forward and backward together. Print which variants fail, and why."""
    data, times = draw_inputs(shape, gpu.device), {}
    for name, attend in variants.items():
        failure = {}
        with recorded([failure], gpu):  # A variant may not support the shape, or its library may not load.
            [times[name]] = median_milliseconds([bind(name, attend, shape, data).call("both")], gpu, rounds=3)
        if failure:
            print(f"  floor without {name}: {failure.get('message', 'out of memory')}", flush=True)
    return min(times, key=times.get)


def floor_finalists(cell: TrainingCell, batch: int, variants: dict[str, Attention], gpu: Gpu) -> dict[str, Finalist]:
    """Return the floor's two parts at this micro-batch, "matmul" and "attention", to be timed with the trainers."""
    model = cell.shape()
    shape = AttentionShape(cell.name, batch, cell.context_length, model.n_head, model.head_dim, packed=True)
    name = fastest(shape, variants, gpu)

    def attention() -> Callable[[], None]:
        call = bind(name, variants[name], shape, draw_inputs(shape, gpu.device)).call("both")
        return lambda: [call() for _ in range(model.n_layer)]

    parts = {}
    for part, build in (("matmul", partial(products, cell, batch, gpu.device)), ("attention", attention)):
        job, row = FloorJob(build), empty_row(cell, Trainer("floor", name, False), batch)
        with recorded([row], gpu), job.alone():
            job.step(batch)
            complete(row, cell, gpu.milliseconds(partial(job.step, batch), calls=1, spin_ms=0))
        parts[part] = Finalist(row, job, steps_of(row["ms"]) if row["status"] == "ok" else 0)
        gpu.release()
    return parts


def floor_row(cell: TrainingCell, parts: dict[str, Finalist]) -> dict:
    """Return the floor's row after its parts have been timed."""
    timed = parts["matmul"].row
    row = empty_row(cell, Trainer("floor", timed["attention"], False), timed["batch_size"])
    failed = next((part.row for part in parts.values() if part.row["status"] != "ok"), None)
    if failed:
        return row | {key: failed[key] for key in ("status", "message")}
    row["parts_ms"] = {name: part.row["ms"] for name, part in parts.items()}
    complete(row, cell, sum(row["parts_ms"].values()))
    return row
