"""The kernels of this repository that compute all pairs of tokens."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from errors import UserError
from kernels.flash1 import flash1
from kernels.flash2 import flash2, flash2_packed
from kernels.fused_softmax import LONGEST_ROW, fused_softmax
from kernels.linear import linear
from kernels.naive.definition import standard_attention
from model.attention.protocol import Attention, AttentionConfig, split_projection


class Exact(Attention):
    """A kernel of this repository that takes every option of the protocol."""

    def __init__(self, kernel: Callable[..., Tensor]):
        self.kernel = kernel

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        return self.kernel(q, k, v, **options)


class FusedSoftmax(Exact):
    """Two matrix products with one kernel between them, which holds a row of scores on chip."""

    def check_length(self, context_length: int) -> None:
        if context_length > LONGEST_ROW:
            raise UserError(
                f"a context of {context_length} tokens exceeds the {LONGEST_ROW} keys of attention=fused_softmax, "
                "which holds a row of scores on chip; choose attention=flash2 or a shorter context"
            )


class Flash2(Attention):
    """kernels.flash2. `deterministic=None` follows torch.use_deterministic_algorithms."""

    def __init__(self, deterministic: bool | None = None):
        self.deterministic = deterministic

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        return flash2(q, k, v, deterministic=self.deterministic, **options)

    def projected(self, x: Tensor, projection: nn.Linear, heads: int, **options) -> Tensor:
        """Pass the packed projection to the kernel.

        The backward pass then writes the gradients of q, k and v into one tensor and sums them for the bias.
        """
        qkv = split_projection(linear(x, projection.weight, projection.bias.detach()), heads)
        return flash2_packed(qkv, bias=projection.bias, deterministic=self.deterministic, **options)


@dataclass
class NaiveConfig(AttentionConfig):
    """Standard attention: every N x N matrix is written to memory (FlashAttention's Algorithm 0)."""

    name: str = "naive"

    def build(self) -> Attention:
        return Exact(standard_attention)


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
