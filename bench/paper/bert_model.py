"""BERT (Devlin et al., 2019) for masked language modelling, with any attention of model.attention, and its batches.

Blocks have LayerNorm after each branch and tanh-GELU, as in the authors' code. The model has no dropout, no segments,
no next-sentence loss, and no bias in the last layer, whose weight is the token table.

A batch is padded or unpadded. Padded, all sequences have context_length tokens, and no token attends to padding.
Unpadded, the model gets only the real tokens, as one sequence.

b and t are the rows and columns of a batch's tokens. Padded, they are the B sequences and their T tokens. Unpadded,
they are 1 and the number N of real tokens. M is the number of masked tokens, and C the embedding width.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import Attention, split_projection
from model.gpt2 import PAD_VOCABULARY_TO, cross_entropy, in_autocast_dtype
from model.linear import Linear, gelu_mlp
from trainer.flops import model_flops_per_token

MASKED_SHARE, MASK_TOKEN = 0.15, 103  # BERT's [MASK]
LENGTHS = {0: 5, 0.1: 48, 0.2: 70, 0.3: 100, 0.4: 143, 0.5: 204, 0.6: 288, 0.7: 407, 0.766: 512, 1: 512}
"""Quantiles of the lengths of the 16,279,552 sequences of MLPerf's Wikipedia set at a context of 512, from the
histogram of Krell et al., "Efficient Sequence Packing without Cross-contamination" (2021). The mean is 256."""


@dataclass(frozen=True)
class BertConfig:
    """The shape of the model. The default is BERT-large."""

    n_layer: int = 24
    n_head: int = 16
    n_embd: int = 1024
    context_length: int = 512
    vocab_size: int = 30522

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


class Batch(NamedTuple):
    """Tokens with 15 % of each sequence masked, and the sequences' places in them."""

    tokens: Tensor
    """(b, t) int64."""
    positions: Tensor
    """(b, t) int64, the position of each token in its sequence."""
    cu_seqlens: Tensor
    """Cumulative lengths of what attention separates, int32. In padded sequences, padding is a document too."""
    shape: tuple[int, int]
    """B and T."""
    places: Tensor | None
    """(N,) int64, the places of the tokens among B T padded ones, if attention must pad. None if not."""
    masked: Tensor
    """(M,) int64, the places of the masked tokens among the b t tokens."""
    targets: Tensor
    """(M,) int64, the tokens before masking."""


def draw_lengths(batch: int, context_length: int) -> list[int]:
    """Return the lengths of `batch` sequences, evenly spaced quantiles of LENGTHS in random order."""
    quantiles = (np.arange(batch) + 0.5) / batch
    lengths = np.interp(quantiles, list(LENGTHS), list(LENGTHS.values())) * context_length / LENGTHS[1]
    return np.random.default_rng(0).permutation(lengths.round().clip(1).astype(int)).tolist()


def draw_batch(config: BertConfig, lengths: list[int], device: str, *, padded: bool, pads: bool) -> Batch:
    """Return a batch of random tokens, the same whether or not it is padded.

    `pads` says that attention pads unpadded sequences again.
    """
    generator = torch.Generator().manual_seed(0)
    shape = len(lengths), config.context_length
    originals = torch.randint(config.vocab_size, shape, generator=generator)
    positions = torch.arange(config.context_length).repeat(len(lengths), 1)
    is_real = positions < torch.tensor(lengths)[:, None]
    counts = torch.tensor([masked_tokens(length) for length in lengths])
    order = torch.rand(shape, generator=generator).masked_fill(~is_real, 2.0).argsort(1)  # real tokens first
    is_masked = order.argsort(1) < counts[:, None]
    tokens = originals.masked_fill(is_masked, MASK_TOKEN).masked_fill(~is_real, 0)
    targets, places = originals[is_masked], None
    if not padded:
        places = is_real.flatten().nonzero().flatten() if pads else None
        tokens, positions, is_masked = (x[is_real][None] for x in (tokens, positions, is_masked))
    documents = [part for length in lengths for part in (length, config.context_length - length)]
    ends = torch.tensor([0, *(documents if padded or pads else lengths)]).cumsum(0).to(torch.int32)
    masked = is_masked.flatten().nonzero().flatten()
    tokens, positions, ends, masked, targets = (x.to(device) for x in (tokens, positions, ends, masked, targets))
    return Batch(tokens, positions, ends, shape, None if places is None else places.to(device), masked, targets)


def masked_tokens(length: int) -> int:
    """Return the number of masked tokens of a sequence, at least 1."""
    return max(1, math.floor(MASKED_SHARE * length))


def step_flops(config: BertConfig, lengths: list[int]) -> int:
    """Return the FLOPs of a training step on real tokens, by the count of trainer.flops. Padding does not count."""
    width, layers = config.n_embd, config.n_layer
    of_tokens = (n * model_flops_per_token(12 * layers * width**2, layers, width, n) for n in lengths)
    return sum(of_tokens) + 6 * (width**2 + config.vocab_size * width) * sum(map(masked_tokens, lengths))


class LayerNorm(nn.LayerNorm):
    """LayerNorm with the result in autocast's dtype: the residual stream has 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return in_autocast_dtype(super().forward(x))


class Block(nn.Module):
    """Attention and MLP, each followed by the sum with its input and LayerNorm."""

    def __init__(self, config: BertConfig, attention: Attention):
        super().__init__()
        width = config.n_embd
        self.heads, self.scale, self.attention = config.n_head, config.head_dim**-0.5, attention
        self.c_attn, self.c_proj = Linear(width, 3 * width), Linear(width, width)
        self.c_fc, self.c_out = Linear(width, 4 * width), Linear(4 * width, width)
        self.ln_1, self.ln_2 = LayerNorm(width, eps=1e-12), LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the block's output for x, both (b, t, C)."""
        x = self.ln_1(self.c_proj.product(self.attend(x, batch), self.c_proj.bias, x))
        return self.ln_2(gelu_mlp(x, self.c_fc, self.c_out, self.c_out.bias, x, keep_output=True))

    def attend(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the attention of x before the last product, (b, t, C)."""
        options = {"causal": False, "scale": self.scale, "cu_seqlens": batch.cu_seqlens}
        if batch.places is None:
            return self.attention.projected(x, self.c_attn, self.heads, self.heads, **options).reshape(x.shape)
        (count, length), projected = batch.shape, self.c_attn.product(x, self.c_attn.bias)[0]
        padded = projected.new_zeros(count * length, projected.shape[1]).index_copy(0, batch.places, projected)
        parts = split_projection(padded.view(count, length, -1), self.heads, self.heads)
        return self.attention(*parts, **options).flatten(0, 1).index_select(0, batch.places).reshape(x.shape)


class Bert(nn.Module):
    """A BERT with a given attention."""

    def __init__(self, config: BertConfig, attention: Attention):
        super().__init__()
        self.config = config
        rows = math.ceil(config.vocab_size / PAD_VOCABULARY_TO) * PAD_VOCABULARY_TO
        self.wte, self.wpe = nn.Embedding(rows, config.n_embd), nn.Embedding(config.context_length, config.n_embd)
        self.ln_0, self.ln_head = (LayerNorm(config.n_embd, eps=1e-12) for _ in range(2))
        self.h = nn.ModuleList(Block(config, attention) for _ in range(config.n_layer))
        self.head = Linear(config.n_embd, config.n_embd)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def hidden(self, batch: Batch) -> Tensor:
        """Return the last block's output, (b, t, C)."""
        x = self.ln_0(self.wte(batch.tokens) + self.wpe(batch.positions))
        for block in self.h:
            x = block(x, batch)
        return x

    def predicted(self, hidden: Tensor) -> Tensor:
        """Return what the token table multiplies to give logits, for the hidden states of masked tokens (M, C)."""
        return self.ln_head(F.gelu(self.head.product(hidden, self.head.bias), approximate="tanh"))

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of the masked tokens in nats, an fp32 scalar."""
        masked = self.hidden(batch).flatten(0, 1).index_select(0, batch.masked)
        return cross_entropy(self.predicted(masked)[None], self.wte.weight, batch.targets, self.config.vocab_size)
