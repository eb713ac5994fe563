"""What flash2 can do besides plain attention: each feature's speed beside the plain case, what leaving blocks out
saves, errors, memory, host time.

    python -m bench.features            all of it on this GPU, a table, and bench/results/<gpu>/features.json
    python -m bench.features --only errors

Sampled as bench.timing does, the feature and its plain case alternating. `speed` is the plain case's time over the
feature's. `kept` is the share of the blocks of 128 x 128 under the diagonal that a pattern keeps, or a window touches:
time is proportional to it where `speed`, over all of these blocks, is 1 / kept. Errors are of |x - exact| / |exact| in
the Frobenius norm against fp64, beside those of torch's flash backend on the same inputs: normal ones, ones whose
scores reach 1e4, and queries that see a single key.

T queries, S keys, D head size.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from bench.attention.accuracy import NAMES, relative_error
from bench.attention.shapes import HIDDEN, TOKENS
from bench.common.command_line import output_file, positive
from bench.common.results import environment, results_folder, write
from bench.common.timing import Gpu, sampler_of
from errors import UserError, refusing
from kernels.flash2 import flash2
from kernels.flash2.block_lists import BLOCK, butterfly, listed
from kernels.naive.definition import standard_attention
from model.attention import sdpa

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
Inputs = tuple[Tensor, ...]


def normal(batch: int, seq_len: int, heads: int, head_dim: int, device: str, kv_heads: int = 0) -> Inputs:
    """Standard normal q, k, v and dout in bf16."""
    all_heads = heads, kv_heads or heads, kv_heads or heads, heads
    return tuple(torch.randn(batch, seq_len, n, head_dim, device=device, dtype=torch.bfloat16) for n in all_heads)


def bound(attend: Callable, inputs: Inputs) -> dict[str, Callable[[], object]]:
    """The passes of `attend` on inputs, without arguments."""
    *leaves, dout = (x.detach().requires_grad_(i < 3) for i, x in enumerate(inputs))
    return {
        "forward": lambda: attend(*leaves),
        "both": lambda: torch.autograd.grad(attend(*leaves), leaves, dout),
    }


def features(head_dim: int, seq_len: int, device: str) -> Iterator[tuple[str, dict, dict]]:
    """(name, passes with the feature, passes without)."""
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
    """Every feature beside the plain case, per head size, length and pass."""
    for head_dim in HEAD_DIMS:
        for seq_len in SPEED_LENGTHS:
            for name, with_it, without in features(head_dim, seq_len, gpu.device):
                for pass_ in PASSES:
                    ms, plain_ms = compare(with_it[pass_], without[pass_], gpu, rounds)
                    row = {"feature": name, "head_dim": head_dim, "seq_len": seq_len, "pass": pass_}
                    yield row | {"ms": ms, "plain_ms": plain_ms, "speed": plain_ms / ms}


def patterns(seq_len: int, device: str) -> Iterator[tuple[str, dict, int]]:
    """(name, options of flash2, how many blocks under the diagonal are computed): lists and then windows, all blocks
    first of each; and between them no list, which Hopper has kernels of its own for."""
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
    """What is left of the time where blocks are left out, beside all of them, of a list or in a window."""
    for head_dim in HEAD_DIMS:
        inputs = normal(TOKENS // SPARSE_LENGTH, SPARSE_LENGTH, HIDDEN // head_dim, head_dim, gpu.device)
        cases = [
            (name, bound(partial(flash2, causal=True, **options), inputs), blocks)
            for name, options, blocks in patterns(SPARSE_LENGTH, gpu.device)
        ]
        whole, all_blocks = cases[0][1:]
        for name, passes, blocks in cases:
            if name.startswith("window") and blocks == all_blocks:
                whole = passes
            for pass_ in PASSES:
                ms, all_ms = compare(passes[pass_], whole[pass_], gpu, rounds)
                row = {"pattern": name, "head_dim": head_dim, "seq_len": SPARSE_LENGTH, "pass": pass_}
                yield row | {"kept": blocks / all_blocks, "ms": ms, "speed": all_ms / ms}


def compare(call: Callable[[], object], other: Callable[[], object], gpu: Gpu, rounds: int) -> tuple[float, float]:
    """Median milliseconds of two calls, sampled in turn."""
    call(), other()
    samplers = [sampler_of(x, gpu)[0] for x in (call, other)]
    samples = [[sampler.sample(gpu) for sampler in samplers] for _ in range(rounds)]
    one, two = (statistics.median(times) for times in zip(*samples, strict=True))
    return one, two


def hard_inputs(head_dim: int, device: str) -> Iterator[tuple[str, bool, Inputs]]:
    """(name, causal, inputs) of the comparisons of errors."""
    q, k, v, dout = normal(*ERROR_SHAPE, head_dim, device)
    yield "normal", True, (q, k, v, dout)
    yield "normal, no mask", False, (q, k, v, dout)
    reach = (torch.einsum("bihd,bjhd->bhij", q.float(), k.float()).abs().max() * head_dim**-0.5).item()
    factor = (1e4 / reach) ** 0.5
    yield "scores up to 1e4", True, ((q * factor), (k * factor), v, dout)
    yield "a single key", False, (q, k[:, :1], v[:, :1], dout)


def outcome(attend: Callable, inputs: Inputs, **options) -> Inputs:
    """out, dq, dk and dv."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out = attend(q, k, v, **options)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3].to(out.dtype))


def error_rows(gpu: Gpu) -> Iterator[dict]:
    """Errors of flash2 and of torch's flash backend against fp64: means over the same draws of the inputs.

    Where scores reach 1e4 the ratio of the two moves by 3 % from draw to draw.
    """
    variants = {"flash2": flash2, "sdpa_flash": partial(sdpa, backend="flash")}
    for head_dim in HEAD_DIMS:
        errors: dict[tuple[str, str], list[list[float]]] = {}
        for _ in range(ERROR_DRAWS):
            for name, causal, inputs in hard_inputs(head_dim, gpu.device):
                options = {"causal": causal, "scale": head_dim**-0.5}
                exact = outcome(standard_attention, tuple(x.double() for x in inputs), **options)
                for variant, attend in variants.items():
                    found = map(relative_error, outcome(attend, inputs, **options), exact)
                    errors.setdefault((name, variant), []).append(list(found))
        for (name, variant), draws in errors.items():
            means = [statistics.mean(values) for values in zip(*draws, strict=True)]
            row = {"inputs": name, "head_dim": head_dim, "variant": variant, "draws": len(draws)}
            yield row | dict(zip(NAMES, means, strict=True))


def memory_rows(gpu: Gpu) -> Iterator[dict]:
    """The most that forward and backward of one sequence hold beyond q, k, v, dout, out and the gradients."""
    for head_dim in HEAD_DIMS:
        for seq_len in MEMORY_LENGTHS:
            inputs = normal(1, seq_len, MEMORY_HEADS, head_dim, gpu.device)
            call = bound(partial(flash2, causal=True), inputs)["both"]
            before = gpu.allocated()
            extra = gpu.peak(call) - before - 4 * inputs[0].nbytes  # out, dq, dk and dv
            row = {"head_dim": head_dim, "seq_len": seq_len, "heads": MEMORY_HEADS, "extra_mib": extra / 2**20}
            yield row | {"bytes_per_query_and_head": extra / seq_len / MEMORY_HEADS}


def host_rows(gpu: Gpu) -> Iterator[dict]:
    """Microseconds of the host for a forward call, medians of many with the GPU idle at the start of each ten."""
    inputs = normal(1, 512, 8, 64, gpu.device)
    for variant, attend in {"flash2": flash2, "sdpa": sdpa}.items():
        forward = bound(partial(attend, causal=True, scale=0.125), inputs)["forward"]

        def ten(forward=forward):
            for _ in range(10):
                forward()

        ten()
        microseconds = statistics.median(gpu.host_milliseconds(ten) for _ in range(20)) * 100
        yield {"variant": variant, "forward_us": microseconds}


PARTS: dict[str, Callable[[Gpu, int], Iterator[dict]]] = {
    "speed": speed_rows,
    "sparsity": sparsity_rows,
    "errors": lambda gpu, rounds: error_rows(gpu),
    "memory": lambda gpu, rounds: memory_rows(gpu),
    "host": lambda gpu, rounds: host_rows(gpu),
}


def show(row: dict) -> str:
    """A row in one line."""
    texts = (f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values())
    return "  ".join(f"{key} {text}" for key, text in zip(row, texts, strict=True))


@refusing()
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.features", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, help="one part, which is written only if --out is given")
    parser.add_argument("--rounds", type=positive, default=10, help="samples of each (10)")
    parser.add_argument("--gpu", help="folder under bench/results; by default made of the device's name")
    parser.add_argument("--out", type=output_file, help="file to write")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("bench.features measures GPUs and finds none; run it where there is one")
    gpu, results = Gpu(), {"environment": environment()}
    gpu.wake()
    for name in [arguments.only] if arguments.only else PARTS:
        results[name] = []
        for row in PARTS[name](gpu, arguments.rounds):
            print(f"{name}: {show(row)}", flush=True)
            results[name].append(row)
        gpu.release()
    out = arguments.out or (None if arguments.only else results_folder(arguments.gpu) / "features.json")
    if out:
        write(out, results)
        print(f"written to {out}")


if __name__ == "__main__":
    main()
