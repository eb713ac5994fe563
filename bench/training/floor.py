"""The least a training step can take: the model's matrix products through cuBLAS, and the fastest attention.

Forward, gradient by input and gradient by weight, in bf16; no normalisation, activation, loss, optimizer or memory
traffic between them. Either is a job that takes its part of a step and is timed in turn with the trainers, in samples
as long as theirs: a GPU that has computed for half a second runs at other clocks than one that has for a millisecond.
A GPU at the limit of its power runs products on end slower than the same products between kernels that draw less: in
a step they may take less time than here, but a step of nothing else would not.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from bench.attention.contenders import bind, draw
from bench.attention.shapes import Cell as AttentionCell
from bench.common.timing import Gpu, recorded, sampler_of
from bench.training.steps import Contender, complete, empty_row, steps_of
from bench.training.trainers import DTYPE, PADDED, Cell, Trainer
from model.attention import Attention


@dataclass
class Work:
    """A part of a step, on tensors that it holds only while it is its turn."""

    build: Callable[[], Callable[[], object]]
    call: Callable[[], object] | None = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        self.call = self.build()
        try:
            yield
        finally:
            self.call = None

    def step(self, batch: int) -> None:
        self.call()


def products(cell: Cell, batch: int, device: str) -> Callable[[], None]:
    """The matrix products of a step, in the order of a step; every layer's on the same tensors."""
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


def attention_cell(cell: Cell, batch: int) -> AttentionCell:
    """The model's attention, q, k and v as views of the packed projection."""
    shape = cell.shape()
    sizes = {"batch": batch, "seq_len": cell.context_length, "heads": shape.n_head, "head_dim": shape.head_dim}
    return AttentionCell(cell.name, **sizes, packed=True)


def fastest(shape: AttentionCell, variants: dict[str, Attention], gpu: Gpu) -> str:
    """The variant whose forward and backward take the least."""
    data, times = draw(shape, gpu.device), {}
    for name, attend in variants.items():
        try:
            call = bind(name, attend, shape, data).call("both")
            call()
            sampler, _ = sampler_of(call, gpu)
            times[name] = min(sampler.sample(gpu) for _ in range(3))
        except (ValueError, RuntimeError):
            continue  # a variant that cannot do this shape is not the fastest
    if not times:
        raise RuntimeError(f"no attention among {', '.join(variants)} computes this shape")
    return min(times, key=times.get)


def contenders(cell: Cell, batch: int, variants: dict[str, Attention], gpu: Gpu) -> dict[str, Contender]:
    """The two parts of the floor at this micro-batch, by name, to be timed in turn with the trainers."""
    shape = attention_cell(cell, batch)
    rows = {part: empty_row(cell, Trainer("floor", "-", False), batch) for part in ("matmul", "attention")}
    with recorded(rows.values(), gpu):
        name = fastest(shape, variants, gpu)
    if rows["attention"]["status"]:
        return {part: Contender(row, Work(lambda: None), 0) for part, row in rows.items()}

    def attention() -> Callable[[], None]:
        call = bind(name, variants[name], shape, draw(shape, gpu.device)).call("both")
        return lambda: [call() for _ in range(cell.shape().n_layer)]

    made = {}
    for part, build in (("matmul", lambda: products(cell, batch, gpu.device)), ("attention", attention)):
        work, row = Work(build), rows[part] | {"attention": name}
        with recorded([row], gpu), work.alone():
            work.step(batch)
            complete(row, cell, gpu.milliseconds(partial(work.step, batch), calls=1, spin_ms=0))
        made[part] = Contender(row, work, steps_of(row["ms"]) if row["status"] == "ok" else 0)
        gpu.release()
    return made


def row_of(cell: Cell, parts: dict[str, Contender]) -> dict:
    """The floor's row, once its parts are timed."""
    timed = parts["matmul"].row
    row = empty_row(cell, Trainer("floor", timed["attention"], False), timed["batch_size"])
    failed = next((part.row for part in parts.values() if part.row["status"] != "ok"), None)
    if failed:
        return row | {key: failed[key] for key in ("status", "message")}
    row["parts_ms"] = {name: contender.row["ms"] for name, contender in parts.items()}
    complete(row, cell, sum(row["parts_ms"].values()))
    return row
