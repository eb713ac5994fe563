"""Cross-entropy over a linear head as one PyTorch operator that never holds the logits of more than a chunk of tokens.

The gradients are made in the forward pass, while a chunk's logits are there, as in Liger-Kernel (Hsu et al., 2024): the
loss is the end of the graph, so that its own gradient is a number that scales them afterwards.
"""

import torch
from torch import Tensor, library
from torch.autograd.function import once_differentiable

from kernels.common.registering import implementation

CHUNKS = 4
"""Parts that the tokens are cut into, so that logits stay few beside what the layers keep of the same tokens."""
CHUNK = 4096, 16384
"""The least and the most tokens of a part. Each part reads and writes the whole gradient of the head once: by bandwidth
5 % of its products' time for the least and 1 % for the most, whose logits are 1.5 GiB for GPT-2's vocabulary in 16
bits."""

_library = library.Library("cross_entropy", "DEF")
_library.define(
    "linear(Tensor hidden, Tensor weight, Tensor targets, int vocab_size, bool gradient) -> (Tensor, Tensor, Tensor)"
)


def _linear(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, gradient: bool) -> tuple:
    """The sum of the losses, and its gradients by hidden and by weight, or empty ones; see linear_cross_entropy."""
    kernels = implementation("cross_entropy", hidden.device.type)
    total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    dhidden, dweight = _gradients(hidden, weight, gradient)
    dweight.zero_()
    with torch.autocast(hidden.device.type, enabled=False):
        matrix = weight.to(hidden.dtype)
        size = min(max(-(-len(hidden) // CHUNKS), CHUNK[0]), CHUNK[1])
        logits = hidden.new_empty((min(size, len(hidden)), len(weight)))
        for start in range(0, len(hidden), size):
            part = slice(start, min(start + size, len(hidden)))
            rows, chunk = hidden[part], logits[: part.stop - start]
            values, scales = kernels.losses(rows, matrix, targets[part], vocab_size, gradient, chunk)
            total += values.sum()
            if gradient:
                torch.mm(chunk, matrix, out=dhidden[part])
                if scales is not None:
                    rows = kernels.rescale_(dhidden[part], rows, matrix, targets[part], scales)
                _add_product(dweight, chunk.T, rows)
    return total, dhidden, dweight


def _gradients(hidden: Tensor, weight: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
    """Room for the gradients by hidden, in its dtype, and by weight, in the weight's."""
    if not gradient:
        return hidden.new_empty(0), weight.new_empty(0)
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed in total's dtype: over many chunks 16 bits would lose what is small."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cpu":
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


for _device in ("CPU", "CUDA"):
    _library.impl("linear", _linear, _device)


@library.register_fake("cross_entropy::linear")
def _(hidden, weight, targets, vocab_size, gradient):
    total = hidden.new_empty((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    return total, *_gradients(hidden, weight, gradient)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, vocab_size):
        total, dhidden, dweight = torch.ops.cross_entropy.linear(hidden, weight, targets, vocab_size, True)
        count = (targets >= 0).sum()
        ctx.save_for_backward(dhidden, dweight, count)
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        dhidden, dweight, count = ctx.saved_tensors
        share = dloss / count
        # On a GPU a product by a number that lies there rounds that to 16 bits first, for all of the model alike.
        wide = dhidden.to(torch.promote_types(dhidden.dtype, share.dtype))
        return (wide * share).to(dhidden.dtype), dweight * share, None, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Mean of -log softmax(hidden @ weight.T)[target] over the tokens whose target is not negative, in nats, fp32.

    hidden (N, C), weight (padded V, C) with vocab_size true rows, targets (N,) below vocab_size, which is not checked.
    The products are computed in hidden's dtype, whatever the weight's; the gradient by weight is summed in the
    weight's, and its rows of padding are zero.

    Raises:
        ValueError: hidden and weight differ in C, targets are not N, or weight has fewer rows than vocab_size.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (hidden, weight, targets))
        raise ValueError(f"the loss takes hidden (N, C), weight (V, C) and targets (N,), not {shapes}")
    if not 0 < vocab_size <= len(weight):
        raise ValueError(f"a vocabulary of {vocab_size} tokens needs as many rows of weight, which has {len(weight)}")
    targets = targets.contiguous()
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden, weight, targets, vocab_size)
    return torch.ops.cross_entropy.linear(hidden, weight, targets, vocab_size, False)[0] / (targets >= 0).sum()
