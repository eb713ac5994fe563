"""The loss over the tied head."""

import torch
from torch import Tensor

from kernels.cross_entropy import linear_cross_entropy


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Mean cross-entropy in nats of the next tokens, a scalar in fp32.

    hidden (B, T, C), weight (padded V, C), targets (B, T) below vocab_size; negative ones do not count. The rows of
    `weight` past vocab_size are padding: they take no part in the softmax, so that the loss is that of the true
    vocabulary. Logits are in autocast's dtype where that is on.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    return linear_cross_entropy(hidden.flatten(0, 1), weight, targets.flatten(), vocab_size)
