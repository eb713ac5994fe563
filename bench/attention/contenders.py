"""The attention variants of bench.attention, and each variant bound to the inputs of a shape.

Each variant gets its inputs in the layout it prefers: (B, H, T, D) in memory for torch's variants, (B, T, H, D) for the
others. For GPT-2's own shape all variants get views of one packed projection. There flash2 is flash2_packed,
which writes dq, dk and dv into one gradient. The others return three gradients, which nothing gathers into one.

B batch, T sequence length, H query heads, G key/value heads, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from bench.attention.shapes import DTYPES, AttentionShape
from kernels.flash2 import flash2, flash2_packed
from kernels.naive.definition import standard_attention
from model.attention import Attention, Sdpa
from model.attention.custom import Fa2Config, Fa3Config, Fa4Config, flex, is_installed

LIBRARIES = {config.name: config for config in (Fa2Config, Fa3Config, Fa4Config)}
HEADS_FIRST = "naive", "pytorch", "fused_softmax", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex"


def available() -> dict[str, Attention]:
    """Return the variants of this machine by name. Whether its GPU can run them shows when they are tried."""
    functorch_config.donated_buffer = False  # otherwise flex's backward runs only once per forward
    variants = {"naive": standard_attention}
    variants |= {f"sdpa_{backend}": Sdpa(backend) for backend in ("flash", "cudnn", "efficient")}
    variants |= {"flex": flex, "flash2": flash2}
    return variants | {name: LIBRARIES[name].function for name in installed_libraries()}


def installed_libraries() -> list[str]:
    """Return which of fa2, fa3 and fa4 this machine has the package of."""
    return [name for name, config in LIBRARIES.items() if is_installed(config.package)]


class Inputs(NamedTuple):
    """q, dout (B, T, H, D), k and v (B, T, G, D) of a shape. If they are packed, qkv (B, T, 3, H, D) holds q, k, v."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    qkv: Tensor | None


def draw_inputs(shape: AttentionShape, device: str) -> Inputs:
    """Return standard normal inputs, the same at every call."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = DTYPES[shape.dtype]

    def normal(*sizes: int) -> Tensor:
        return torch.randn(shape.batch, shape.seq_len, *sizes, generator=generator, device=device, dtype=dtype)

    dout = normal(shape.heads, shape.head_dim)
    if shape.packed:
        qkv = normal(3, shape.heads, shape.head_dim)
        return Inputs(*qkv.unbind(2), dout, qkv)
    q, k, v = (normal(heads, shape.head_dim) for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    return Inputs(q, k, v, dout, None)


@dataclass
class Contender:
    """A variant bound to its inputs in one shape."""

    variant: str
    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    """The tensors that get gradients: q, k and v, or the packed projection."""
    dout: Tensor
    error: float | None = None

    def call(self, pass_: str) -> Callable[[], object]:
        """Return a pass without arguments. For `backward` this runs the forward pass whose graph is used."""
        if pass_ == "forward":
            return self.forward
        if pass_ == "both":
            return lambda: torch.autograd.grad(self.forward(), self.leaves, self.dout)
        out = self.forward()
        return lambda: torch.autograd.grad(out, self.leaves, self.dout, retain_graph=True)


def bind(variant: str, attend: Attention, shape: AttentionShape, inputs: Inputs) -> Contender:
    """Bind `attend` to the inputs of a shape, in the layout it prefers."""
    options = {"causal": shape.causal, "scale": shape.head_dim**-0.5}
    if shape.packed and attend is flash2:
        qkv = inputs.qkv.detach().requires_grad_()
        return Contender(variant, lambda: flash2_packed(qkv, **options), (qkv,), inputs.dout)
    qkv = inputs[:3]
    if variant in HEADS_FIRST and not shape.packed:
        qkv = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv]
    leaves = tuple(x.detach().requires_grad_() for x in qkv)
    return Contender(variant, lambda: attend(*leaves, **options), leaves, inputs.dout)
