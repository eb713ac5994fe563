"""The forward pass of attention in five kernels, compiled by torch, and in one fused kernel.

The five kernels are the steps of the FlashAttention paper's figure 1: product, mask, softmax, dropout, product.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from torch._dynamo.utils import counters

from bench.attention.accuracy import WrongResult, relative_error
from bench.attention.contenders import draw_inputs
from bench.attention.shapes import AttentionShape
from bench.common.drawing import SMALL, WIDTH, styled
from bench.common.formatting import rounded, table
from bench.common.looks import LOOKS
from bench.common.timing import Gpu, median_milliseconds, recorded
from bench.paper.settings import PaperSettings
from kernels.flash2 import flash2
from kernels.naive.definition import standard_attention, visible

TITLE = "Attention in five kernels, compiled, and in one kernel"
SHAPES = {
    "full": {"batch": 16, "heads": 16, "seq_len": 1024, "head_dim": 64},
    "smoke": {"batch": 1, "heads": 16, "seq_len": 128, "head_dim": 16},
}
DROPOUT = 0.1
STEPS = {"Q K^T": "#4f5b66", "mask": "#9aa5b1", "softmax": "#e377c2", "dropout": "#b8a3d1", "P V": "#1f77b4"}
COMPILED = {"torch.compile, mask added": "added", "torch.compile, masked_fill": "filled"}
FUSED = "flash2"
BACKENDS = {"full": "inductor", "smoke": "eager"}  # a smoke run is shorter than its compilation
ROUNDS = {"full": 10, "smoke": 1}
TOLERANCE = 0.1


def cells(settings: PaperSettings) -> list[dict]:
    return [SHAPES[settings.size] | {"dropout": DROPOUT}]


def measure(cell: dict, gpu: Gpu, settings: PaperSettings) -> Iterator[dict]:
    """Yield a row for each step, each way to compile all steps, and the fused kernel, timed in turn."""
    shape = AttentionShape("fusion", **{key: cell[key] for key in SHAPES["full"]})
    q, k, v = (x.requires_grad_() for x in draw_inputs(shape, gpu.device)[:3])
    heads_first = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    scale = shape.head_dim**-0.5
    first = [x[:1].detach().double() for x in (q, k, v)]
    check = partial(check_dropped, exact=standard_attention(*first, causal=True, scale=scale))
    torch.manual_seed(0)
    moved, calls = bytes_of(shape), {}
    rows = {part: {"part": part, "bytes": moved.get(part), "fired": None, "status": None} for part in moved}
    with torch.no_grad(), recorded([rows[step] for step in STEPS], gpu):
        calls |= separate(*heads_first, scale, check)
    for part, mask in COMPILED.items():
        with recorded([rows[part]], gpu):
            calls[part] = compiled(mask, BACKENDS[settings.size], *heads_first)
            fired = patterns_fired(calls[part], check)
            rows[part]["fired"] = fired if settings.size == "full" else None
    with recorded([rows[FUSED]], gpu):
        calls[FUSED] = lambda: flash2(q, k, v, causal=True, scale=scale, dropout_p=DROPOUT)
        check(calls[FUSED]())
    ready = {part: call for part, call in calls.items() if rows[part]["status"] is None}
    with recorded([rows[part] for part in ready], gpu):
        for part, ms in zip(ready, median_milliseconds(ready.values(), gpu, ROUNDS[settings.size]), strict=True):
            rows[part].update(ms=ms, status="ok")
    yield from rows.values()


def bytes_of(shape: AttentionShape) -> dict[str, int | None]:
    """Return the bytes that each part loads and stores, without caches; None for what torch.compile makes.

    n tokens of size d, 2 bytes per element. The causal mask is read from a cache. Dropout also stores which elements it
    keeps, a byte each. The fused kernel's bytes are the least: each input and output once, and a statistic of 4 bytes.
    """
    n, d, heads = shape.seq_len, shape.head_dim, shape.batch * shape.heads
    product, elementwise = 2 * (n * n + 2 * n * d), 4 * n * n
    of_steps = product, elementwise, elementwise, elementwise + n * n, product
    found = {step: heads * count for step, count in zip(STEPS, of_steps, strict=True)}
    return found | dict.fromkeys(COMPILED) | {FUSED: heads * (8 * n * d + 4 * n)}


def check_dropped(out: Tensor, exact: Tensor) -> None:
    """Raise WrongResult if out (B, T, H, D) is not attention with dropout.

    Dropout with probability p changes the output by sqrt(p / (1 - p)) of its norm, because the values of different keys
    are independent. Any other change adds to this error, and a missing dropout lacks it.
    """
    error, expected = relative_error(out[:1].detach(), exact), math.sqrt(DROPOUT / (1 - DROPOUT))
    if not abs(error - expected) <= TOLERANCE:  # also true for NaN
        raise WrongResult(f"the error of out is {error:.2f}, and dropout alone makes {expected:.2f}")


def hidden_keys(q: Tensor) -> Tensor:
    """Return which keys each query must not see, (T, T) boolean, for q (B, H, T, D)."""
    return ~visible(q.shape[2], q.shape[2], q.device)


def bias_of(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return -inf for hidden keys and 0 for the others."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(hidden, -math.inf)


def separate(q: Tensor, k: Tensor, v: Tensor, scale: float, check: Callable) -> dict[str, Callable[[], Tensor]]:
    """Return a call of each step on the result of the step before. q, k, v are (B, H, T, D)."""
    q, bias, keys = q * scale, bias_of(hidden_keys(q), q.dtype), k.mT  # the scale is a power of two, so this is exact
    scores = q @ keys
    masked = scores + bias
    probabilities = masked.softmax(-1)
    kept = torch.native_dropout(probabilities, DROPOUT, True)[0]
    check((kept @ v).transpose(1, 2))
    calls = (
        lambda: q @ keys,
        lambda: scores + bias,
        lambda: masked.softmax(-1),
        lambda: torch.native_dropout(probabilities, DROPOUT, True),
        lambda: kept @ v,
    )
    return dict(zip(STEPS, calls, strict=True))


def compiled(mask: str, backend: str, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """Return a call of all steps in torch.compile. The mask is `added` or `filled` in; q, k, v are (B, H, T, D)."""
    hidden, root = hidden_keys(q), math.sqrt(q.shape[3])
    bias = bias_of(hidden, q.dtype)

    def added() -> Tensor:
        scores = q @ k.transpose(-2, -1) / root + bias
        return F.dropout(scores.softmax(-1), DROPOUT) @ v

    def filled() -> Tensor:
        scores = (q @ k.transpose(-2, -1) / root).masked_fill(hidden, -math.inf)
        return F.dropout(scores.softmax(-1), DROPOUT) @ v

    return torch.compile({"added": added, "filled": filled}[mask], backend=backend)


def patterns_fired(call: Callable[[], Tensor], check: Callable[[Tensor], None]) -> int:
    """Compile and check a call, and return how often inductor replaced an attention pattern by fused attention."""
    before = counters["inductor"]["fuse_attention"]
    check(call().transpose(1, 2))
    return counters["inductor"]["fuse_attention"] - before


def markdown(rows: list[dict]) -> str:
    found = {row["part"]: row for row in rows if "part" in row and row["status"] == "ok"}
    steps = [found[step] for step in STEPS if step in found]
    total = sum(row["ms"] for row in steps) if len(steps) == len(STEPS) else None
    lines = [line_of(row, total) for row in steps]
    if total:
        of_all = {"part": "five kernels", "ms": total, "bytes": sum(row["bytes"] for row in steps), "fired": None}
        lines.append(line_of(of_all, total))
    lines += [line_of(found[part], total) for part in (*COMPILED, FUSED) if part in found]
    shape = next(
        (f"{row['batch']} x {row['heads']} heads of {row['head_dim']}, {row['seq_len']:,} tokens" for row in rows), "-"
    )
    header = ["", "ms", "loads and stores, GB", "GB/s", "x five kernels", "attention pattern"]
    return (
        f"{table(header, lines)}\n\nForward, causal, {shape}, bf16, dropout {DROPOUT}. Each of the five kernels reads "
        "the result that the kernel before stored. Loads and stores are computed, without caches. torch.compile gets "
        "all steps at once, with gradients enabled. Attention pattern: whether inductor recognised attention and used "
        "scaled_dot_product_attention instead (its counter `fuse_attention`)."
    )


def line_of(row: dict, total: float | None) -> list[str]:
    gain = rounded(total / row["ms"]) if total and row["part"] not in STEPS else "-"
    moved = [rounded(row["bytes"] / 1e9), rounded(row["bytes"] / row["ms"] / 1e6, 0)] if row["bytes"] else ["-", "-"]
    fired = "-" if row["fired"] is None else "fired" if row["fired"] else "did not fire"
    return [row["part"], f"{row['ms']:.3f}", *moved, gain, fired]


@styled
def pictures(rows: list[dict], device: str) -> dict[str, Figure]:
    """Draw a bar for each way to compute attention; the five kernels follow each other in one bar."""
    found = {row["part"]: row for row in rows if "part" in row and row["status"] == "ok"}
    figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
    axes = figure.subplots()
    left = 0.0
    for step, colour in STEPS.items():
        if step in found:
            axes.barh("five kernels", found[step]["ms"], left=left, color=colour, label=step)
            left += found[step]["ms"]
    for part in (*COMPILED, FUSED):
        if part in found:
            bar = axes.barh(part, found[part]["ms"], color=LOOKS[FUSED].colour if part == FUSED else "#2ca02c")
            note = " attention pattern fired" if found[part]["fired"] else ""
            axes.bar_label(bar, [f" {found[part]['ms']:.2f}{note}"], fontsize=SMALL)
    axes.invert_yaxis()
    axes.set(xlabel="ms", title=f"Forward pass of attention with dropout, {device}")
    figure.legend(loc="outside lower center", ncols=len(STEPS))
    return {"": figure}
