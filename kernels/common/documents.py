"""Documents inside a sequence, as the kernels read them."""

import torch
from torch import Tensor


def document_bounds(cu_seqlens: Tensor, batch: int, seq_len: int) -> Tensor:
    """Where the document of each token starts and ends in its sequence, (B, 2, T) int32.

    The documents come as cumulative lengths, (n + 1,) from 0 to batch * seq_len, which cut all sequences laid end to
    end; one that runs over the end of a sequence is cut there.
    """
    token = torch.arange(batch * seq_len, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, token, right=True)
    sequence = token // seq_len * seq_len
    bounds = torch.stack([cu_seqlens[document - 1], cu_seqlens[document]]) - sequence
    return bounds.clamp(0, seq_len).view(2, batch, seq_len).transpose(0, 1).to(torch.int32).contiguous()
