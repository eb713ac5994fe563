"""Measure attention variants side by side: check each of them, then time all of them in turn.

- Variants take turns inside one process. A round takes one sample of each variant, and there are many rounds. A row
  holds the median of its samples with their 20th and 80th percentile.
- `forward` runs with gradients enabled, so it saves what the backward pass needs. `backward` is torch.autograd.grad on
  a graph that is kept. `both` is the two in one call. dout has the layout of the variant's output.
- `peak_mib` is the most memory that a call holds, including its results and excluding its inputs. For `backward` and
  `both` it includes what the forward pass saved.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from bench.attention.accuracy import check, truth_of
from bench.attention.contenders import Contender, bind, draw_inputs
from bench.attention.rows import empty_row, shape_line
from bench.attention.shapes import PASSES, AttentionShape
from bench.common.results import environment, write
from bench.common.timing import Gpu, Sampler, balanced, in_turn, recorded, sampler_of
from model.attention import Attention


@dataclass
class Series:
    """The samples of one row."""

    row: dict
    sampler: Sampler
    samples: list[float] = field(default_factory=list)


def start_series(row: dict, contender: Contender, gpu: Gpu) -> Series:
    """Warm a pass up, record its memory, and choose how to sample it."""
    before = gpu.allocated()
    call = contender.call(row["pass"])
    call()
    row["peak_mib"] = round((gpu.peak(call) - before) / 2**20, 1)
    return Series(row, sampler_of(call, gpu)[0])


def alternate(all_series: list[Series], shape: AttentionShape, gpu: Gpu, rounds: int) -> None:
    """Take the samples in turn, in at least `rounds` rounds, and complete the rows."""
    for series in in_turn(all_series, balanced(rounds, len(all_series))):
        if series.row["status"] is None:
            with recorded([series.row], gpu):
                series.samples.append(series.sampler.sample(gpu))
    for series in all_series:
        if series.row["status"] is None:
            quantiles = torch.tensor(series.samples).quantile(torch.tensor([0.5, 0.2, 0.8])).tolist()
            series.row.update(zip(("ms", "ms_p20", "ms_p80"), quantiles, strict=True))
            series.row.update(tflops=shape.flops(series.row["pass"]) / quantiles[0] / 1e9, status="ok")


def measure_shape(
    shape: AttentionShape, variants: dict[str, Attention], gpu: Gpu, rounds: int, seen: Tensor | None = None
) -> list[dict]:
    """Return the rows of one shape, for every variant and pass. For `seen` see truth_of.

    All variants hold their memory at the same time. A variant that runs out of memory beside the others is measured
    again on its own; its rows get `alone`.
    """
    rows = measure_together(shape, variants, gpu, rounds, seen)
    for variant in variants if len(variants) > 1 else ():
        crowded = {row["pass"]: row for row in rows if row["variant"] == variant and row["status"] == "oom"}
        if crowded:
            gpu.release()
            for row in measure_together(shape, {variant: variants[variant]}, gpu, rounds, seen):
                if row["pass"] in crowded:
                    crowded[row["pass"]].update(row, alone=True)
    return rows


def measure_together(
    shape: AttentionShape, variants: dict[str, Attention], gpu: Gpu, rounds: int, seen: Tensor | None
) -> list[dict]:
    """Return the rows of variants that are in memory at the same time."""
    rows = {variant: {pass_: empty_row(shape, variant, pass_) for pass_ in PASSES} for variant in variants}
    all_rows = [row for of_variant in rows.values() for row in of_variant.values()]
    contenders = []
    with recorded(all_rows, gpu):
        inputs = draw_inputs(shape, gpu.device)
        truth = truth_of(shape, inputs, seen)
        for variant, attend in variants.items():
            with recorded(rows[variant].values(), gpu):
                contender = bind(variant, attend, shape, inputs)
                contenders.append(contender)
                check(contender, shape, truth)
            gpu.release()
    for contender in contenders:
        for row in rows[contender.variant].values():
            row["error"] = contender.error
    for pass_ in PASSES:
        all_series = []
        for contender in contenders:
            row = rows[contender.variant][pass_]
            if row["status"] is None:
                with recorded([row], gpu):
                    all_series.append(start_series(row, contender, gpu))
        alternate(all_series, shape, gpu, rounds)
    torch.compiler.reset()
    return all_rows


def measure_all(
    shapes: list[AttentionShape], variants: dict[str, Attention], gpu: Gpu, rounds: int, out: Path | None
) -> list[dict]:
    """Measure and print the shapes one by one. The rows are written after each shape, so that a kill loses only one."""
    gpu.wake()
    rows, printed, where, started = [], set(), environment(), time.monotonic()
    print(f"{where['gpu']}, torch {where['torch']}, Triton {where['triton']}, {shapes[0].dtype}")
    print("TFLOP/s of forward/backward/both")
    for shape in shapes:
        new = measure_shape(shape, variants, gpu, rounds)
        rows += new
        print(shape_line(shape, new), flush=True)
        for row in new:
            failure = row["variant"], row["message"]
            if row["message"] and failure not in printed:
                printed.add(failure)
                print("  {}: {:.150}".format(*failure))
        if out:
            write(out, {"environment": where, "rows": rows})
    print(f"{time.monotonic() - started:.0f} seconds" + (f"; written to {out}" if out else ""))
    return rows
