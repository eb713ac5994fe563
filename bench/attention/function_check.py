"""Check a user's attention function against fp64 on many small shapes. accuracy.py judges output and gradients.

The function is called as function(q, k, v, causal=..., scale=...) with q (B, T, H, D), k and v (B, T, G, D). If it has
the keywords cu_seqlens and dropout_p, they are checked too. Every exception counts as "unsupported".

B batch, T sequence length, H query heads, G key/value heads, D head size.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bench.attention.accuracy import WrongResult, check, truth_of
from bench.attention.contenders import bind, draw_inputs
from bench.attention.shapes import DTYPES, AttentionShape
from kernels.naive.definition import visible
from model.attention import Attention, Custom, load_function

LENGTHS = 1, 63, 111, 1025
HEAD_DIMS = 40, 64, 80, 96, 128
DROPOUT = 0.1


def check_function(name: str, device: str) -> int:
    """Check the function `name` (module:function), print a table, and return how many cases are wrong."""
    function = Custom(f"function={name}", load_function(name))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # The matrices are too small for several threads.
    try:
        return count_wrong(name, function, device)
    finally:
        torch.set_num_threads(threads)


def count_wrong(name: str, function: Custom, device: str) -> int:
    """Run and print all cases, and return how many are wrong."""
    print(f"{name} on {device}: largest error of out, dq, dk and dv against fp64, by head size")
    print(f"{'':34}" + "".join(f"{head_dim:13}" for head_dim in HEAD_DIMS))
    counts: Counter[str] = Counter()
    failures: dict[tuple[str, str], list[str]] = {}  # by status and reason without its numbers
    for dtype, (label, judge) in itertools.product(DTYPES, cases(name, function, device)):
        line = f"{dtype:10}{label:24}"
        for head_dim in HEAD_DIMS:
            status, text = outcome_of(function, partial(judge, dtype, head_dim))
            counts[status] += 1
            line += f"{text if status == 'ok' else status:>13}"
            if status != "ok":
                kind = status, re.sub(r"\d\S*", "", text)
                failures.setdefault(kind, []).append(f"{dtype}, {label}, head size {head_dim}: {text}")
        print(line, flush=True)
    for (status, _), of_kind in failures.items():
        more = f" ({len(of_kind) - 1} more like this)" if len(of_kind) > 1 else ""
        print(f"{status}: {of_kind[0]}{more}")
    print(f"{counts['ok']} ok, {counts['wrong']} wrong, {counts['unsupported']} unsupported")
    return counts["wrong"]


def outcome_of(function: Custom, judge: Callable[[], float]) -> tuple[str, str]:
    """Return ("ok", error) of one case, or ("wrong" or "unsupported", reason)."""
    try:
        return "ok", f"{judge():.1e}"
    except WrongResult as error:
        return "wrong", str(error)
    except Exception as error:
        return "unsupported", function.explain(error)


def cases(name: str, function: Attention, device: str) -> list[tuple[str, Callable[[str, int], float]]]:
    """Return (label, judge) of each case. judge(dtype, head_dim) returns an error, or raises."""

    def judge(shape: AttentionShape, dtype: str, head_dim: int, seen: Tensor | None = None, **options) -> float:
        shape = replace(shape, dtype=dtype, head_dim=head_dim)
        inputs = draw_inputs(shape, device)
        contender = bind(name, partial(function, **options), shape, inputs)
        check(contender, shape, truth_of(shape, inputs, seen))
        return contender.error

    found = []
    for causal, length in itertools.product((True, False), LENGTHS):
        size = 1 if length > 1000 else 2  # of batch and heads; a CPU needs most of its time for long sequences
        shape = AttentionShape("check", size, length, heads=size, head_dim=64, causal=causal)
        found.append((f"{'causal' if causal else 'full'}, length {length}", partial(judge, shape)))
    shape = AttentionShape("check", batch=2, seq_len=111, heads=2, head_dim=64)
    cuts = [0, 40, 111, 151, 222]  # two documents in each sequence
    document = torch.arange(111) >= cuts[1]
    documents = {
        "cu_seqlens": torch.tensor(cuts, dtype=torch.int32, device=device),
        "seen": visible(111, 111, document.device) & (document[:, None] == document),
    }
    return [
        *found,
        ("views of one projection", partial(judge, replace(shape, packed=True))),
        ("grouped heads, 4 to 2", partial(judge, replace(shape, heads=4))),
        ("documents (cu_seqlens)", partial(judge, shape, **documents)),
        (f"dropout_p={DROPOUT}", partial(judge_dropout, function, device)),
    ]


def judge_dropout(function: Attention, device: str, dtype: str, head_dim: int) -> float:
    """Return how far the mean output is from 1 if q and k are 0 and v is 1: then out sums the kept probabilities."""
    torch.manual_seed(0)
    length = 256
    zeros = torch.zeros(2, length, 4, head_dim, dtype=DTYPES[dtype], device=device)
    q, k, v = (x.requires_grad_() for x in (zeros.clone(), zeros.clone(), zeros + 1))
    out = function(q, k, v, causal=False, scale=head_dim**-0.5, dropout_p=DROPOUT)
    out.sum().backward()
    sums = out.detach().double()[..., 0]
    deviation = (DROPOUT / (1 - DROPOUT) / length) ** 0.5
    error, found = abs(sums.mean().item() - 1), sums.std().item()
    if not (error < 5 * deviation / sums.numel() ** 0.5 and 0.8 * deviation < found < 1.25 * deviation):
        raise WrongResult(
            f"the sums of kept probabilities are {sums.mean():.3f} +- {found:.4f}; 1 +- {deviation:.4f} is right"
        )
    return error
