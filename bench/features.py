"""Measure what flash2 can do besides plain attention: speed, sparsity, errors, memory, and training with grouped heads.

Examples:
  python -m bench.features                                   all parts; writes bench/results/<gpu>/features.json
  python -m bench.features only=sparsity out=rows.json

`speed` is the plain case's time over the feature's; the two are sampled in turn. `kept` is the share of the 128 x 128
blocks under the diagonal that a pattern keeps or a window touches. Errors are relative to fp64 in the Frobenius norm,
beside the errors of torch's flash backend. The inputs are normal, give scores up to 1e4, or let queries see one key.
`key_heads` takes training steps of gpt2, not compiled, with 12, 4 and 1 heads of keys and values. The models are timed
in turn. `cache_mib` is the key/value cache of one sequence in bf16 when sampling.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from bench.attention.accuracy import NAMES, relative_error
from bench.attention.shapes import HIDDEN, TOKENS
from bench.common.command_line import check_choice, check_output_file, check_positive, launch
from bench.common.results import environment, results_folder, set_aside, write
from bench.common.timing import Gpu, in_turn, median_milliseconds
from bench.training.trainers import DTYPE, Trainer, TrainingCell, ours
from errors import UserError
from kernels.flash2 import flash2
from kernels.flash2.block_lists import BLOCK, butterfly, listed
from kernels.naive.definition import standard_attention
from model.attention import Sdpa
from model.gpt2 import KeyValueCache
from trainer.meters import GIB

PASSES = "forward", "both"
HEAD_DIMS = 64, 128
SPEED_LENGTHS = 1024, 16384
ERROR_SHAPE = 2, 1024, 8  # batch, T, heads
ERROR_DRAWS = 32
MEMORY_LENGTHS = [2**n for n in range(14, 19)]  # to 256k tokens in one sequence
MEMORY_HEADS = 8
WINDOW = DOCUMENT = 1024
SPARSE_LENGTH, SPARSE_PARTS, SPARSE_WINDOWS = 16384, (2, 4, 8, 16), (16383, 8192, 4096, 2048, 1024)
GROUP = 4  # query heads to a key/value head
KEY_HEADS = 12, 4, 1  # of gpt2's 12 query heads
KEY_HEADS_CELL = TrainingCell("gpt2", 8192, batches=(8,))
KEY_HEADS_STEPS = 4  # of a sample
Inputs = tuple[Tensor, ...]


def normal(batch: int, seq_len: int, heads: int, head_dim: int, device: str, kv_heads: int = 0) -> Inputs:
    """Return standard normal q, k, v and dout in bf16."""
    all_heads = heads, kv_heads or heads, kv_heads or heads, heads
    return tuple(torch.randn(batch, seq_len, n, head_dim, device=device, dtype=torch.bfloat16) for n in all_heads)


def bound(attend: Callable, inputs: Inputs) -> dict[str, Callable[[], object]]:
    """Return the passes of `attend` on inputs, without arguments. `both` returns out, dq, dk and dv."""
    *leaves, dout = (x.detach().requires_grad_(i < 3) for i, x in enumerate(inputs))

    def both() -> Inputs:
        out = attend(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    return {"forward": lambda: attend(*leaves), "both": both}


def features(head_dim: int, seq_len: int, device: str) -> Iterator[tuple[str, dict, dict]]:
    """Yield (name, passes with the feature, passes without it)."""
    batch, heads = TOKENS // seq_len, HIDDEN // head_dim
    inputs = normal(batch, seq_len, heads, head_dim, device)
    causal = partial(flash2, causal=True)
    plain = bound(causal, inputs)
    cuts = torch.arange(0, TOKENS + 1, DOCUMENT, dtype=torch.int32, device=device)
    yield f"window {WINDOW}", bound(partial(causal, window=WINDOW), inputs), plain
    yield f"documents of {DOCUMENT}", bound(partial(causal, cu_seqlens=cuts), inputs), plain
    yield "dropout 0.1", bound(partial(causal, dropout_p=0.1), inputs), plain
    grouped = normal(batch, seq_len, heads, head_dim, device, heads // GROUP)
    yield f"grouped heads {GROUP} to 1", bound(causal, grouped), plain
    yield "deterministic", bound(partial(causal, deterministic=True), inputs), plain


def speed_rows(gpu: Gpu, rounds: int) -> Iterator[dict]:
    """Compare every feature with the plain case, per head size, length and pass."""
    for head_dim, seq_len in product(HEAD_DIMS, SPEED_LENGTHS):
        for name, with_it, without in features(head_dim, seq_len, gpu.device):
            for pass_ in PASSES:
                ms, plain_ms = median_milliseconds((with_it[pass_], without[pass_]), gpu, rounds)
                row = {"feature": name, "head_dim": head_dim, "seq_len": seq_len, "pass": pass_}
                yield row | {"ms": ms, "plain_ms": plain_ms, "speed": plain_ms / ms}


def patterns(seq_len: int, device: str) -> Iterator[tuple[str, dict, int]]:
    """Yield (name, options of flash2, number of computed blocks under the diagonal).

    Lists come first, then no list, then windows. Lists and windows begin with all blocks.
    """
    n = seq_len // BLOCK
    i, generator = torch.arange(n), torch.Generator().manual_seed(0)
    lower, chance = i[:, None] >= i, torch.rand(n, n, generator=generator)
    drawn = {f"1 in {part}": (chance * part < 1) | (i[:, None] == i) for part in SPARSE_PARTS}
    for name, pattern in {"all blocks": lower, **drawn, "butterfly": butterfly(n)}.items():
        kept = listed(pattern, causal=True, documents=False, ragged=False)
        yield name, {"blocks": kept.to(device)}, int((pattern & lower).sum())
    yield "no list", {}, int(lower.sum())
    for window in SPARSE_WINDOWS:
        touched = lower & (i[:, None] - i <= (window - 2) // BLOCK + 1)
        yield f"window {window}", {"window": window}, int(touched.sum())


def sparsity_rows(gpu: Gpu, rounds: int) -> Iterator[dict]:
    """Compare lists and windows that leave blocks out with the list and the window of all blocks."""
    for head_dim in HEAD_DIMS:
        inputs = normal(TOKENS // SPARSE_LENGTH, SPARSE_LENGTH, HIDDEN // head_dim, head_dim, gpu.device)
        whole, all_blocks = None, 0
        for name, options, blocks in patterns(SPARSE_LENGTH, gpu.device):
            passes = bound(partial(flash2, causal=True, **options), inputs)
            if whole is None or (name.startswith("window") and blocks == all_blocks):
                whole, all_blocks = passes, blocks
            for pass_ in PASSES:
                ms, all_ms = median_milliseconds((passes[pass_], whole[pass_]), gpu, rounds)
                row = {"pattern": name, "head_dim": head_dim, "seq_len": SPARSE_LENGTH, "pass": pass_}
                yield row | {"kept": blocks / all_blocks, "ms": ms, "speed": all_ms / ms}


def hard_inputs(head_dim: int, device: str) -> Iterator[tuple[str, bool, Inputs]]:
    """Yield (name, causal, inputs) for the comparison of errors."""
    q, k, v, dout = normal(*ERROR_SHAPE, head_dim, device)
    yield "normal", True, (q, k, v, dout)
    yield "normal, no mask", False, (q, k, v, dout)
    reach = (torch.einsum("bihd,bjhd->bhij", q.float(), k.float()).abs().max() * head_dim**-0.5).item()
    factor = (1e4 / reach) ** 0.5
    yield "scores up to 1e4", True, (q * factor, k * factor, v, dout)
    yield "a single key", False, (q, k[:, :1], v[:, :1], dout)


def error_rows(gpu: Gpu, rounds: int) -> Iterator[dict]:
    """Yield the errors of flash2 and of torch's flash backend against fp64: means over the same draws of the inputs."""
    variants = {"flash2": flash2, "sdpa_flash": Sdpa("flash")}
    for head_dim in HEAD_DIMS:
        errors: dict[tuple[str, str], list[list[float]]] = {}
        for _ in range(ERROR_DRAWS):
            for name, causal, inputs in hard_inputs(head_dim, gpu.device):
                options = {"causal": causal, "scale": head_dim**-0.5}
                doubled = tuple(x.double() for x in inputs)
                exact = bound(partial(standard_attention, **options), doubled)["both"]()
                for variant, attend in variants.items():
                    found = bound(partial(attend, **options), inputs)["both"]()
                    errors.setdefault((name, variant), []).append(list(map(relative_error, found, exact)))
        for (name, variant), draws in errors.items():
            means = [statistics.mean(values) for values in zip(*draws, strict=True)]
            row = {"inputs": name, "head_dim": head_dim, "variant": variant, "draws": len(draws)}
            yield row | dict(zip(NAMES, means, strict=True))


def memory_rows(gpu: Gpu, rounds: int) -> Iterator[dict]:
    """Yield the peak memory of forward and backward of one sequence, without q, k, v, dout, out and the gradients."""
    for head_dim, seq_len in product(HEAD_DIMS, MEMORY_LENGTHS):
        inputs = normal(1, seq_len, MEMORY_HEADS, head_dim, gpu.device)
        call = bound(partial(flash2, causal=True), inputs)["both"]
        before = gpu.allocated()
        extra = gpu.peak(call) - before - 4 * inputs[0].nbytes  # out, dq, dk and dv
        row = {"head_dim": head_dim, "seq_len": seq_len, "heads": MEMORY_HEADS, "extra_mib": extra / 2**20}
        yield row | {"bytes_per_query_and_head": extra / seq_len / MEMORY_HEADS}


def key_head_rows(gpu: Gpu, rounds: int) -> Iterator[dict]:
    """Yield memory and speed of training steps per number of key heads. The first two steps come before the timing."""
    cell, trainer, rows, jobs = KEY_HEADS_CELL, Trainer("ours", "flash2", compiled=False), [], []
    [batch] = cell.batches
    for n_kv_head in KEY_HEADS:
        job = ours(replace(cell, n_kv_head=n_kv_head), trainer, gpu.device)
        job.step(batch)
        peak, shape = gpu.peak(partial(job.step, batch)), job.model.config
        job.park()
        gpu.release()
        row = {"trainer": "ours", "model": cell.model, "context_length": cell.context_length, "batch_size": batch}
        row |= {"attention": "flash2", "compiled": False, "n_head": shape.n_head, "n_kv_head": n_kv_head}
        cache = KeyValueCache(shape, 1, torch.device("meta"), DTYPE).kv.nbytes
        parameters = sum(p.numel() for p in job.model.parameters())
        rows.append(row | {"parameters": parameters, "peak_gib": peak / GIB, "cache_mib": cache / 2**20, "samples": []})
        jobs.append(job)
    for row, job in in_turn([*zip(rows, jobs, strict=True)], rounds):
        with job.alone():
            row["samples"].append(gpu.milliseconds(partial(job.step, batch), KEY_HEADS_STEPS, spin_ms=0))
        gpu.release()
    for row in rows:
        ms = statistics.median(row["samples"])
        yield row | {"ms": ms, "tokens_per_second": 1000 * batch * cell.context_length / ms}


PARTS = {
    "speed": speed_rows,
    "sparsity": sparsity_rows,
    "errors": error_rows,
    "memory": memory_rows,
    "key_heads": key_head_rows,
}


@dataclass
class FeatureSettings:
    """What `python -m bench.features` reads."""

    only: str | None = None
    """One part: speed, sparsity, errors, memory or key_heads. It is written only if out is given."""
    rounds: int = 10
    """Samples of each call."""
    out: Path | None = None
    """Results file. null writes bench/results/<this GPU>/features.json."""

    def __post_init__(self):
        check_choice("only", self.only, PARTS)
        check_positive(self, "rounds")
        check_output_file("out", self.out)


def run(settings: FeatureSettings) -> None:
    if not torch.cuda.is_available():
        raise UserError("bench.features finds no GPU; run it on a machine with a GPU")
    gpu, results = Gpu(), {"environment": environment()}
    out = settings.out or (None if settings.only else results_folder() / "features.json")
    gpu.wake()
    if out:
        set_aside(out)
    for name in [settings.only] if settings.only else PARTS:
        results[name] = []
        for row in PARTS[name](gpu, settings.rounds):
            print(f"{name}: {row}", flush=True)
            results[name].append(row)
        if out:
            write(out, results)
        gpu.release()
    if out:
        print(f"written to {out}")


if __name__ == "__main__":
    launch(run, FeatureSettings)
