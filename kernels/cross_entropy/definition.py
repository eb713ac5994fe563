"""Softmax cross-entropy over a linear head in plain PyTorch: the kernels' definition, and the CPU's path.

N tokens, C hidden size, V vocabulary; weight and logits have V rows or columns padded to "padded V".
"""

import torch
from torch import Tensor

from kernels.common.dtypes import accumulator

HIGHEST = 69.0
"""Upper limit in relative_losses of a logit minus its target's, in nats: exp(69) leaves fp32 room for sums."""


def losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, gradient: bool, out: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the losses (N,) in nats, fp32, of hidden (N, C) with the head's weight (padded V, C), and scales.

    The function overwrites `out` (N, padded V). With `gradient`, `out` then holds the gradient of the sum of the losses
    by the logits. The scales are None here. Hopper's kernel computes relative_losses instead, and returns scales. The
    gradient by the logits then depends on `out` and the scales, and rescale_ applies them to the products with `out`.
    """
    torch.mm(hidden, weight.T, out=out)
    return cross_entropy_(out, targets, vocab_size, gradient), None


def relative_losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the losses (N,) and the scales (2, N), computed as on Hopper: from exponentials relative to the target's.

    The two rows of the scales are `scale` and `rest`, in fp32. The gradient by the logits is out, with rest[n] added to
    out[n, targets[n]], times scale[n]. See hopper.py for the formulas.
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
    """Turn dhidden (N, C), which is out @ weight, into the gradient by hidden, in place.

    relative_losses explains `out` and the scales. For token n, the gradient by hidden is

        scale[n] (dhidden[n] + rest[n] weight[targets[n]]).

    Return scale[n] hidden[n], (N, C) in hidden's dtype. out^T times this result is the gradient by weight (padded V,
    C), except that the rests are missing. Each rest would have to be added to its target's row, one token at a time.
    These additions would reduce an error of 2.4e-3 by only a fifth.
    """
    scale, rest = scales[:, :, None]
    dhidden.copy_((dhidden.float() + rest * weight[targets.clamp(min=0)].float()) * scale)
    return (hidden.float() * scale).to(hidden.dtype)


def cross_entropy_(logits: Tensor, targets: Tensor, vocab_size: int, gradient: bool) -> Tensor:
    """Return the losses (N,) in nats of logits (N, padded V), in fp32 (fp64 for fp64 logits).

    targets (N,) are below vocab_size. A token with a negative target is ignored: its loss and its gradient are zero.
    Columns from vocab_size on are padding and are ignored too. With `gradient` the gradient of the sum of the losses,
    softmax(logits) - one_hot(targets) and zero in the padding, overwrites the logits.
    """
    x = logits[:, :vocab_size].to(accumulator(logits.dtype))
    logsumexp = x.logsumexp(1, keepdim=True)
    counts = (targets >= 0)[:, None]
    own = targets.clamp(min=0)[:, None]
    losses = (logsumexp - x.gather(1, own)) * counts
    if gradient:
        probabilities = (x - logsumexp).exp()
        probabilities.scatter_add_(1, own, probabilities.new_full((1, 1), -1).expand(len(targets), 1))
        logits.zero_()[:, :vocab_size] = probabilities * counts
    return losses[:, 0]
