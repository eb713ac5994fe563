"""The loss over the tied head."""

import torch
from torch import Tensor

from kernels.cross_entropy import linear_cross_entropy


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Return the mean cross-entropy of the next tokens in nats, an fp32 scalar.

    hidden (B, T, C), weight (padded V, C), targets (B, T) below vocab_size. Negative targets do not count. The rows of
    `weight` from vocab_size on are padding: the softmax ignores them. Logits have autocast's dtype if autocast is on.
    """
    return linear_cross_entropy(in_autocast_dtype(hidden).flatten(0, 1), weight, targets.flatten(), vocab_size)


def in_autocast_dtype(x: Tensor) -> Tensor:
    """Return x in autocast's dtype if autocast is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
