"""What the operators of flash2 take besides their tensors, in their order; and documents as the kernels read them."""

from typing import NamedTuple

import torch
from torch import Tensor


class Options(NamedTuple):
    """Which keys a query sees, the scale of the scores, and dropout."""

    numbers: Tensor | None = None
    """(B, H, T + S) int32: the randomness of dropout, as dropout.draw draws it; None without dropout."""
    documents: Tensor | None = None
    """(B, 2, T) int32: where the document of each token starts and ends in its sequence; None where all is one."""
    causal: bool = False
    """Query i sees the keys up to i + seq_k - seq_q."""
    window: int = 0
    """Of those, it sees the last so many; all of them at 0."""
    scale: float = 1.0
    dropout_p: float = 0.0


def document_bounds(cu_seqlens: Tensor, batch: int, seq_len: int) -> Tensor:
    """Options.documents from the cumulative lengths of documents, (n + 1,) from 0 to batch * seq_len.

    They cut all sequences laid end to end; a document that runs over the end of a sequence is cut there.
    """
    token = torch.arange(batch * seq_len, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, token, right=True)
    sequence = token // seq_len * seq_len
    bounds = torch.stack([cu_seqlens[document - 1], cu_seqlens[document]]) - sequence
    return bounds.clamp(0, seq_len).view(2, batch, seq_len).transpose(0, 1).to(torch.int32).contiguous()
