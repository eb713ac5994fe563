"""A linear layer with bias and residual in plain PyTorch: the definition of the kernel, and the path of other devices.

N tokens, D inputs, C outputs.
"""

import torch.nn.functional as F
from torch import Tensor


def forward(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None) -> Tensor:
    """Return x weight^T + bias + residual, (N, C) in x's dtype.

    x (N, D), weight (C, D) and residual (N, C) or None share a dtype; bias (C,) may have another one.
    """
    # Round twice: the layer's result, then its sum with the residual. Sums of two 16-bit numbers often lie exactly
    # halfway between two others. If the bias were added in the same rounding, a tiny one would decide every tie, which
    # changes the result by more than a hundred times the bias.
    out = F.linear(x, weight, bias.to(x.dtype))
    return out if residual is None else out.add_(residual)
