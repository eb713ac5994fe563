"""Softmax cross-entropy with its gradient in plain PyTorch: what the kernels compute, and what runs on a CPU."""

import torch
from torch import Tensor

HIGHEST = 69.0
"""Nats by which relative_losses counts a logit as above its target's at most: exp(69) leaves fp32 room for sums."""


def losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, gradient: bool, out: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Losses (N,) in nats, fp32, of hidden (N, C) by the head's weight (padded V, C); see cross_entropy_.

    out (N, padded V) is overwritten: with `gradient` by that of the sum of the losses by the logits, but for what
    rescale_ makes good, by numbers that are returned too, or None.
    """
    torch.mm(hidden, weight.T, out=out)
    return cross_entropy_(out, targets, vocab_size, gradient), None


def relative_losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, out: Tensor
) -> tuple[Tensor, Tensor]:
    """losses as Hopper computes them, from exponentials relative to the target's: see hopper.py.

    The gradient is out, with `rest` added to each row's number for its target, times the row's scale: scale and rest
    are the two rows of what is returned with the losses, (2, N) in fp32.
    """
    own = targets.clamp(min=0)[:, None]
    x = hidden.float() @ weight.float().T
    e = (x - x.gather(1, own)).to(out.dtype).float().clamp(max=HIGHEST).exp()
    e[:, vocab_size:] = 0
    l, counts = e.sum(1).clamp(min=1), targets >= 0
    out.copy_(e)
    rounded = (1 - l).to(out.dtype)
    out.scatter_(1, own, rounded[:, None])
    return l.log() * counts, torch.stack([counts / l, (1 - l - rounded) * counts])


def rescale_(dhidden: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, scales: Tensor) -> Tensor:
    """Makes dhidden (N, C), the product of relative_losses' out and weight (padded V, C), the gradient by hidden.

    Returns hidden times the scales, whose product with that out is the gradient by weight. There the rests are left
    out: they would have to be added to the targets' rows one by one, and would take a fifth off an error of 2.4e-3.
    """
    scale, rest = scales[:, :, None]
    dhidden.copy_((dhidden.float() + rest * weight[targets.clamp(min=0)].float()) * scale)
    return (hidden.float() * scale).to(hidden.dtype)


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
