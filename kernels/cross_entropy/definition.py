"""Softmax cross-entropy with its gradient in plain PyTorch: what the Triton kernel computes, and what runs on a CPU."""

import torch
from torch import Tensor


def losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, gradient: bool, logits: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Losses (N,) of hidden (N, C), whose logits by weight (padded V, C) are written into `logits`; see cross_entropy_.

    With `gradient`, that of the sum of the losses takes their place, but for a scale of each row, (N,) in fp32, if that
    is not None.
    """
    torch.mm(hidden, weight.T, out=logits)
    return cross_entropy_(logits, targets, vocab_size, gradient), None


def cross_entropy_(logits: Tensor, targets: Tensor, vocab_size: int, gradient: bool) -> Tensor:
    """Losses (N,) in nats of logits (N, padded V), in fp32 (fp64 for such logits), targets (N,) below vocab_size.

    A negative target does not count: its loss and the gradient of its row are zero. Columns from vocab_size on are
    padding and take no part. With `gradient`, softmax(logits) - one_hot(targets), which is the gradient of the sum of
    the losses and zero in the padding, takes the place of the logits.
    """
    true = logits[:, :vocab_size].to(torch.promote_types(logits.dtype, torch.float32))
    logsumexp = true.logsumexp(1, keepdim=True)
    counts = (targets >= 0)[:, None]
    own = targets.clamp(min=0)[:, None]
    losses = (logsumexp - true.gather(1, own)) * counts
    if gradient:
        probabilities = (true - logsumexp).exp()
        probabilities.scatter_add_(1, own, probabilities.new_full((1, 1), -1).expand(len(targets), 1))
        logits.zero_()[:, :vocab_size] = probabilities * counts
    return losses[:, 0]
