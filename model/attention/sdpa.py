"""torch.nn.functional.scaled_dot_product_attention, with the backend that torch picks or a given one."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from errors import UserError
from kernels.naive.definition import same_document, visible
from model.attention.protocol import Attention, AttentionConfig

SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class Sdpa(Attention):
    """torch's own attention.

    Documents become a mask of all pairs, (batch, 1, seq, seq). The backends flash and cudnn do not take masks.
    """

    remedy = "choose another attention or attention.backend=auto"

    def __init__(self, backend: str = "auto"):
        self.backend = backend

    def __call__(self, q, k, v, *, causal, scale, dropout_p=0.0, cu_seqlens=None) -> Tensor:
        seq_q, seq_k = q.shape[1], k.shape[1]
        if causal and seq_q != seq_k:  # torch aligns the mask at the top left
            raise ValueError("attention=sdpa masks causally only q and k of one length; use attention=flash2 or naive")
        options = {"is_causal": causal, "scale": scale, "dropout_p": dropout_p, "enable_gqa": q.shape[2] != k.shape[2]}
        if cu_seqlens is not None:
            same = same_document(q, k, cu_seqlens)[:, None]
            options |= {"attn_mask": same & visible(seq_q, seq_k, q.device) if causal else same, "is_causal": False}
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.backend == "auto":
            return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)
        with sdpa_kernel(SDPA_BACKENDS[self.backend]):
            return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


@dataclass
class SdpaConfig(AttentionConfig):
    """torch.nn.functional.scaled_dot_product_attention."""

    name: str = "sdpa"
    backend: str = "auto"
    """auto (torch's choice), flash, cudnn, efficient or math."""

    def __post_init__(self):
        super().__post_init__()
        choices = "auto", *SDPA_BACKENDS
        if self.backend not in choices:
            raise UserError(f"attention.backend={self.backend} is unknown; choose one of {', '.join(choices)}")

    def build(self) -> Attention:
        return Sdpa(self.backend)
