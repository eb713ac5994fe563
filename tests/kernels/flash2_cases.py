"""Helpers of the tests of flash2: dtypes, the kernels' device, masks, and plain attention in fp64."""

import os

import torch
from hypothesis import strategies as st

from kernels.flash2 import dispatch, flash2
from kernels.flash2.options import Options
from kernels.flash2.tiles import HopperConfig, PlainTiles, TileConfig, hopper_config_for, read_table
from tests.kernels.accuracy import Case, draw

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


# On a machine with a GPU, Triton compiles its kernels, so the CPU runs only the definition.
KERNEL_DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


# The interpreter takes the same time for every tile, large or small.
FEW_TILES = {"tiles": PlainTiles(*[TileConfig(64, 64, 4, 1)] * 3)} if KERNEL_DEVICE == "cpu" else {}
SIZES = st.builds(
    Case,
    batch=st.integers(1, 2),
    seq_q=st.integers(1, 100),
    seq_k=st.integers(1, 100),
    heads=st.just(2),
    kv_heads=st.sampled_from([1, 2]),
    head_dim=st.integers(16, 72),
    causal=st.booleans(),
    dtype=st.just(F32),
)


def hopper_configs() -> list[tuple[str, int, str, HopperConfig]]:
    """Return pass, head size, mask and settings of the table's Hopper rows, without duplicates from several lengths."""
    configs = []
    for row in read_table()["hopper"]:
        mask, length = row["mask"], row["max_seq_len"] or 16384
        config = hopper_config_for(row["pass"], row["head_dim"], mask, length)
        configs.append((row["pass"], row["head_dim"], mask, config))
    return list(dict.fromkeys(configs))


def kernels(case: Case, inputs: tuple, numbers: torch.Tensor | None = None, dropout_p: float = 0.0) -> tuple:
    """Return output and gradients of the Triton kernels, on any device."""
    options = Options(numbers, causal=case.causal, scale=case.head_dim**-0.5, dropout_p=dropout_p)
    return both_passes(dispatch, inputs, options)


def both_passes(implementation, inputs: tuple, options: Options) -> tuple:
    """Return out, dq, dk and dv of the kernels (dispatch) or of their definition."""
    q, k, v, dout = inputs
    out, logsumexp = implementation.forward(q, k, v, *options)
    return out, *implementation.backward(dout, q, k, v, out, logsumexp, None, True, *options)


def written_out(case: Case, inputs: tuple, visible: torch.Tensor, dlogsumexp: torch.Tensor) -> tuple:
    """Return out, logsumexp, dq, dk and dv by autograd in fp64.

    visible (batch, seq_q, seq_k) is True if a query sees a key. A query that sees no key gives zeros and -inf, and has
    no gradient.
    """
    q, k, v, dout = (x.double() for x in inputs)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    group = case.heads // case.kv_heads
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) * case.head_dim**-0.5
    scores = scores.masked_fill(~visible[:, None], -1e30)
    logsumexp, some = scores.logsumexp(-1), visible.any(-1)[:, None]
    p = scores.softmax(-1) * some[..., None]
    out = torch.einsum("bhij,bjhd->bihd", p, v.repeat_interleave(group, 2))
    total = (out * dout).sum() + (logsumexp * dlogsumexp.double() * some).sum()
    return out.detach(), logsumexp.detach().masked_fill(~some, float("-inf")), *torch.autograd.grad(total, (q, k, v))


def visible_keys(case: Case, window: int | None, cuts: list[int]) -> torch.Tensor:
    """Return (batch, seq_q, seq_k) boolean, pair by pair from the words of flash2's docstring."""
    visible = torch.ones(case.batch, case.seq_q, case.seq_k, dtype=torch.bool)
    own = torch.arange(case.seq_q)[:, None] + case.seq_k - case.seq_q
    j = torch.arange(case.seq_k)
    if case.causal:
        visible &= j <= own
    if window:
        visible &= j > own - window
    if cuts:
        token = torch.arange(case.batch * case.seq_q).view(case.batch, case.seq_q)
        document = (torch.tensor(cuts)[:, None, None] <= token).sum(0)
        visible &= document[:, :, None] == document[:, None, :]
    return visible


def with_logsumexp(
    case: Case, device: str, window: int | None = None, cuts: list[int] | None = None, deterministic: bool = False
) -> tuple[tuple, tuple]:
    """Return out, logsumexp, dq, dk and dv, first of flash2, then of written_out."""
    inputs = draw(case, device)
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    cu_seqlens = None if cuts is None else torch.tensor(cuts, dtype=torch.int32, device=device)
    options = {"causal": case.causal, "window": window, "cu_seqlens": cu_seqlens, "deterministic": deterministic}
    out, logsumexp = flash2(q, k, v, **options, return_lse=True)
    dlogsumexp = torch.randn_like(logsumexp)
    grads = torch.autograd.grad((out, logsumexp), (q, k, v), (inputs[3], dlogsumexp))
    visible = visible_keys(case, window, cuts or []).to(device)
    return (out, logsumexp, *grads), written_out(case, inputs, visible, dlogsumexp)
