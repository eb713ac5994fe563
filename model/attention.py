"""The attention variants a GPT-2 can be trained with: one registry, one signature.

A variant is called with q (batch, seq_q, heads, head_dim), k and v (batch, seq_k, kv_heads, head_dim), which may be
strided views of one packed projection, and returns (batch, seq_q, heads, head_dim). cu_seqlens are the cumulative
lengths of documents, each of which attends to itself alone: see flash2. Asked for something it cannot do, it raises a
ValueError that names a variant which can; nothing falls back in silence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from errors import UserError, first_line, is_of_memory
from kernels.common.checks import check_documents
from kernels.flash1 import flash1
from kernels.flash2 import flash2, flash2_packed
from kernels.flash2.block_lists import BLOCK, Listed, butterfly, listed
from kernels.fused_softmax import LONGEST_ROW, fused_softmax
from kernels.linear import linear
from kernels.naive.definition import same_document, standard_attention, visible

SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class Attention(Protocol):
    """What every variant is."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float,
        dropout_p: float = 0.0,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor: ...


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, by a backend of its own choice or a given one.

    Documents become a mask of all pairs, (batch, 1, seq, seq), which the backends flash and cudnn do not take.

    Raises:
        ValueError: causal with fewer queries than keys, which torch aligns at the top left; documents with them.
    """
    seq_q, seq_k = q.shape[1], k.shape[1]
    if causal and seq_q != seq_k:
        raise ValueError("attention=sdpa masks causally only q and k of one length; use attention=flash2 or naive")
    options = {"is_causal": causal, "scale": scale, "dropout_p": dropout_p, "enable_gqa": q.shape[2] != k.shape[2]}
    if cu_seqlens is not None:
        same = same_document(q, k, cu_seqlens)[:, None]
        options |= {"attn_mask": same & visible(seq_q, seq_k, q.device) if causal else same, "is_causal": False}
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if backend == "auto":
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)
    with sdpa_kernel(SDPA_BACKENDS[backend]):
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def local(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | None = None,
    window: int,
    deterministic: bool | None = None,
) -> Tensor:
    """flash2 in a sliding window: each query sees the last `window` keys up to its own.

    Raises:
        ValueError: several queries without a causal mask; a single one is the last token, which looks back anyway.
    """
    if not causal and q.shape[1] > 1:
        raise ValueError("attention=local looks back from each token and has to be causal; use attention=flash2")
    options = {"dropout_p": dropout_p, "cu_seqlens": cu_seqlens, "deterministic": deterministic}
    return flash2(q, k, v, causal=True, scale=scale, window=window, **options)


def block_sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | None = None,
    pattern: str = "butterfly",
    deterministic: bool | None = None,
) -> Tensor:
    """flash2 that computes only the blocks of 128 queries by 128 keys that `pattern` keeps: see read_pattern.

    Raises:
        ValueError: several queries, but not as many as keys; a single one is the last token. One that has more keys,
            with documents.
    """
    (_, seq_q), seq_k = q.shape[:2], k.shape[1]
    options = {"scale": scale, "dropout_p": dropout_p, "deterministic": deterministic}
    if seq_q == 1 < seq_k:
        if cu_seqlens is not None:
            check_documents(q, k, cu_seqlens)
        seen = read_pattern(pattern, seq_k)[-1].repeat_interleave(BLOCK)[:seq_k].to(q.device)
        return flash2(q, k[:, seen], v[:, seen], causal=False, **options)
    if seq_q != seq_k:
        raise ValueError("attention=block_sparse needs as many queries as keys, or one; use attention=flash2")
    kind = causal, cu_seqlens is not None, seq_q % BLOCK != 0
    blocks = Listed(_block_lists(pattern, seq_q, *kind, q.device), *kind)
    return flash2(q, k, v, causal=causal, cu_seqlens=cu_seqlens, blocks=blocks, **options)


def _block_lists(*kind) -> Tensor:
    """The pattern as the kernels read it; torch.compile, which sees through a cache, takes it as a constant."""
    return _made_lists(*kind)


def _build_block_sparse(config: "AttentionConfig") -> Attention:
    # It marks the function; here, as the import that this needs takes two seconds.
    torch.compiler.assume_constant_result(_block_lists)
    return partial(block_sparse, pattern=config.pattern, deterministic=_asked(config))


@cache
def _made_lists(
    pattern: str, seq_len: int, causal: bool, documents: bool, ragged: bool, device: torch.device
) -> Tensor:
    return listed(read_pattern(pattern, seq_len), causal, documents, ragged).to(device).lists


def read_pattern(pattern: str, seq_len: int) -> Tensor:
    """Which of the blocks of seq_len tokens are kept, (n, n) boolean on the CPU.

    `pattern` is butterfly, or a .npy file of a square boolean matrix, rows being blocks of queries, of which a shorter
    sequence takes the first.

    Raises:
        UserError: there is no such file, or it holds something else, or too few blocks.
    """
    n = -(-seq_len // BLOCK)
    if pattern == "butterfly":
        return butterfly(n)
    if not Path(pattern).is_file():
        raise UserError(f"attention.pattern={pattern} does not exist; give butterfly, or a .npy file")
    try:
        matrix = np.load(pattern, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"attention.pattern={pattern} is no .npy file; numpy.save writes one") from error
    if not isinstance(matrix, np.ndarray) or matrix.dtype != bool or matrix.ndim != 2 or len(set(matrix.shape)) > 1:
        raise UserError(f"attention.pattern={pattern} holds no square boolean matrix; numpy.save one")
    if len(matrix) < n:
        raise UserError(
            f"attention.pattern={pattern} has {len(matrix)} blocks of {BLOCK} tokens, and {seq_len} tokens need {n}; "
            "give a larger one, or a shorter model.context_length"
        )
    return torch.from_numpy(matrix[:n, :n].copy())


@dataclass
class AttentionConfig:
    """Which attention, and how (group `attention`)."""

    name: str = "flash2"
    """naive (all matrices written out), fused_softmax (one kernel between two products), flash1 and flash2 (the Triton
    kernels of this project), sdpa (torch's own); local and block_sparse are flash2 that leaves pairs of tokens out."""
    backend: str = "auto"
    """For sdpa alone: auto, flash, cudnn, efficient or math."""
    window: int | None = None
    """For local alone: keys that a query sees, its own among them."""
    pattern: str | None = None
    """For block_sparse alone: butterfly, or a .npy file of a boolean matrix of blocks of 128 tokens."""
    deterministic: bool = False
    """For flash2, local and block_sparse: the same gradient bits at every run; slower. train.deterministic asks it of
    everything."""

    def __post_init__(self):
        if self.name not in VARIANTS:
            raise UserError(f"attention.name={self.name} is unknown; choose one of {', '.join(VARIANTS)}")
        if self.backend != "auto" and self.name != "sdpa":
            raise UserError(
                f"attention.backend={self.backend} is for attention=sdpa, not for attention={self.name}; leave it out"
            )
        self._check_sparsity()
        if self.deterministic and self.name not in ("flash2", "local", "block_sparse"):
            raise UserError(
                f"attention.deterministic=true is for attention=flash2, not for attention={self.name}; "
                "use train.deterministic=true, which asks it of every kernel"
            )
        if self.backend not in ("auto", *SDPA_BACKENDS):
            choices = ", ".join(("auto", *SDPA_BACKENDS))
            raise UserError(f"attention.backend={self.backend} is unknown; choose one of {choices}")

    def _check_sparsity(self) -> None:
        for key, owner in SPARSE_KEYS.items():
            value = getattr(self, key)
            if value is not None and self.name != owner:
                raise UserError(
                    f"attention.{key}={value} is for attention={owner}, not for attention={self.name}; leave it out"
                )
            if value is None and self.name == owner:
                raise UserError(f"attention.name={owner} needs attention.{key}; attention={owner} has a default")
        if self.window is not None and self.window < 1:
            raise UserError(f"attention.window={self.window} must be at least 1")


def _asked(config: AttentionConfig) -> bool | None:
    """What flash2 takes as `deterministic`; None is as torch is set."""
    return config.deterministic or None


VARIANTS: dict[str, Callable[[AttentionConfig], Attention]] = {
    "naive": lambda config: standard_attention,
    "sdpa": lambda config: partial(sdpa, backend=config.backend),
    "fused_softmax": lambda config: fused_softmax,
    "flash1": lambda config: flash1,
    "flash2": lambda config: partial(flash2, deterministic=_asked(config)),
    "local": lambda config: partial(local, window=config.window, deterministic=_asked(config)),
    "block_sparse": _build_block_sparse,
}
SPARSE_KEYS = {"window": "local", "pattern": "block_sparse"}
"""What says which pairs of tokens a variant leaves out."""
EXACT = tuple(name for name in VARIANTS if name not in SPARSE_KEYS.values())
"""The variants that leave none out, and so all compute the same."""


def build_attention(config: AttentionConfig) -> Attention:
    """The variant that `config` names."""
    return VARIANTS[config.name](config)


def kept_share(config: AttentionConfig, seq_len: int) -> float:
    """The share of the causal pairs of seq_len tokens that a variant does not leave out.

    Raises:
        UserError: as read_pattern.
    """
    if config.window is not None:
        window = min(config.window, seq_len)
        kept = window * (window + 1) // 2 + (seq_len - window) * window
    elif config.pattern is not None:
        pattern = read_pattern(config.pattern, seq_len)
        sizes = (seq_len - torch.arange(0, seq_len, BLOCK)).clamp(max=BLOCK)  # of blocks: the last may be ragged
        pairs = (sizes[:, None] * sizes).tril(-1) + (sizes * (sizes + 1) // 2).diag()
        kept = pairs[pattern].sum().item()
    else:
        return 1.0
    return kept / (seq_len * (seq_len + 1) // 2)


def attend_projected(attention: Attention, x: Tensor, projection: nn.Linear, heads: int, **options) -> Tensor:
    """`attention` of the three parts of a projection of x (batch, seq, C), as (batch, seq, heads, head_dim).

    Only flash2 gains by knowing that they are parts: it writes their gradients into one tensor, and has its sum, which
    is the gradient of the projection's bias.
    """
    if isinstance(attention, partial) and attention.func is flash2:
        qkv = split_projection(linear(x, projection.weight, projection.bias.detach()), heads)
        return flash2_packed(qkv, bias=projection.bias, **attention.keywords, **options)
    return attention(*split_projection(linear(x, projection.weight, projection.bias), heads).unbind(2), **options)


def split_projection(projected: Tensor, heads: int) -> Tensor:
    """(batch, seq, 3 C) as (batch, seq, 3, heads, head_dim)."""
    return projected.unflatten(2, (3, heads, -1))


def check_attention(
    config: AttentionConfig,
    *,
    head_dim: int,
    dtype: torch.dtype,
    dropout_p: float,
    device: torch.device,
    context_length: int,
    documents: bool = False,
) -> None:
    """Runs the variant forward and backward once on a few tokens, so that what it cannot do shows before training.

    Raises:
        UserError: it cannot run with this head size, dtype, dropout and device, with documents, or at this length.
    """
    if config.pattern is not None:
        read_pattern(config.pattern, context_length)
    if config.name == "fused_softmax" and context_length > LONGEST_ROW:
        raise UserError(
            f"attention=fused_softmax holds a row of scores on chip, {LONGEST_ROW} keys at most, and the context has "
            f"{context_length}; choose attention=flash2, or a shorter one"
        )
    q, k, v = torch.randn(3, 1, 64, 2, head_dim, device=device, dtype=dtype).requires_grad_().unbind()
    cuts = {"cu_seqlens": torch.tensor([0, 9, 64], dtype=torch.int32, device=device)} if documents else {}
    try:
        build_attention(config)(q, k, v, causal=True, scale=1.0, dropout_p=dropout_p, **cuts).sum().backward()
    except (ValueError, RuntimeError) as error:
        if is_of_memory(error):  # for which there are other remedies
            raise
        backend = f" attention.backend={config.backend}" if config.name == "sdpa" else ""
        raise UserError(
            f"attention={config.name}{backend} cannot run on {device.type} with head_dim {head_dim}, {dtype}, "
            f"dropout {dropout_p} and data.document_mask={str(documents).lower()} ({first_line(error)}); "
            "choose another attention, or attention.backend=auto with sdpa"
        ) from error
