"""The attentions of Long Range Arena by name: exact ones of the registry, and approximate ones.

All are called as f(q, k, v) -> out. q, k, v and out are (B, T, H, D) of one floating dtype. Every token may attend to
every token (no causal mask), and scores are scaled by D**-0.5.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from bench.lra.approximate.linear import LinearAttention
from bench.paper.attentions import attention_named
from errors import check_choice
from model.attention import Attention

if TYPE_CHECKING:
    from bench.lra.encoder import EncoderConfig

UNPADDED = "flash2_unpadded"
"""flash2 whose classifier leaves out the padding: see bench.lra.encoder.Classifier."""


class Exact:
    """An attention of the registry, without a causal mask."""

    def __init__(self, config: EncoderConfig, name: str):
        self.attend = attention_named(name)
        if isinstance(self.attend, Attention):
            self.attend.check_length(config.context_length)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        return self.attend(q, k, v, causal=False, scale=q.shape[3] ** -0.5, **options)


ATTENTIONS: dict[str, Callable] = {
    **{name: partial(Exact, name=name) for name in ("naive", "fused_softmax", "flash1", "flash2")},
    UNPADDED: partial(Exact, name="flash2"),
    "block_sparse": partial(Exact, name="block_sparse"),
    "linear": LinearAttention,
}
"""What builds each attention from an EncoderConfig."""


def build_attention(name: str, config: EncoderConfig) -> Callable[..., Tensor]:
    """Return a new attention of that name. It is an nn.Module if it has weights.

    Raises:
        UserError: the name is unknown, or the attention does not support config.context_length.
    """
    check_choice("attention", name, ATTENTIONS)
    return ATTENTIONS[name](config)
