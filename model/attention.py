"""The attention variants a GPT-2 can be trained with: one registry, one signature.

A variant is called with q (batch, seq_q, heads, head_dim), k and v (batch, seq_k, kv_heads, head_dim), which may be
strided views of one packed projection, and returns (batch, seq_q, heads, head_dim). cu_seqlens are the cumulative
lengths of documents, each of which attends to itself alone: see flash2. Asked for something it cannot do, it raises a
ValueError that names a variant which can; nothing falls back in silence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from errors import UserError
from kernels.flash2 import flash2, flash2_packed
from kernels.standard import same_document, standard_attention, visible

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
        ValueError: causal with fewer queries than keys, which torch aligns at the top left.
    """
    (batch, seq_q), seq_k = q.shape[:2], k.shape[1]
    if causal and seq_q != seq_k:
        raise ValueError("attention=sdpa masks causally only q and k of one length; use attention=flash2 or naive")
    options = {"is_causal": causal, "scale": scale, "dropout_p": dropout_p, "enable_gqa": q.shape[2] != k.shape[2]}
    if cu_seqlens is not None:
        same = same_document(cu_seqlens, batch, seq_q)[:, None]
        options |= {"attn_mask": same & visible(seq_q, seq_k, q.device) if causal else same, "is_causal": False}
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if backend == "auto":
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)
    with sdpa_kernel(SDPA_BACKENDS[backend]):
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


@dataclass
class AttentionConfig:
    """Which attention, and how (group `attention`)."""

    name: str = "flash2"
    """naive (all matrices written out), sdpa (torch's own) or flash2 (the Triton kernels of this project)."""
    backend: str = "auto"
    """For sdpa alone: auto, flash, cudnn, efficient or math."""
    deterministic: bool = False
    """For flash2 alone: the same gradient bits at every run; slower. train.deterministic asks it of everything."""

    def __post_init__(self):
        if self.name not in VARIANTS:
            raise UserError(f"attention.name={self.name} is unknown; choose one of {', '.join(VARIANTS)}")
        if self.backend != "auto" and self.name != "sdpa":
            raise UserError(
                f"attention.backend={self.backend} is for attention=sdpa, not for attention={self.name}; leave it out"
            )
        if self.deterministic and self.name != "flash2":
            raise UserError(
                f"attention.deterministic=true is for attention=flash2, not for attention={self.name}; "
                "use train.deterministic=true, which asks it of every kernel"
            )
        if self.backend not in ("auto", *SDPA_BACKENDS):
            choices = ", ".join(("auto", *SDPA_BACKENDS))
            raise UserError(f"attention.backend={self.backend} is unknown; choose one of {choices}")


VARIANTS: dict[str, Callable[[AttentionConfig], Attention]] = {
    "naive": lambda config: standard_attention,
    "sdpa": lambda config: partial(sdpa, backend=config.backend),
    "flash2": lambda config: partial(flash2, deterministic=config.deterministic or None),  # None: as torch is set
}


def build_attention(config: AttentionConfig) -> Attention:
    """The variant that `config` names."""
    return VARIANTS[config.name](config)


def attend_packed(attention: Attention, qkv: Tensor, **options) -> Tensor:
    """`attention` of the three parts of one projection, qkv (batch, seq, 3, heads, head_dim).

    Only flash2 gains by knowing that they are parts: it writes their gradients into one tensor.
    """
    if isinstance(attention, partial) and attention.func is flash2:
        return flash2_packed(qkv, **attention.keywords, **options)
    return attention(*qkv.unbind(2), **options)


def check_attention(
    config: AttentionConfig,
    *,
    head_dim: int,
    dtype: torch.dtype,
    dropout_p: float,
    device: torch.device,
    documents: bool = False,
) -> None:
    """Runs the variant forward and backward once on a few tokens, so that what it cannot do shows before training.

    Raises:
        UserError: it cannot run with this head size, dtype, dropout and device, or with documents.
    """
    q, k, v = torch.randn(3, 1, 64, 2, head_dim, device=device, dtype=dtype).requires_grad_().unbind()
    cuts = {"cu_seqlens": torch.tensor([0, 9, 64], dtype=torch.int32, device=device)} if documents else {}
    try:
        build_attention(config)(q, k, v, causal=True, scale=1.0, dropout_p=dropout_p, **cuts).sum().backward()
    except (ValueError, RuntimeError) as error:
        backend = f" attention.backend={config.backend}" if config.name == "sdpa" else ""
        raise UserError(
            f"attention={config.name}{backend} cannot run on {device.type} with head_dim {head_dim}, {dtype}, "
            f"dropout {dropout_p} and data.document_mask={str(documents).lower()} ({str(error).splitlines()[0]}); "
            "choose another attention, or attention.backend=auto with sdpa"
        ) from error
