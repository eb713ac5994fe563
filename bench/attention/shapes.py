"""The shapes that attention is measured on: the shapes of the FlashAttention-2 paper, and a few of our own.

The paper uses 16k tokens per batch, hidden size 2048, and heads of 64 and 128, with and without a causal mask. A panel
of its figures is one head size with one mask.
"""

from dataclasses import dataclass

import torch

from trainer.flops import attention_flops

PASSES = "forward", "backward", "both"
TOKENS, HIDDEN = 16384, 2048
LENGTHS = 512, 1024, 2048, 4096, 8192, 16384
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class AttentionShape:
    """One shape that all variants are measured on."""

    name: str
    batch: int
    seq_len: int
    heads: int
    head_dim: int
    causal: bool = True
    kv_heads: int = 0
    """0 stands for as many as heads."""
    packed: bool = False
    """q, k and v are views of one projection."""
    dtype: str = "bfloat16"

    def __post_init__(self):
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)

    def flops(self, pass_: str) -> float:
        """Return the FLOPs of one call."""
        return attention_flops(self.batch, self.heads, self.seq_len, self.head_dim, self.causal, pass_=pass_)


def paper_shapes(head_dim: int, causal: bool) -> list[AttentionShape]:
    """Return the shapes of one panel of the FlashAttention-2 paper's figures."""
    name, heads = f"d{head_dim}_{'causal' if causal else 'full'}", HIDDEN // head_dim
    return [AttentionShape(f"{name}_{length}", TOKENS // length, length, heads, head_dim, causal) for length in LENGTHS]


# The most interesting shapes come first. 32 heads of 80 are from GPT-3 2.7B.
SHAPES = [
    AttentionShape("gpt2", batch=32, seq_len=1024, heads=12, head_dim=64, packed=True),
    *paper_shapes(64, causal=True),
    *paper_shapes(128, causal=True),
    AttentionShape("d80_causal_2048", batch=8, seq_len=2048, heads=32, head_dim=80),
    AttentionShape("d80_causal_8192", batch=2, seq_len=8192, heads=32, head_dim=80),
    *paper_shapes(64, causal=False),
    *paper_shapes(128, causal=False),
    AttentionShape("64k", batch=1, seq_len=65536, heads=12, head_dim=64),
]
