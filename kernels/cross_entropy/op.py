"""Cross-entropy over a linear head as one PyTorch operator that holds the logits of one part of the tokens at a time.

The forward pass computes the gradients too, while a part's logits exist, as in Liger-Kernel (Hsu et al., 2024). The
loss ends the graph, so its own gradient is a number that scales these gradients afterwards.

N tokens, C hidden size, V vocabulary; weight has V rows padded to "padded V".
"""

import torch
from torch import Tensor, library

from kernels.common.dtypes import accumulator
from kernels.common.registering import implementation, no_second_derivative

PARTS = 4  # of the tokens, so that the logits stay small beside the layers' saved tensors
PART_TOKENS = 4096, 16384
"""The least and the most tokens of a part. Each part reads and writes the head's whole gradient once: 5 % of its time
for the least tokens, 1 % for the most. The most need 1.5 GiB for GPT-2's logits in 16 bits."""

_library = library.Library("cross_entropy", "DEF")
_library.define(
    "linear(Tensor hidden, Tensor weight, Tensor targets, int vocab_size, bool gradient) -> (Tensor, Tensor, Tensor)"
)


def part_size(tokens: int) -> int:
    """Return the most tokens whose logits exist at a time."""
    return min(max(-(-tokens // PARTS), PART_TOKENS[0]), PART_TOKENS[1])


def _linear(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, gradient: bool) -> tuple:
    """Return the sum of the losses and its gradients by hidden and weight (empty without `gradient`)."""
    kernels = implementation("cross_entropy", hidden.device.type)
    total = hidden.new_zeros((), dtype=accumulator(hidden.dtype))
    dhidden, dweight = _gradients(hidden, weight, gradient)
    dweight.zero_()
    with torch.autocast(hidden.device.type, enabled=False):
        matrix = weight.to(hidden.dtype)
        size = part_size(len(hidden))
        logits = hidden.new_empty((min(size, len(hidden)), len(weight)))
        for start in range(0, len(hidden), size):
            part = slice(start, min(start + size, len(hidden)))
            rows, dlogits = hidden[part], logits[: part.stop - start]
            values, scales = kernels.losses(rows, matrix, targets[part], vocab_size, gradient, dlogits)
            total += values.sum()
            if gradient:
                torch.mm(dlogits, matrix, out=dhidden[part])
                if scales is not None:
                    rows = kernels.rescale_(dhidden[part], rows, matrix, targets[part], scales)
                _add_product(dweight, dlogits.T, rows)
    return total, dhidden, dweight


def _gradients(hidden: Tensor, weight: Tensor, gradient: bool) -> list[Tensor]:
    """Return uninitialised gradients by hidden and by weight, each in its own dtype; empty without `gradient`."""
    return [x.new_empty(x.shape if gradient else 0) for x in (hidden, weight)]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to total in total's dtype: over many parts, 16 bits would lose small terms."""
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
    total = hidden.new_empty((), dtype=accumulator(hidden.dtype))
    return total, *_gradients(hidden, weight, gradient)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, vocab_size):
        total, dhidden, dweight = torch.ops.cross_entropy.linear(hidden, weight, targets, vocab_size, True)
        count = (targets >= 0).sum()
        ctx.save_for_backward(dhidden, dweight, count)
        return total / count

    @staticmethod
    @no_second_derivative("linear_cross_entropy", "torch.nn.functional.linear and cross_entropy")
    def backward(ctx, dloss):
        dhidden, dweight, count = ctx.saved_tensors
        share = dloss / count
        # On a GPU, 16-bit tensor * scalar tensor rounds the scalar to 16 bits, which would scale all gradients wrongly.
        wide = dhidden.to(torch.promote_types(dhidden.dtype, share.dtype))
        return (wide * share).to(dhidden.dtype), dweight * share, None, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Return the mean of -log softmax(hidden @ weight.T)[target] over tokens with a target >= 0, in nats.

    hidden is (N, C). weight is (padded V, C). Its rows from vocab_size on are padding. targets (N,) are integers below
    vocab_size, but this is not checked. The loss is fp32, or fp64 for fp64 hidden on a CPU. The products are computed
    in hidden's dtype. The gradient by weight is summed in the weight's dtype, and its rows of padding are zero.

    Raises:
        ValueError: hidden and weight differ in C, targets are not N, or weight has fewer rows than vocab_size.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (hidden, weight, targets))
        raise ValueError(f"the shapes {shapes} do not fit; give hidden (N, C), weight (V, C) and targets (N,)")
    if not 0 < vocab_size <= len(weight):
        raise ValueError(f"vocab_size={vocab_size} is out of range; give 1 to the {len(weight)} rows of weight")
    targets = targets.contiguous()
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden, weight, targets, vocab_size)
    return torch.ops.cross_entropy.linear(hidden, weight, targets, vocab_size, False)[0] / (targets >= 0).sum()
