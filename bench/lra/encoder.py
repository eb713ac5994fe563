"""The encoder classifier of Long Range Arena, as in the PyTorch code of Xiong et al., "Nystromformer" (2021).

Pre-LayerNorm blocks, learned positions, GELU, mean pooling and a head with one hidden layer. Unlike that code, it
has no dropout, attention sees the padding except with flash2_unpadded, and the mean takes only the real tokens.

B batch, T sequence length, N real tokens of a batch, C width, H heads, D head size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.lra.approximate.softmax import wide_type
from bench.lra.attentions import UNPADDED, build_attention
from bench.lra.config import EncoderConfig


class Packing(NamedTuple):
    """Where the real tokens of a padded batch are."""

    index: Tensor
    """(N,) int64: the position of each real token in the flattened batch (B T,)."""
    cu_seqlens: Tensor
    """(B + 1,) int32: the cumulative lengths."""


def packing_of(lengths: Tensor, context_length: int) -> Packing:
    """Return the packing of a batch (B, context_length) with these lengths (B,), on their device.

    On a GPU this waits for the device, because N is a size of the result.
    """
    real = torch.arange(context_length, device=lengths.device) < lengths[:, None]
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return Packing(real.flatten().nonzero().squeeze(1), cu_seqlens)


class Block(nn.Module):
    """A pre-LayerNorm block: attention, then an MLP."""

    def __init__(self, config: EncoderConfig, attention: str):
        super().__init__()
        width = config.n_embd
        self.n_head = config.n_head
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projection, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attention = build_attention(attention, config)
        self.mlp = nn.Sequential(nn.Linear(width, config.hidden), nn.GELU(), nn.Linear(config.hidden, width))

    def forward(self, x: Tensor, **options) -> Tensor:
        """Return x (B, T, C) after the block. `options` go to the attention."""
        q, k, v = self.projection(self.norm1(x)).unflatten(2, (3, self.n_head, -1)).unbind(2)
        with torch.autocast(x.device.type, enabled=False):
            attended = self.attention(q, k, v, **options)
        x = x + self.out(attended.flatten(2))
        return x + self.mlp(self.norm2(x))


class Classifier(nn.Module):
    """An encoder with one of the attentions of bench.lra.attentions, mean pooling and a head."""

    def __init__(self, config: EncoderConfig, attention: str):
        super().__init__()
        self.config, self.unpadded = config, attention == UNPADDED
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.context_length, config.n_embd)
        for table in self.tokens, self.positions:
            nn.init.normal_(table.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd)
        pooled = config.n_embd * (4 if config.pairs else 1)
        self.head = nn.Sequential(nn.Linear(pooled, config.hidden), nn.ReLU(), nn.Linear(config.hidden, config.classes))

    def forward(self, tokens: Tensor, lengths: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        """Return the logits, (B, classes) fp32.

        Args:
            tokens: (B, T) int64, with zeros after the real tokens. With pairs (2 B, T): documents 2 i and 2 i + 1 are
                a pair.
            lengths: the real tokens of each sequence, at least 1, (B,) int32, on the tokens' device; T by default. The
                pooling leaves out the padding. Attention sees the padding, except with flash2_unpadded.
            packing: packing_of(lengths, T), which only flash2_unpadded uses. By default it is computed here, and that
                waits for the device. CUDA graphs need this argument.
        """
        if self.unpadded:
            if packing is None:
                full = tokens.new_full(tokens.shape[:1], tokens.shape[1], dtype=torch.int32)
                packing = packing_of(full if lengths is None else lengths, tokens.shape[1])
            x = self._encode_packed(tokens, packing)
        else:
            x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
        pooled = _mean(self.norm(x), lengths)
        if self.config.pairs:
            a, b = pooled[0::2], pooled[1::2]
            pooled = torch.cat([a, b, a * b, a - b], 1)
        return self.head(pooled.to(self.norm.weight.dtype)).float()

    def _encode_packed(self, tokens: Tensor, packing: Packing) -> Tensor:
        """Return (B, T, C), where only the real tokens went through the blocks. The padding is zero."""
        batch, length = tokens.shape
        x = (self.tokens(tokens.flatten()[packing.index]) + self.positions(packing.index % length))[None]
        for block in self.blocks:
            x = block(x, cu_seqlens=packing.cu_seqlens)
        padded = x.new_zeros(batch * length, x.shape[2]).index_copy(0, packing.index, x[0])
        return padded.view(batch, length, -1)


def _mean(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Return the mean (B, C) in fp32 over the first `lengths` (B,) tokens of x (B, T, C)."""
    if lengths is None:
        return x.mean(1, dtype=wide_type(x))
    real = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    return torch.where(real[:, :, None], x, 0).sum(1, dtype=wide_type(x)) / lengths[:, None]
