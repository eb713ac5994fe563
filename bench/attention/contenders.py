"""The attention variants of bench.attention, what each needs loaded, and each bound to the inputs of a cell.

Each variant finds its inputs as it likes them: contiguous (B, H, T, D) storage for those that come from torch,
(B, T, H, D) for the others. In the cell of GPT-2 itself all get the same views of one packed projection; there flash2
is flash2_packed, which writes dq, dk and dv into one gradient, and its rivals are not charged for gathering theirs.

B batch, T sequence length, H query heads, G key/value heads, D head size.
"""

import ctypes
import functools
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.attention.shapes import DTYPES, Cell
from errors import UserError
from kernels.flash2 import flash2, flash2_packed
from kernels.naive.definition import standard_attention
from model.attention import Attention, sdpa

HEADS_FIRST = "naive", "pytorch", "fused_softmax", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex"


@functools.cache
def _compiled_flex() -> Callable:
    # One compilation per shape; fullgraph, or at its limit of recompilations dynamo would fall back to eager unseen.
    functorch_config.donated_buffer = False  # or its backward could run only once per forward
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


@functools.cache
def _causal_blocks(seq_len: int, device: torch.device):
    return create_block_mask(lambda b, h, i, j: i >= j, None, None, seq_len, seq_len, device=device)


def flex(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """FlexAttention, compiled; its mask of blocks is made once per length."""
    blocks = _causal_blocks(q.shape[1], q.device) if causal else None
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return _compiled_flex()(q, k, v, block_mask=blocks, scale=scale, enable_gqa=grouped).transpose(1, 2)


def fa2(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """FlashAttention-2 from its own package."""
    from flash_attn import flash_attn_func

    return flash_attn_func(q, k, v, softmax_scale=scale, causal=causal)


def fa3(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """FlashAttention-3 from its own package, whose earlier versions return the logsumexp too."""
    from flash_attn_interface import flash_attn_func

    out = flash_attn_func(q, k, v, softmax_scale=scale, causal=causal)
    return out[0] if isinstance(out, tuple) else out


class _LibraryFA3(torch.autograd.Function):
    """FlashAttention-3's bare operators, as a loaded library registers them."""

    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        out, logsumexp, *_ = torch.ops.flash_attn_3.fwd(q, k, v, softmax_scale=scale, is_causal=causal)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.options = {"softmax_scale": scale, "is_causal": causal}
        return out

    @staticmethod
    def backward(ctx, dout):
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in ctx.saved_tensors[:3])
        torch.ops.flash_attn_3.bwd(dout, *ctx.saved_tensors, dq=dq, dk=dk, dv=dv, **ctx.options)
        return dq, dk, dv, None, None


def load_fa3(library: Path) -> Attention:
    """FlashAttention-3 from a bare library, such as xformers/flash_attn_3/_C.so of the xformers wheel.

    Raises:
        UserError: it cannot be loaded.
    """
    runtime = library.parent / "libcudart.so.12"
    try:
        # The library wants CUDA 12's runtime, which a torch for CUDA 13 has not loaded.
        ctypes.CDLL(str(runtime) if runtime.exists() else runtime.name, mode=ctypes.RTLD_GLOBAL)
        torch.ops.load_library(library)
    except OSError as error:
        raise UserError(
            f"--fa3-library {library} cannot be loaded ({error}); it needs libcudart.so.12 beside it or on the "
            "library path"
        ) from error
    return lambda q, k, v, *, causal, scale: _LibraryFA3.apply(q, k, v, causal, scale)


def available(fa3_library: str | Path | None = None) -> dict[str, Attention]:
    """The variants this machine has, by name. What a GPU cannot run of them shows when it is tried.

    FlashAttention-3 is that of the bare library, if one is given or named by FA3_LIBRARY, or else the installed one.
    """
    backends = "flash", "cudnn", "efficient"
    variants = {"naive": standard_attention}
    variants |= {f"sdpa_{backend}": functools.partial(sdpa, backend=backend) for backend in backends}
    variants |= {"flex": flex, "flash2": flash2}
    if importlib.util.find_spec("flash_attn"):
        variants["fa2"] = fa2
    if library := fa3_library or os.environ.get("FA3_LIBRARY"):
        variants["fa3"] = load_fa3(Path(library))
    elif importlib.util.find_spec("flash_attn_interface"):
        variants["fa3"] = fa3
    return variants


class Data(NamedTuple):
    """q, dout (B, T, H, D), k and v (B, T, G, D) of a cell; qkv (B, T, 3, H, D) where they are views of it."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    qkv: Tensor | None


def draw(cell: Cell, device: str) -> Data:
    """Standard normal inputs, the same at every call."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(cell.batch, cell.seq_len, *shape, generator=generator, device=device, dtype=dtype)

    dtype = DTYPES[cell.dtype]
    dout = normal(cell.heads, cell.head_dim)
    if cell.packed:
        qkv = normal(3, cell.heads, cell.head_dim)
        return Data(*qkv.unbind(2), dout, qkv)
    return Data(*(normal(heads, cell.head_dim) for heads in (cell.heads, cell.kv_heads, cell.kv_heads)), dout, None)


@dataclass
class Contender:
    """A variant bound to its inputs in one cell."""

    variant: str
    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    """What gradients are taken of: q, k and v, or the packed projection."""
    dout: Tensor
    error: float | None = None

    def call(self, pass_: str) -> Callable[[], object]:
        """A pass without arguments; for `backward` the graph that it runs on is made here."""
        if pass_ == "forward":
            return self.forward
        if pass_ == "both":
            return lambda: torch.autograd.grad(self.forward(), self.leaves, self.dout)
        out = self.forward()
        return lambda: torch.autograd.grad(out, self.leaves, self.dout, retain_graph=True)


def bind(variant: str, attend: Attention, cell: Cell, data: Data) -> Contender:
    """`attend` with the inputs of a cell, in the layout it likes."""
    options = {"causal": cell.causal, "scale": cell.head_dim**-0.5}
    if cell.packed and attend is flash2:
        qkv = data.qkv.detach().requires_grad_()
        return Contender(variant, lambda: flash2_packed(qkv, **options), (qkv,), data.dout)
    inputs = data[:3]
    if variant in HEADS_FIRST and not cell.packed:
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    return Contender(variant, lambda: attend(*leaves, **options), leaves, data.dout)
