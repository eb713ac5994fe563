"""Check a user's attention function against fp64 on many small shapes. accuracy.py judges output and gradients.

The function is called as function(q, k, v, causal=..., scale=...) with q (B, T, H, D), k and v (B, T, G, D). If it has
the keywords cu_seqlens and dropout_p, they are checked too. A result of another shape or dtype, a missing gradient and
a changed input are wrong. Every exception counts as "unsupported", unless the GPU does not work any more.

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

from bench.attention.accuracy import WrongResult, check, check_on, check_output, in_chunks, judge, pick, truth_of
from bench.attention.contenders import bind, draw_inputs
from bench.attention.shapes import DTYPES, AttentionShape
from errors import UserError, first_line
from kernels.naive.definition import standard_attention, visible
from model.attention import Attention, Custom, load_function

LENGTHS = 1, 63, 512, 1025  # a kernel may need multiples of its tiles
HEAD_DIMS = 40, 64, 80, 96, 128
DROPOUT = 0.1


def check_function(name: str, device: str) -> Counter[str]:
    """Check the function `name` (module:function), print a table, and count the cases: ok, wrong and unsupported."""
    function = Custom(f"function={name}", load_function(name))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # The matrices are too small for several threads.
    try:
        return count_cases(name, function, device)
    finally:
        torch.set_num_threads(threads)


def count_cases(name: str, function: Custom, device: str) -> Counter[str]:
    """Run and print all cases, and count them by their status."""
    print(f"{name} on {device}: largest error of out, dq, dk and dv against fp64, by head size")
    print(f"{'':34}" + "".join(f"{head_dim:13}" for head_dim in HEAD_DIMS))
    counts: Counter[str] = Counter()
    failures: dict[tuple[str, str], list[str]] = {}  # by status and reason without its numbers
    for dtype, (label, error_of) in itertools.product(DTYPES, cases(name, function, device)):
        line = f"{dtype:10}{label:24}"
        for head_dim in HEAD_DIMS:
            status, text = outcome_of(function, partial(error_of, dtype, head_dim))
            check_gpu(f"{function.name} ended the work of the GPU at {dtype}, {label}, head size {head_dim}")
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
    return counts


def outcome_of(function: Custom, error_of: Callable[[], float]) -> tuple[str, str]:
    """Return ("ok", error) of one case, or ("wrong" or "unsupported", reason)."""
    try:
        return "ok", f"{error_of():.1e}"
    except WrongResult as error:
        return "wrong", str(error)
    except Exception as error:
        return "unsupported", function.explain(error)


def check_gpu(what: str) -> None:
    """Raise a UserError that begins with `what` if the GPU works no more, for example after an illegal memory access.

    Until the process ends, all calls would fail with the same error.
    """
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise UserError(f"{what} ({first_line(error)}); run the function alone under compute-sanitizer") from error


def cases(name: str, function: Attention, device: str) -> list[tuple[str, Callable[[str, int], float]]]:
    """Return (label, error_of) of each case. error_of(dtype, head_dim) returns the largest error, or raises."""

    def in_shape(
        shape: AttentionShape, dtype: str, head_dim: int, seen: Tensor | None = None, attend=function, **options
    ) -> float:
        shape = replace(shape, dtype=dtype, head_dim=head_dim)
        return check_on(shape, device, name, partial(attend, **options), seen)

    found = []
    for causal, length in itertools.product((True, False), LENGTHS):
        size = 1 if length > 1000 else 2  # of batch and heads; a CPU needs most of its time for long sequences
        shape = AttentionShape("check", size, length, heads=size, head_dim=64, causal=causal)
        found.append((f"{'causal' if causal else 'full'}, length {length}", partial(in_shape, shape)))
    shape = AttentionShape("check", batch=2, seq_len=111, heads=2, head_dim=64)
    cuts = [0, 40, 111, 151, 222, 222, 222]  # two documents in each sequence; training pads with empty documents too
    document = torch.arange(111) >= cuts[1]
    documents = {
        "cu_seqlens": torch.tensor(cuts, dtype=torch.int32, device=device),
        "seen": visible(111, 111, document.device) & (document[:, None] == document),
    }
    return [
        *found,
        ("views of one projection", partial(in_shape, replace(shape, packed=True))),
        ("another scale", partial(in_shape, shape, attend=partial(rescaled, function))),
        ("grouped heads, 4 to 2", partial(in_shape, replace(shape, heads=4))),
        ("documents (cu_seqlens)", partial(in_shape, shape, **documents)),
        (f"dropout_p={DROPOUT}", partial(with_dropout, name, function, device)),
        ("one query, all keys", partial(with_one_query, name, function, device)),
    ]


def rescaled(function: Attention, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Call the function with half the queries and twice the scale, which changes no result."""
    return function(q / 2, k, v, causal=causal, scale=2 * scale)


def with_one_query(name: str, function: Attention, device: str, dtype: str, head_dim: int) -> float:
    """Return the error if the last query alone attends to all keys, as in sampling."""
    shape = AttentionShape("check", 2, 111, heads=2, head_dim=head_dim, dtype=dtype)
    inputs = draw_inputs(shape, device)
    last = inputs.q[:, -1:]
    with torch.no_grad():
        out = function(last, inputs.k, inputs.v, causal=False, scale=head_dim**-0.5)
    check_output(out, last)
    truth = truth_of(shape, inputs)
    return judge(name, {"out": out}, shape, truth._replace(exact=[x[:, -1:] for x in truth.exact]))


def with_dropout(name: str, function: Attention, device: str, dtype: str, head_dim: int) -> float:
    """Return the error of causal attention with dropout. The values are unit vectors, so out shows what was kept."""
    shape = AttentionShape("check", 2, head_dim, heads=4, head_dim=head_dim, dtype=dtype)
    inputs = draw_inputs(shape, device)
    units = torch.eye(head_dim, dtype=inputs.v.dtype, device=device)[:, None].expand_as(inputs.v).contiguous()
    inputs = inputs._replace(q=inputs.q / 2, v=units)  # smaller scores, so that no probability is rounded to 0
    torch.manual_seed(0)
    contender = bind(name, partial(function, dropout_p=DROPOUT), shape, inputs)
    out = contender.forward()
    check_output(out, inputs.q)
    keep, again = (x.detach().transpose(1, 2) != 0 for x in (out, contender.forward()))
    check_kept(keep.tril(), again.tril())
    truth = truth_of(shape, inputs)  # math attention takes no mask, so the yardstick is its error without dropout
    same_mask = partial(standard_attention, dropout_p=DROPOUT, keep=keep.flatten(0, 1)[:, None])
    picked = [pick(x, shape.kv_heads, truth.pairs).double() for x in inputs[:4]]
    contender.forward = out.clone  # a second call of the function would drop other probabilities
    check(contender, shape, truth._replace(exact=in_chunks(same_mask, *picked, causal=True)))
    return contender.error


def check_kept(keep: Tensor, again: Tensor) -> None:
    """Raise a WrongResult if dropout did not keep all causal pairs independently and with the right probability.

    keep and again are (B, H, T, T) boolean, from two calls. They say which probabilities are not 0, and are False above
    the diagonal.
    """
    pairs = torch.arange(1, keep.shape[-1] + 1, device=keep.device).expand(keep.shape[:-1])  # of each query
    deviations = (keep.sum(-1) - pairs * (1 - DROPOUT)) / (pairs * DROPOUT * (1 - DROPOUT)) ** 0.5
    mean, spread = deviations.mean().item(), deviations.std().item()
    if not (abs(mean) < 5 / pairs.numel() ** 0.5 and 0.8 < spread < 1.25):
        share = 1 - keep.sum().item() / pairs.sum().item()
        raise WrongResult(
            f"dropout_p={DROPOUT} drops {share:.3f} of the probabilities, with {spread:.2f} times the spread of chance"
        )
    for where, other in {"sequences": keep.roll(1, 0), "heads": keep.roll(1, 1), "calls": again}.items():
        differing = (keep != other).sum().item() / pairs.sum().item()
        if differing < DROPOUT:  # independent masks differ in almost twice this share
            raise WrongResult(f"dropout_p={DROPOUT} drops nearly the same probabilities in different {where}")
