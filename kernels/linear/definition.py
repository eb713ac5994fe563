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
    # halfway between two others. A tiny bias in the same rounding would decide every tie.
    out = F.linear(x, weight, bias.to(x.dtype))
    return out if residual is None else out.add_(residual)
