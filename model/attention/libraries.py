"""Attention kernels of other libraries, by the mechanism of attention=custom.

Each library is imported at its first call: torch's flex_attention takes seconds, and the others may be missing.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from errors import UserError
from model.attention.custom import Custom
from model.attention.protocol import Attention, AttentionConfig


@functools.cache
def _compiled_flex(dynamic: bool) -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    # Without fullgraph, dynamo would fall back to eager at its limit of recompilations.
    return torch.compile(flex_attention, fullgraph=True, dynamic=dynamic)


@functools.cache
def _causal_blocks(seq_q: int, seq_k: int, device: torch.device):
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: i + seq_k - seq_q >= j, None, None, seq_q, seq_k, device=device)


def flex(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Return FlexAttention, compiled once per shape. Its block mask is made once per length."""
    blocks = _causal_blocks(q.shape[1], k.shape[1], q.device) if causal else None
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attend = _compiled_flex(dynamic=q.shape[2] == 1)  # in sampling, keys grow by one per token
    return attend(q, k, v, block_mask=blocks, scale=scale, enable_gqa=grouped).transpose(1, 2)


def fa2(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, dropout_p: float = 0.0) -> Tensor:
    from flash_attn import flash_attn_func

    return flash_attn_func(q, k, v, dropout_p=dropout_p, softmax_scale=scale, causal=causal)


def fa3(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    from flash_attn_interface import flash_attn_func

    return _first(flash_attn_func(q, k, v, softmax_scale=scale, causal=causal))


def fa4(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    from flash_attn.cute import flash_attn_func

    return _first(flash_attn_func(q, k, v, softmax_scale=scale, causal=causal))


def _first(result: Tensor | tuple) -> Tensor:
    """Return the output alone. Some versions return the logsumexp too."""
    return result[0] if isinstance(result, tuple) else result


def is_installed(package: str) -> bool:
    """Return whether Python finds a package, without importing it (its parent package is imported)."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


@dataclass
class LibraryConfig(AttentionConfig):
    """Base of the variants that need a package which this repository does not install."""

    function: ClassVar[Callable[..., Tensor]]
    package: ClassVar[str]
    pip: ClassVar[str]

    def build(self) -> Attention:
        if not is_installed(self.package):
            raise UserError(f"attention={self.name} needs the package {self.package}; run {self.pip}")
        return Custom(f"attention={self.name}", self.function)


@dataclass
class FlexConfig(LibraryConfig):
    """torch's FlexAttention, compiled by itself."""

    name: str = "flex"

    def build(self) -> Attention:
        # torch.compile would trace the cached mask into every layer. The decorator is applied here, because importing
        # it takes two seconds.
        return Custom("attention=flex", torch.compiler.disable(flex))


@dataclass
class Fa2Config(LibraryConfig):
    """FlashAttention-2 from its authors."""

    name: str = "fa2"
    function, package, pip = staticmethod(fa2), "flash_attn", "pip install flash-attn --no-build-isolation"


@dataclass
class Fa3Config(LibraryConfig):
    """FlashAttention-3 from its authors, for Hopper."""

    name: str = "fa3"
    function, package = staticmethod(fa3), "flash_attn_interface"
    pip = 'pip install --no-build-isolation "git+https://github.com/Dao-AILab/flash-attention.git#subdirectory=hopper"'


@dataclass
class Fa4Config(LibraryConfig):
    """FlashAttention-4 from its authors, for Hopper and Blackwell."""

    name: str = "fa4"
    function, package, pip = staticmethod(fa4), "flash_attn.cute", "pip install flash-attn-4"
