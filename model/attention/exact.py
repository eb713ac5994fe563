"""The attentions that compute all pairs of tokens and run everywhere: kernels of this repository, and torch's own."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from errors import UserError, check_choice
from kernels.flash1 import flash1
from kernels.flash2 import flash2, flash2_packed
from kernels.fused_softmax import LONGEST_ROW, fused_softmax
from kernels.naive.definition import same_document, standard_attention, visible
from model.attention.protocol import Attention, AttentionConfig
from model.linear import Linear

SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class Exact(Attention):
    """A kernel of this repository that takes every option of the protocol."""

    def __init__(self, kernel: Callable[..., Tensor]):
        self.kernel = kernel

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        return self.kernel(q, k, v, **options)


class Sdpa(Attention):
    """torch's own attention.

    Documents become a mask of all pairs, (batch, 1, seq, seq). The backends flash and cudnn do not take masks.
    """

    remedy = "choose another attention or attention.backend=auto"

    def __init__(self, backend: str = "auto"):
        self.backend = backend

    def __call__(self, q, k, v, *, causal, scale, dropout_p=0.0, cu_seqlens=None) -> Tensor:
        seq_q, seq_k = q.shape[1], k.shape[1]
        if causal and seq_q != seq_k:  # torch aligns the mask at the top left
            raise ValueError("attention=sdpa masks causally only q and k of one length; use attention=flash2 or naive")
        options = {"is_causal": causal, "scale": scale, "dropout_p": dropout_p, "enable_gqa": q.shape[2] != k.shape[2]}
        if cu_seqlens is not None:
            same = same_document(q, k, cu_seqlens)[:, None]
            options |= {"attn_mask": same & visible(seq_q, seq_k, q.device) if causal else same, "is_causal": False}
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.backend == "auto":
            return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)
        with sdpa_kernel(SDPA_BACKENDS[self.backend]):
            return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


class FusedSoftmax(Exact):
    """Two matrix products with one kernel between them, which holds a row of scores on chip."""

    def check_length(self, context_length: int) -> None:
        if context_length > LONGEST_ROW:
            raise UserError(
                f"attention=fused_softmax holds a row of at most {LONGEST_ROW} scores on chip, and the context has "
                f"{context_length} tokens; choose attention=flash2 or a shorter context"
            )


class Flash2(Attention):
    """kernels.flash2. `deterministic=None` follows torch.use_deterministic_algorithms."""

    def __init__(self, deterministic: bool | None = None):
        self.deterministic = deterministic

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        return flash2(q, k, v, deterministic=self.deterministic, **options)

    def projected(self, x: Tensor, projection: Linear, heads: int, kv_heads: int, **options) -> Tensor:
        """Pass the packed projection to the kernel.

        The backward pass then writes the gradients of q, k and v into one tensor and sums them for the bias. The packed
        form has no grouped heads, so these take the three parts.
        """
        if kv_heads != heads:
            return super().projected(x, projection, heads, kv_heads, **options)
        qkv = projection.product(x, projection.bias.detach()).unflatten(2, (3, heads, -1))
        return flash2_packed(qkv, bias=projection.bias, deterministic=self.deterministic, **options)


@dataclass
class NaiveConfig(AttentionConfig):
    """Standard attention: every N x N matrix is written to memory (FlashAttention's Algorithm 0)."""

    name: str = "naive"

    def build(self) -> Attention:
        return Exact(standard_attention)


@dataclass
class SdpaConfig(AttentionConfig):
    """torch.nn.functional.scaled_dot_product_attention."""

    name: str = "sdpa"
    backend: str = "auto"
    """auto (torch's choice), flash, cudnn, efficient or math."""

    def __post_init__(self):
        super().__post_init__()
        check_choice("attention.backend", self.backend, ("auto", *SDPA_BACKENDS))

    @property
    def detail(self) -> str:
        return self.backend

    def build(self) -> Attention:
        return Sdpa(self.backend)


@dataclass
class FusedSoftmaxConfig(AttentionConfig):
    """Megatron-LM's attention: one kernel for scale, mask, softmax and dropout between two matrix products."""

    name: str = "fused_softmax"

    def build(self) -> Attention:
        return FusedSoftmax(fused_softmax)


@dataclass
class Flash1Config(AttentionConfig):
    """FlashAttention's Algorithm 1 as a Triton kernel."""

    name: str = "flash1"

    def build(self) -> Attention:
        return Exact(flash1)


@dataclass
class Flash2Config(AttentionConfig):
    """FlashAttention-2 by the Triton and Gluon kernels of this repository."""

    name: str = "flash2"
    deterministic: bool = False
    """The same gradient bits in every run, slower. train.deterministic=true sets this for every kernel."""

    def build(self) -> Attention:
        return Flash2(self.deterministic or None)
