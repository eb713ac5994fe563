"""Attention kernels side by side on one GPU: python -m bench.attention --help.

The protocol of the FlashAttention-2 paper: 16k tokens in all, hidden size 2048, heads of 64 and 128, FLOPs as
trainer.flops counts them; then a few shapes of our own. In each cell every variant is first held to the fp64 reference,
and only then timed:

- Variants alternate inside one process. A round takes one sample of each, and there are many rounds, so that a clock
  that drifts drifts for all. A row is the median of its samples with their 20th and 80th percentile.
- A sample is as many calls as make about 5 ms (20 at most) between two CUDA events. The GPU spins before the first
  event, while the host queues the calls: launch cost is hidden, as it is in a training step whose host runs ahead.
- `forward` runs with gradients wanted, and so saves what the backward pass needs; `backward` is torch.autograd.grad of
  a graph that is kept; `both` is the two in one call. dout is laid out as the variant lays out its output.
- Each variant finds its inputs as it likes them: contiguous (B, H, T, D) storage for those that come from torch,
  (B, T, H, D) for the others. In the cell of GPT-2 itself all get the same views of one packed projection; there flash2
  is flash2_packed, which writes dq, dk and dv into one gradient, and its rivals are not charged for gathering theirs.
- `peak_mib` is what a call holds at most, its results included and its inputs not; for `backward` and `both` that
  includes what the forward pass saved.
- `error` is the largest, over out, dq, dk and dv, of |x - exact| / |exact| in the Frobenius norm. The variant runs on
  the whole input, all of which must come out finite; compared are some (sequence, head) pairs, evenly spread: 64 where
  T is 512, 2 where it is 16k or more. `exact` is fp64, computed for 1024 queries at a time so that 64k fits. Where a
  backward pass runs out of memory, out alone is compared. Beyond three times the error of torch's math attention in
  the same dtype a variant is wrong, and gets no timing.

B batch, T sequence length, H query heads, G key/value heads, D head size.
"""

import argparse
import ctypes
import functools
import gc
import importlib.util
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench import charts
from bench.charts import HIDDEN, TOKENS
from bench.environment import ROOT, environment
from errors import UserError
from kernels.flash2 import flash2, flash2_packed
from kernels.standard import standard_attention, visible
from model.attention import Attention, sdpa
from trainer.flops import attention_flops

PASSES = "forward", "backward", "both"
RIVALS = "sdpa_flash", "sdpa_cudnn", "fa3"
NAMES = "out", "dq", "dk", "dv"
HEADS_FIRST = "naive", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LENGTHS = 512, 1024, 2048, 4096, 8192, 16384

FACTOR = 3  # times the error of torch's math attention, beyond which a variant is wrong
CHUNK = 1024  # queries of the reference at a time
SAMPLE_MS, SAMPLE_CALLS = 5, 20  # a sample lasts so long, with at most so many calls
SLOW_MS = 20  # a sample that lasts longer is taken in fewer rounds
HEAD_START = 3_000_000  # cycles the GPU spins while the host queues a sample: 1.5 ms or more


@dataclass(frozen=True)
class Cell:
    """One shape that all variants are measured on."""

    name: str
    batch: int
    seq_len: int
    heads: int
    head_dim: int
    causal: bool = True
    kv_heads: int = 0
    """As many as heads where 0."""
    packed: bool = False
    """q, k and v are views of one projection."""
    dtype: str = "bfloat16"

    def __post_init__(self):
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)

    def flops(self, pass_: str) -> float:
        """FLOPs of one call."""
        return attention_flops(self.batch, self.heads, self.seq_len, self.head_dim, self.causal, pass_=pass_)


def paper_cells(head_dim: int, causal: bool) -> list[Cell]:
    """One panel of the FlashAttention-2 paper's figures."""
    panel, heads = f"d{head_dim}_{'causal' if causal else 'full'}", HIDDEN // head_dim
    return [Cell(f"{panel}_{length}", TOKENS // length, length, heads, head_dim, causal) for length in LENGTHS]


# In order of interest, for those whose time runs out. 32 heads of 80 are GPT-3 2.7B's.
CELLS = [
    Cell("gpt2", batch=32, seq_len=1024, heads=12, head_dim=64, packed=True),
    *paper_cells(64, causal=True),
    *paper_cells(128, causal=True),
    *(Cell(f"d80_causal_{length}", TOKENS // length, length, heads=32, head_dim=80) for length in (2048, 8192)),
    *paper_cells(64, causal=False),
    *paper_cells(128, causal=False),
    Cell("64k", batch=1, seq_len=65536, heads=12, head_dim=64),
]


# The variants, each with the signature of model.attention


@functools.cache
def _compiled_flex() -> Callable:
    # One compilation per shape; fullgraph, or at its limit of recompilations dynamo would fall back to eager unseen.
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


@functools.cache
def _causal_blocks(seq_len: int, device: torch.device):
    return create_block_mask(lambda b, h, i, j: i >= j, None, None, seq_len, seq_len, device=device)


def flex(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """FlexAttention, compiled; its mask of blocks is made once per length."""
    blocks = _causal_blocks(q.shape[1], q.device) if causal else None
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return _compiled_flex()(q, k, v, block_mask=blocks, scale=scale, enable_gqa=grouped).transpose(1, 2)


def fa2(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """FlashAttention-2 from its own package."""
    from flash_attn import flash_attn_func

    return flash_attn_func(q, k, v, softmax_scale=scale, causal=causal)


def fa3(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """FlashAttention-3 from its own package, whose earlier versions return the logsumexp too."""
    from flash_attn_interface import flash_attn_func

    out = flash_attn_func(q, k, v, softmax_scale=scale, causal=causal)
    return out[0] if isinstance(out, tuple) else out


class _LibraryFA3(torch.autograd.Function):
    """FlashAttention-3's bare operators, as a loaded library registers them."""

    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        out, logsumexp, *_ = torch.ops.flash_attn_3.fwd(q, k, v, softmax_scale=scale, is_causal=causal)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.options = {"softmax_scale": scale, "is_causal": causal}
        return out

    @staticmethod
    def backward(ctx, dout):
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in ctx.saved_tensors[:3])
        torch.ops.flash_attn_3.bwd(dout, *ctx.saved_tensors, dq=dq, dk=dk, dv=dv, **ctx.options)
        return dq, dk, dv, None, None


def load_fa3(library: Path) -> Attention:
    """FlashAttention-3 from a bare library, such as xformers/flash_attn_3/_C.so of the xformers wheel.

    Raises:
        UserError: it cannot be loaded.
    """
    runtime = library.parent / "libcudart.so.12"
    try:
        # The library wants CUDA 12's runtime, which a torch for CUDA 13 has not loaded.
        ctypes.CDLL(str(runtime) if runtime.exists() else runtime.name, mode=ctypes.RTLD_GLOBAL)
        torch.ops.load_library(library)
    except OSError as error:
        raise UserError(
            f"--fa3-library {library} cannot be loaded ({error}); it needs libcudart.so.12 beside it or on the "
            "library path"
        ) from error
    return lambda q, k, v, *, causal, scale: _LibraryFA3.apply(q, k, v, causal, scale)


def available(fa3_library: Path | None = None) -> dict[str, Attention]:
    """The variants this machine has, by name. What a GPU cannot run of them shows when it is tried."""
    backends = "flash", "cudnn", "efficient"
    variants = {"naive": standard_attention}
    variants |= {f"sdpa_{backend}": functools.partial(sdpa, backend=backend) for backend in backends}
    variants |= {"flex": flex, "flash2": flash2}
    if importlib.util.find_spec("flash_attn"):
        variants["fa2"] = fa2
    if fa3_library:
        variants["fa3"] = load_fa3(fa3_library)
    elif importlib.util.find_spec("flash_attn_interface"):
        variants["fa3"] = fa3
    return variants


# Inputs, and a variant bound to them


class Data(NamedTuple):
    """q, dout (B, T, H, D), k and v (B, T, G, D) of a cell; qkv (B, T, 3, H, D) where they are views of it."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    qkv: Tensor | None


def draw(cell: Cell, device: str) -> Data:
    """Standard normal inputs, the same at every call."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(cell.batch, cell.seq_len, *shape, generator=generator, device=device, dtype=dtype)

    dtype = DTYPES[cell.dtype]
    dout = normal(cell.heads, cell.head_dim)
    if cell.packed:
        qkv = normal(3, cell.heads, cell.head_dim)
        return Data(*qkv.unbind(2), dout, qkv)
    return Data(*(normal(heads, cell.head_dim) for heads in (cell.heads, cell.kv_heads, cell.kv_heads)), dout, None)


@dataclass
class Contender:
    """A variant bound to its inputs in one cell."""

    variant: str
    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    """What gradients are taken of: q, k and v, or the packed projection."""
    dout: Tensor
    error: float | None = None

    def call(self, pass_: str) -> Callable[[], object]:
        """A pass without arguments; for `backward` the graph that it runs on is made here."""
        if pass_ == "forward":
            return self.forward
        if pass_ == "both":
            return lambda: torch.autograd.grad(self.forward(), self.leaves, self.dout)
        out = self.forward()
        return lambda: torch.autograd.grad(out, self.leaves, self.dout, retain_graph=True)


def bind(variant: str, attend: Attention, cell: Cell, data: Data) -> Contender:
    """`attend` with the inputs of a cell, in the layout it likes."""
    options = {"causal": cell.causal, "scale": cell.head_dim**-0.5}
    if cell.packed and attend is flash2:
        qkv = data.qkv.detach().requires_grad_()
        return Contender(variant, lambda: flash2_packed(qkv, **options), (qkv,), data.dout)
    inputs = data[:3]
    if variant in HEADS_FIRST and not cell.packed:
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    return Contender(variant, lambda: attend(*leaves, **options), leaves, data.dout)


# Right or wrong


class WrongResult(Exception):
    """A variant's output or gradient is not attention's."""


class Truth(NamedTuple):
    """out, dq, dk and dv in fp64 for some (sequence, key/value head) pairs, and the relative errors allowed there."""

    pairs: tuple[Tensor, Tensor]
    exact: list[Tensor]
    allowed: list[float]


def pick(x: Tensor, kv_heads: int, pairs: tuple[Tensor, Tensor]) -> Tensor:
    """(pairs, T, H / G or 1, D): the chosen pairs of x (B, T, H or G, D)."""
    sequences, groups = pairs
    return x.unflatten(2, (kv_heads, -1))[sequences, :, groups]


def in_chunks(attend: Attention, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, causal: bool) -> list[Tensor]:
    """out, dq, dk and dv in fp64 of `attend`, called for CHUNK queries at a time: T x T would not fit in memory.

    A causal mask aligned at the bottom right stays right if the keys end where the chunk's queries do.
    """
    out, dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (q, q, k, v))
    length = q.shape[1]
    for start in range(0, length, CHUNK):
        rows = slice(start, min(start + CHUNK, length))
        keys = slice(0, rows.stop if causal else length)
        leaves = [x.detach().requires_grad_() for x in (q[:, rows], k[:, keys], v[:, keys])]
        chunk = attend(*leaves, causal=causal, scale=q.shape[-1] ** -0.5)
        out[:, rows] = chunk.detach()
        grads = torch.autograd.grad(chunk, leaves, dout[:, rows])
        for total, place, grad in zip((dq, dk, dv), (rows, keys, keys), grads, strict=True):
            total[:, place] += grad
    return [out, dq, dk, dv]


def math_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """torch's math attention with the causal mask aligned at the bottom right: the yardstick of errors."""
    mask = visible(q.shape[1], k.shape[1], q.device) if causal else None
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True).transpose(1, 2)


def relative_error(x: Tensor, exact: Tensor) -> float:
    """|x - exact| / |exact| in the Frobenius norm."""
    tiny = 1e-6 * exact.numel() ** 0.5  # dq and dk vanish where a query sees one key
    return ((x.double() - exact).norm() / exact.norm().clamp(min=tiny)).item()


def truth_of(cell: Cell, data: Data) -> Truth:
    """The reference of a cell, and how far off a variant may be."""
    all_pairs = cell.batch * cell.kv_heads
    count = min(all_pairs, max(2, 2 * TOKENS // cell.seq_len))
    chosen = torch.linspace(0, all_pairs - 1, count, dtype=torch.float64, device=data.q.device).long()
    pairs = chosen // cell.kv_heads, chosen % cell.kv_heads
    inputs = [pick(x, cell.kv_heads, pairs) for x in data[:4]]
    exact = in_chunks(standard_attention, *(x.double() for x in inputs), causal=cell.causal)
    theirs = in_chunks(math_attention, *inputs, causal=cell.causal)
    rounding = 2 * torch.finfo(torch.float32).eps  # theirs may be exact
    allowed = [max(FACTOR * relative_error(*both), rounding) for both in zip(theirs, exact, strict=True)]
    return Truth(pairs, exact, allowed)


def check(contender: Contender, cell: Cell, truth: Truth) -> None:
    """Runs a variant once on the whole input, and notes its error and the layout of its dout.

    Raises:
        WrongResult: a shape, a value that is not finite, or an error beyond what is allowed.
    """
    out = contender.forward()
    if out.shape != contender.dout.shape:
        raise WrongResult(f"out has shape {tuple(out.shape)}, not {tuple(contender.dout.shape)}")
    contender.dout = torch.empty_like(out).copy_(contender.dout)
    got = [out.detach()]
    try:
        grads = torch.autograd.grad(out, contender.leaves, contender.dout)
        got += grads if len(grads) == 3 else grads[0].unbind(2)
    except torch.OutOfMemoryError:
        pass  # the rows of the passes with a backward will say so
    errors = []
    for name, x, exact in zip(NAMES, got, truth.exact, strict=False):
        if not x.isfinite().all():
            raise WrongResult(f"{name} is not finite")
        errors.append(relative_error(pick(x, cell.kv_heads, truth.pairs), exact))
    contender.error = max(errors)
    for name, error, allowed in zip(NAMES, errors, truth.allowed, strict=False):
        if error > allowed:
            raise WrongResult(f"{name} is off by {error:.1e}, where {allowed:.1e} is allowed")


# The clock


class Gpu:
    """Time and memory on the current CUDA device. Tests put another in its place."""

    device = "cuda"

    def milliseconds(self, call: Callable[[], object], calls: int) -> float:
        """Duration of one call, from `calls` of them in a row."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(HEAD_START)
        if calls > 1:
            call()  # the caches are then this variant's own
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls

    def allocated(self) -> int:
        """Bytes of tensors alive."""
        return torch.cuda.memory_allocated()

    def peak(self, call: Callable[[], object]) -> int:
        """The most bytes alive during a call."""
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated()

    def release(self) -> None:
        """Gives cached memory back to the driver, which needs some to load kernels into."""
        gc.collect()
        torch.cuda.empty_cache()


@dataclass
class Series:
    """The samples of one row."""

    row: dict
    call: Callable[[], object]
    calls: int
    every: int
    samples: list[float] = field(default_factory=list)


@contextmanager
def recorded(rows: Iterable[dict], gpu: Gpu) -> Iterator[None]:
    """What is raised inside becomes the status of `rows`: one kernel's failure must not end the others' run."""
    try:
        yield
        return
    except torch.OutOfMemoryError:
        outcome = {"status": "oom"}
    except Exception as error:
        outcome = {"status": "failed", "message": (str(error).strip() or type(error).__name__).splitlines()[0]}
    for row in rows:
        row.update(outcome)
    gpu.release()


def empty_row(cell: Cell, variant: str, pass_: str) -> dict:
    """A row of which only the shape is known."""
    shape = {
        key: getattr(cell, key) for key in ("batch", "heads", "kv_heads", "seq_len", "head_dim", "causal", "dtype")
    }
    unknown = ("ms", "ms_p20", "ms_p80", "tflops", "peak_mib", "error", "status", "message")
    return {"variant": variant, "pass": pass_, **shape, **dict.fromkeys(unknown)}


def start_series(row: dict, contender: Contender, gpu: Gpu, rounds: int) -> Series:
    """Warms a pass up, notes its memory, and settles how many calls make a sample."""
    before = gpu.allocated()
    call = contender.call(row["pass"])
    call()
    row["peak_mib"] = round((gpu.peak(call) - before) / 2**20, 1)
    ms = gpu.milliseconds(call, 2)
    calls = min(max(int(SAMPLE_MS / ms), 1), SAMPLE_CALLS)
    return Series(row, call, calls, every=min(math.ceil(ms * calls / SLOW_MS), max(rounds // 6, 1)))


def alternate(all_series: list[Series], cell: Cell, gpu: Gpu, rounds: int) -> None:
    """Takes the samples in turn, round after round, and completes the rows."""
    for number in range(rounds):
        for series in all_series:
            if series.row["status"] is None and number % series.every == 0:
                with recorded([series.row], gpu):
                    series.samples.append(gpu.milliseconds(series.call, series.calls))
    for series in all_series:
        if series.row["status"] is None:
            quantiles = torch.tensor(series.samples).quantile(torch.tensor([0.5, 0.2, 0.8])).tolist()
            series.row.update(zip(("ms", "ms_p20", "ms_p80"), quantiles, strict=True))
            series.row.update(tflops=cell.flops(series.row["pass"]) / quantiles[0] / 1e9, status="ok")


def measure(cell: Cell, variants: dict[str, Attention], gpu: Gpu, rounds: int) -> list[dict]:
    """The rows of one cell: every variant, every pass."""
    rows = {variant: {pass_: empty_row(cell, variant, pass_) for pass_ in PASSES} for variant in variants}
    contenders = []
    with recorded([row for of_variant in rows.values() for row in of_variant.values()], gpu):
        data = draw(cell, gpu.device)
        truth = truth_of(cell, data)
        for variant, attend in variants.items():
            with recorded(rows[variant].values(), gpu):
                contender = bind(variant, attend, cell, data)
                contenders.append(contender)
                check(contender, cell, truth)
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
                    all_series.append(start_series(row, contender, gpu, rounds))
        alternate(all_series, cell, gpu, rounds)
    torch.compiler.reset()
    return [row for of_variant in rows.values() for row in of_variant.values()]


# What is told


def speedups(rows: list[dict], rival: str, pass_: str) -> list[float]:
    """flash2's speed over the rival's, for every shape in `rows` where both were timed."""
    speeds = {}
    for row in rows:
        if row["pass"] == pass_ and row["status"] == "ok":
            shape = row["batch"], row["heads"], row["seq_len"], row["head_dim"], row["causal"]
            speeds.setdefault(shape, {})[row["variant"]] = row["tflops"]
    return [by["flash2"] / by[rival] for by in speeds.values() if "flash2" in by and rival in by]


def geometric_mean(values: list[float]) -> float:
    """The n-th root of the product; NaN of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def ratio_text(rows: list[dict]) -> str:
    """flash2's speed over each rival's, forward/backward/both: the geometric mean if `rows` hold several shapes."""
    texts = []
    for rival in RIVALS:
        means = [geometric_mean(speedups(rows, rival, pass_)) for pass_ in PASSES]
        if not all(map(math.isnan, means)):
            texts.append(f"{rival} " + "/".join("-" if math.isnan(mean) else f"{mean:.2f}" for mean in means))
    return ", ".join(texts)


def cell_line(cell: Cell, rows: list[dict]) -> str:
    """One line: each variant's TFLOP/s, forward/backward/both, and flash2's speed over its rivals'."""
    texts = {}
    for row in rows:
        text = f"{row['tflops']:.0f}" if row["status"] == "ok" else row["status"]
        texts.setdefault(row["variant"], []).append(text)
    for variant, of_passes in texts.items():
        failed_alike = of_passes[0] in ("oom", "failed") and len(set(of_passes)) == 1
        texts[variant] = of_passes[0] if failed_alike else "/".join(of_passes)
    line = f"{cell.name:17} " + " ".join(f"{variant} {text}" for variant, text in texts.items())
    return f"{line} | x {ratio_text(rows)}".removesuffix(" | x ")


def summary(rows: list[dict]) -> str:
    """The geometric means over the paper's lengths, one line per head size and mask."""
    lines = ["flash2's speed over its rivals', geometric mean over 512 to 16k, forward/backward/both:"]
    for panel in charts.PANELS:
        part = [row for row in rows if charts.panel_of(row) == panel]
        lengths = {row["seq_len"] for row in part if row["variant"] == "flash2" and row["status"] == "ok"}
        if lengths:
            missing = "" if len(lengths) == len(LENGTHS) else f" ({len(lengths)} of {len(LENGTHS)} lengths)"
            lines.append(f"{panel.name:12} x {ratio_text(part)}{missing}")
    return "\n".join(lines) if len(lines) > 1 else ""


# The command


def positive(text: str) -> int:
    """An integer of 1 or more, for argparse."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.attention",
        description="Measures every attention this machine has, side by side on one GPU.",
        epilog="One shape: python -m bench.attention --batch 4 --heads 16 --seq-len 4096 --head-dim 128 --causal",
    )
    add = parser.add_argument
    add("--cells", help=f"only these, e.g. d64_causal,gpt2 or d128_full_4096 (all: {', '.join(c.name for c in CELLS)})")
    add("--variants", help="only these, e.g. sdpa_cudnn,flash2")
    add("--dtype", choices=DTYPES, default="bfloat16")
    shape = parser.add_argument_group("one shape of your own, instead of the cells")
    shape.add_argument("--seq-len", type=positive, metavar="T", help="asks for one shape")
    shape.add_argument("--batch", type=positive, metavar="B", help=f"by default what makes {TOKENS} tokens")
    shape.add_argument("--heads", type=positive, metavar="H", help=f"by default what makes a hidden size of {HIDDEN}")
    shape.add_argument("--kv-heads", type=positive, metavar="G", help="by default as many as heads")
    shape.add_argument("--head-dim", type=positive, metavar="D", help="64 by default")
    shape.add_argument("--causal", action="store_true")
    add("--rounds", type=positive, default=20, help="samples of each variant and pass (20)")
    add("--budget-seconds", type=float, default=3600, help="no cell is begun after so long (3600)")
    add("--gpu", help="folder under bench/results; by default made of the device's name")
    add("--out", type=Path, help="file to write; a part of the cells, or one shape, is written only if this is given")
    add("--fa3-library", type=Path, help="FlashAttention-3 as a bare library, as in the xformers wheel (FA3_LIBRARY)")
    add("--draw", type=Path, metavar="JSON", help="measure nothing: draw the charts of a results file again")
    add("--explain", action="store_true", help="measure nothing: print what flash2 would launch for each shape")
    add("--arch", help="for --explain: an architecture such as sm_80; this machine's, or sm_90, by default")
    return parser.parse_args(argv)


def chosen_cells(arguments: argparse.Namespace) -> list[Cell]:
    """The cells that the command line asks for.

    Raises:
        UserError: an unknown cell, or a shape that is none.
    """
    if arguments.seq_len:
        return [own_cell(arguments)]
    if any((arguments.batch, arguments.heads, arguments.kv_heads, arguments.head_dim, arguments.causal)):
        raise UserError("a shape of your own needs --seq-len; without one, choose among the cells with --cells")
    wanted = arguments.cells.split(",") if arguments.cells else [cell.name for cell in CELLS]
    for part in wanted:
        if not any(f"{cell.name}_".startswith(f"{part}_") for cell in CELLS):
            raise UserError(f"--cells {part} is unknown; choose among {', '.join(cell.name for cell in CELLS)}")
    cells = [cell for cell in CELLS if any(f"{cell.name}_".startswith(f"{part}_") for part in wanted)]
    return [replace(cell, dtype=arguments.dtype) for cell in cells]


def own_cell(arguments: argparse.Namespace) -> Cell:
    """The one shape of the command line."""
    if arguments.cells:
        raise UserError("--cells and a shape of your own exclude each other; leave one of the two out")
    length, head_dim = arguments.seq_len, arguments.head_dim or 64
    batch, heads = arguments.batch or max(TOKENS // length, 1), arguments.heads or max(HIDDEN // head_dim, 1)
    kv_heads = arguments.kv_heads or heads
    if heads % kv_heads:
        raise UserError(f"--heads {heads} must be a multiple of --kv-heads {kv_heads}")
    return Cell("shape", batch, length, heads, head_dim, arguments.causal, kv_heads, dtype=arguments.dtype)


def chosen_variants(arguments: argparse.Namespace) -> dict[str, Attention]:
    """The variants that the command line asks for, of those there are."""
    library = arguments.fa3_library or os.environ.get("FA3_LIBRARY")
    variants = available(Path(library) if library else None)
    wanted = arguments.variants.split(",") if arguments.variants else list(variants)
    for name in wanted:
        if name not in variants:
            raise UserError(f"--variants {name}: this machine has {', '.join(variants)}")
    return {name: variants[name] for name in wanted}


def destination(arguments: argparse.Namespace) -> Path | None:
    """The results file: --out, or the GPU's own where the whole table is measured."""
    whole = not (arguments.cells or arguments.variants or arguments.seq_len) and arguments.dtype == "bfloat16"
    if arguments.out or not whole:
        return arguments.out
    name = torch.cuda.get_device_name().lower().removeprefix("nvidia ")
    return ROOT / "bench" / "results" / (arguments.gpu or re.sub(r"[^a-z0-9]+", "-", name)) / "attention.json"


def measure_all(
    cells: list[Cell], variants: dict[str, Attention], gpu: Gpu, rounds: int, budget: float, out: Path | None
) -> list[dict]:
    """Measures and prints cell after cell; what is there is written after each, so that an interruption loses none."""
    rows, told, where, started = [], set(), environment(), time.monotonic()
    print(f"{where['gpu']}, torch {where['torch']}, Triton {where['triton']}, {cells[0].dtype}")
    print("TFLOP/s of forward/backward/both, and after the bar flash2's speed over its rivals'")
    for number, cell in enumerate(cells):
        if time.monotonic() - started > budget:
            print(f"--budget-seconds {budget:.0f} are spent; skipped: {', '.join(c.name for c in cells[number:])}")
            break
        rows += (new := measure(cell, variants, gpu, rounds))
        print(cell_line(cell, new), flush=True)
        for failure in {(row["variant"], row["message"]): None for row in new if row["message"]}:
            if failure not in told:
                print("  {}: {:.150}".format(*failure))
        told |= {(row["variant"], row["message"]) for row in new}
        if out:
            write(out, {"environment": where, "rows": rows})
    print(f"{time.monotonic() - started:.0f} seconds" + (f"; written to {out}" if out else ""))
    return rows


def write(out: Path, results: dict) -> None:
    """Replaces a results file as a whole."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}.partial")
    partial.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
    partial.replace(out)


def explain(cells: list[Cell], arch: str | None) -> None:
    """Prints what flash2 would launch for each shape."""
    from kernels.flash2 import launch  # needs Triton

    if arch is None:
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "sm_90"
    for cell in cells:
        print(f"{cell.name:17} {launch.explain(cell.head_dim, DTYPES[cell.dtype], cell.causal, cell.seq_len, arch)}")


def run(arguments: argparse.Namespace) -> None:
    """What the command line asks for.

    Raises:
        UserError: it cannot be done.
    """
    if arguments.draw:
        if not arguments.draw.is_file():
            raise UserError(f"--draw {arguments.draw} does not exist; measure first, or name another results file")
        results = json.loads(arguments.draw.read_text())
        charts.draw(results["rows"], arguments.draw, results["environment"])
        return print(summary(results["rows"]))
    cells = chosen_cells(arguments)
    if arguments.explain:
        return explain(cells, arguments.arch)
    if not torch.cuda.is_available():
        raise UserError("bench.attention measures GPUs and finds none; without one, --explain and --draw work")
    variants, out = chosen_variants(arguments), destination(arguments)
    rows = measure_all(cells, variants, Gpu(), arguments.rounds, arguments.budget_seconds, out)
    if out:
        charts.draw(rows, out, environment())
    print(summary(rows))


def main() -> None:
    try:
        run(parse())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
