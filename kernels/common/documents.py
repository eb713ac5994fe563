"""The bounds of documents inside a sequence, in the form that the kernels read."""

import torch
from torch import Tensor


def document_bounds(cu_seqlens: Tensor, batch: int, seq_len: int) -> Tensor:
    """Return the start and end of each token's document within its sequence, (B, 2, T) int32.

    cu_seqlens (n + 1,) counts tokens over all sequences laid end to end. Document i has the tokens cu_seqlens[i] to
    cu_seqlens[i + 1]. A document that crosses the end of a sequence is cut there.
    """
    token = torch.arange(batch * seq_len, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, token, right=True)
    sequence = token // seq_len * seq_len
    bounds = torch.stack([cu_seqlens[document - 1], cu_seqlens[document]]) - sequence
    return bounds.clamp(0, seq_len).view(2, batch, seq_len).transpose(0, 1).to(torch.int32).contiguous()
