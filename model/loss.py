"""The loss over the tied head."""

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Mean cross-entropy in nats of the next tokens, a scalar in fp32.

    hidden (B, T, C), weight (padded V, C), targets (B, T) below vocab_size. The rows of `weight` past vocab_size are
    padding: they take no part in the softmax, so that the loss is that of the true vocabulary.
    """
    logits = F.linear(hidden, weight).float()
    if vocab_size < weight.shape[0]:
        padding = torch.arange(weight.shape[0], device=logits.device) >= vocab_size
        logits = logits.masked_fill(padding, float("-inf"))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
