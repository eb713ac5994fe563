"""The attentions of Long Range Arena by name: some of the registry, and approximate ones.

Call each as f(q, k, v) -> out. q, k, v and out are (B, T, H, D) of one floating dtype. No attention is causal.
block_sparse, local_window, reformer and smyrf leave out pairs of tokens. Scores are scaled by D**-0.5, except in linear
attention. flash2_unpadded also gets cu_seqlens, because its sequences are packed into one.
"""

from collections.abc import Callable
from functools import cache, partial

from torch import Tensor

from bench.lra.approximate.linear import LinearAttention
from bench.lra.approximate.linformer import Linformer
from bench.lra.approximate.local_window import LocalWindow
from bench.lra.approximate.performer import Performer
from bench.lra.approximate.reformer import Reformer
from bench.lra.approximate.smyrf import Smyrf
from bench.lra.config import EncoderConfig
from errors import check_choice
from model.attention import VARIANTS, Attention

EXACT = "naive", "fused_softmax", "flash1", "flash2"
"""The attentions that compute all pairs. UNPADDED does too, for the real tokens."""
UNPADDED = "flash2_unpadded"
"""flash2 whose classifier leaves out the padding: see bench.lra.encoder.Classifier."""


class Registered:
    """An attention of the registry, without a causal mask."""

    def __init__(self, config: EncoderConfig, name: str):
        self.attend = _shared(name)
        self.attend.check_length(config.context_length)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        return self.attend(q, k, v, causal=False, scale=q.shape[3] ** -0.5, **options)


@cache
def _shared(name: str) -> Attention:
    """Return the attention of that name, always the same object.

    torch.compile refuses a model whose layers have different objects of block_sparse.
    """
    return VARIANTS[name]().build()


ATTENTIONS: dict[str, Callable[[EncoderConfig], Callable[..., Tensor]]] = {
    **{name: partial(Registered, name=name) for name in EXACT},
    UNPADDED: partial(Registered, name="flash2"),
    "block_sparse": partial(Registered, name="block_sparse"),
    "linformer": Linformer,
    "linear": LinearAttention,
    "performer": Performer,
    "local_window": LocalWindow,
    "reformer": Reformer,
    "smyrf": Smyrf,
}
"""The builders of the attentions, in the order of the tables."""


def build_attention(name: str, config: EncoderConfig) -> Callable[..., Tensor]:
    """Return an attention of that name. The approximate ones are new nn.Modules, and the others are shared objects.

    Raises:
        UserError: the name is unknown, or the attention does not support config.context_length.
    """
    check_choice("attention", name, ATTENTIONS)
    return ATTENTIONS[name](config)
