"""Full activation checkpointing: the tensors that a block keeps. The backward pass recomputes the others.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, library
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import kernels.flash1  # defines an operator of KEPT
import kernels.flash2  # noqa: F401  defines another one

# The results of attention: at long context they cost the most time and little memory.
KEPT = [torch.ops.flash1.forward.default, torch.ops.flash2.forward.default]
# torch's kernels draw their dropout mask inside. If they are skipped during recomputation, later dropout masks differ
# from the first pass. So with dropout they are computed twice.
KEPT_WITHOUT_DROPOUT = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


@library.custom_op("checkpointing::end", mutates_args=())
def end_of_block(x: Tensor) -> Tensor:
    """Return a copy of x. Checkpointing keeps this copy in a compiled model.

    The compiler of torch 2.11 to 2.14 does not see the end of a block. Without this operator, the compiler would
    recompute all blocks before the backward pass of the last block. The recomputed blocks would then all be in memory.
    With 12 blocks, torch 2.11 would also compile for hours. `x.clone()` does not help, because the compiler removes
    this call before it chooses the tensors to keep.
    """
    return x.clone()


end_of_block.register_fake(torch.empty_like)
end_of_block.register_autograd(lambda _, gradient: gradient)


def checkpointed(block: Callable[..., tuple], *inputs, drops: bool) -> tuple[Tensor, Tensor | None]:
    """Return the results of a block: the residual stream (B, T, C) and a bias (C,) or None.

    The block keeps the residual stream and the results of fused attention. `drops` says that the block has dropout.
    """

    def ended(*inputs) -> tuple[Tensor, Tensor | None]:
        x, added_bias = block(*inputs)
        return end_of_block(x) if torch.compiler.is_compiling() else x, added_bias

    kept = [torch.ops.checkpointing.end.default, *KEPT, *([] if drops else KEPT_WITHOUT_DROPOUT)]
    contexts = partial(create_selective_checkpoint_contexts, kept)
    return checkpoint(ended, *inputs, use_reentrant=False, context_fn=contexts)
