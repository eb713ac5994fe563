"""GPT-2 (Radford et al., 2019): pre-LayerNorm, learned positions, tanh-GELU, biases everywhere, tied head.

B batch, T sequence, C embedding, H heads, G key/value heads, D head size, V vocabulary. Modules are named as in the
released weights.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from errors import UserError, check_range, check_rate
from kernels.cross_entropy import linear_cross_entropy
from kernels.layer_norm import normalise
from model.attention import Attention, split_projection
from model.checkpointing import checkpointed
from model.linear import Linear, gelu_mlp

PAD_VOCABULARY_TO = 64
# Far larger than any model that trains. Beyond these sizes torch overflows or creates layers for hours.
LARGEST = {"n_layer": 10_000, "n_head": 2**20, "n_embd": 2**20, "context_length": 2**31, "vocab_size": 2**31}
CHECKPOINTING = "none", "selective", "full"  # of activations


@dataclass
class ModelConfig:
    """The shape of a GPT-2 (group `model`)."""

    n_layer: int = 12
    """Transformer blocks."""
    n_head: int = 12
    """Attention heads; n_embd must be a multiple of n_head."""
    n_kv_head: int | None = None
    """Heads of keys and values. n_head / n_kv_head query heads share each of them; 1 is multi-query attention. null is
    n_head: a head of keys and values for each query head."""
    n_embd: int = 768
    """Width of the residual stream."""
    context_length: int = 1024
    """Longest sequence, in tokens: rows of the position table."""
    vocab_size: int | None = None
    """Tokens that the model knows; null takes the tokenizer's. The table is padded to a multiple of 64."""
    dropout: float = 0.0
    """Dropout rate in training of embeddings, attention probabilities and residual branches, in [0, 1)."""
    pretrained: str | None = None
    """Weights to start from: a Hugging Face GPT-2, as a folder with model.safetensors or as a hub id such as gpt2, or a
    checkpoint or run of this trainer. The model takes the shape of these weights, whatever the preset of `model`, but
    keeps its own dropout and its own context_length, which may be shorter."""

    def __post_init__(self):
        for key, largest in LARGEST.items():
            check_range(f"model.{key}", getattr(self, key), 1, largest)
        if self.n_embd % self.n_head:
            raise UserError(
                f"model.n_embd={self.n_embd} is not a multiple of model.n_head={self.n_head}; give a multiple, such as "
                f"{max(1, round(self.n_embd / self.n_head)) * self.n_head}"
            )
        if self.n_kv_head is not None and (self.n_kv_head < 1 or self.n_head % self.n_kv_head):
            *others, last = [str(heads) for heads in range(1, self.n_head + 1) if self.n_head % heads == 0]
            raise UserError(
                f"model.n_kv_head={self.n_kv_head} does not divide model.n_head={self.n_head}; use "
                f"{', '.join(others)}{' or ' if others else ''}{last}"
            )
        check_rate("model.dropout", self.dropout)

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def groups(self) -> int:
        """Query heads that share a head of keys and values."""
        return self.n_head // self.kv_heads

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / PAD_VOCABULARY_TO) * PAD_VOCABULARY_TO


class KeyValueCache:
    """Keys and values of the tokens so far, (B, context_length, G, D) per layer, filled from the front."""

    def __init__(self, config: ModelConfig, batch: int, device: torch.device, dtype: torch.dtype):
        shape = (config.n_layer, 2, batch, config.context_length, config.kv_heads, config.head_dim)
        self.kv = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store this layer's new keys and values (B, T, G, D) and return all of them so far."""
        stop = self.length + k.shape[1]
        self.kv[layer, 0, :, self.length : stop] = k
        self.kv[layer, 1, :, self.length : stop] = v
        return self.kv[layer, 0, :, :stop], self.kv[layer, 1, :, :stop]


class Branch(nn.Module):
    """A branch of the residual stream: attention or MLP.

    The last product (c_proj) adds its result to the stream itself, unless dropout comes between. The product does not
    compute the gradient of its bias. The next LayerNorm does, and gets the bias as added_bias.
    """

    c_proj: Linear
    dropout: nn.Dropout

    @property
    def drops(self) -> bool:
        return self.training and self.dropout.p > 0

    @property
    def added_bias(self) -> Tensor | None:
        return None if self.drops else self.c_proj.bias

    def end(self, product: Callable[..., Tensor], stream: Tensor) -> Tensor:
        """Return the stream plus the result of product(bias, tensor to add to), (B, T, C)."""
        if self.drops:
            return stream + self.dropout(product(self.c_proj.bias, None))
        return product(self.c_proj.bias.detach(), stream)


class SelfAttention(Branch):
    def __init__(self, config: ModelConfig, attention: Attention, layer: int, fp8: bool):
        super().__init__()
        self.heads, self.layer, self.attention = (config.n_head, config.kv_heads), layer, attention
        self.c_attn = Linear(config.n_embd, (config.n_head + 2 * config.kv_heads) * config.head_dim, fp8)
        self.c_proj = Linear(config.n_embd, config.n_embd, fp8)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, stream: Tensor, cache: KeyValueCache | None, cu_seqlens: Tensor | None) -> Tensor:
        """Return the stream plus the attention of x, the stream's LayerNorm; all are (B, T, C)."""
        B, T, C = x.shape
        # A single query is the last token, which sees all keys.
        options = {"causal": T > 1, "scale": 1 / math.sqrt(C // self.heads[0])}
        options["dropout_p"] = self.dropout.p if self.training else 0.0
        if cu_seqlens is not None:
            options["cu_seqlens"] = cu_seqlens
        if cache is None:
            y = self.attention.projected(x, self.c_attn, *self.heads, **options)
        else:
            q, k, v = split_projection(self.c_attn(x), *self.heads)
            y = self.attention(q, *cache.extend(self.layer, k, v), **options)
        return self.end(partial(self.c_proj.product, y.reshape(B, T, C)), stream)


class MLP(Branch):
    def __init__(self, config: ModelConfig, fp8: bool):
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd, fp8)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd, fp8)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, stream: Tensor, keep_output: bool = True) -> Tensor:
        """Return the stream plus the MLP of x, the stream's LayerNorm; all are (B, T, C).

        Without keep_output the backward pass recomputes GELU's output, which halves the saved memory.
        """
        return self.end(partial(gelu_mlp, x, self.c_fc, self.c_proj, keep_output=keep_output), stream)


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor, added_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x (B, T, C), the residual stream, and its LayerNorm: see kernels.layer_norm.normalise."""
        return normalise(x, self.weight, self.bias, self.eps, added_bias)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, attention: Attention, layer: int, activation_checkpointing: str, fp8: bool):
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        self.ln_1 = LayerNorm(config.n_embd)
        self.attn = SelfAttention(config, attention, layer, fp8)
        self.ln_2 = LayerNorm(config.n_embd)
        self.mlp = MLP(config, fp8)

    def forward(self, *inputs) -> tuple[Tensor, Tensor | None]:
        """Call `_forward`. With full activation checkpointing, save no activations for the backward pass."""
        if self.activation_checkpointing != "full" or not torch.is_grad_enabled():
            return self._forward(*inputs)
        return checkpointed(self._forward, *inputs, drops=self.attn.drops)

    def _forward(
        self, x: Tensor, added_bias: Tensor | None, cache: KeyValueCache | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream and the added bias that the next LayerNorm needs."""
        x, normalised = self.ln_1(x, added_bias)
        x = self.attn(normalised, x, cache, cu_seqlens)
        x, normalised = self.ln_2(x, self.attn.added_bias)
        x = self.mlp(normalised, x, keep_output=self.activation_checkpointing != "selective")
        added_bias = self.mlp.added_bias
        # Copy the bias: FSDP2 frees the parameters of a block that has returned.
        return x, None if added_bias is None else added_bias.clone()


class GPT2(nn.Module):
    """A GPT-2 with a given attention. The token table is also the head.

    With full activation checkpointing (Chen et al., 2016) the backward pass recomputes each block except its attention.
    A layer then keeps two tensors of the residual stream's size instead of about sixteen. Selective checkpointing
    recomputes only GELU's output, which has the size of four such tensors.
    """

    def __init__(
        self, config: ModelConfig, attention: Attention, activation_checkpointing: str = "none", fp8: bool = False
    ):
        """Create random weights. With fp8, the linear layers of the blocks multiply in FP8 while the model trains."""
        super().__init__()
        self.config, self.attention = config, attention
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.context_length, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        blocks = (Block(config, attention, layer, activation_checkpointing, fp8) for layer in range(config.n_layer))
        self.h = nn.ModuleList(blocks)
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        """Draw normal weights of deviation 0.02, and for c_proj of 0.02 / sqrt(2 n_layer). Biases are zero."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
        if isinstance(module, (SelfAttention, MLP)):
            nn.init.normal_(module.c_proj.weight, std=0.02 / math.sqrt(2 * self.config.n_layer))

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        cache: KeyValueCache | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Return the mean cross-entropy in nats for targets (B, T), or without targets the logits (B, T, vocab_size).

        With a cache, tokens (B, T) continue the tokens in the cache, which grows by T. With cu_seqlens, the cumulative
        lengths of documents, each document attends to itself alone. Positions still count from the sequence's start.
        """
        start = cache.length if cache is not None else 0
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        # A step reads and writes the residual stream about 4 n_layer times: with autocast in 16 bits.
        x = self.drop(in_autocast_dtype(self.wte(tokens) + self.wpe(positions)))
        added_bias = None
        for block in self.h:
            x, added_bias = block(x, added_bias, cache, cu_seqlens)
        if cache is not None:
            cache.length += tokens.shape[1]
        # The last bias gets its gradient from an addition of zero, which is fused with torch's LayerNorm. Our LayerNorm
        # is an opaque operator. With it, torch 2.11's compiler would find nothing to fuse between the operators of the
        # blocks and of the loss, and describe all unfused operators in text: its time doubles with each block.
        if added_bias is not None:
            x = x + (added_bias - added_bias.detach()).to(x.dtype)
        x = self.ln_f(x)
        if targets is not None:
            return cross_entropy(x, self.wte.weight, targets, self.config.vocab_size)
        return F.linear(x, self.wte.weight)[..., : self.config.vocab_size]

    def n_params(self) -> int:
        """Return the number of parameters without the position table: the N of 6 N FLOPs per token."""
        return sum(p.numel() for p in self.parameters()) - self.wpe.weight.numel()


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Return the mean cross-entropy of the next tokens in nats, an fp32 scalar.

    hidden (B, T, C), weight (padded V, C), targets (B, T) below vocab_size. Negative targets do not count. The rows of
    `weight` from vocab_size on are padding: the softmax ignores them. Logits have autocast's dtype if autocast is on.
    """
    return linear_cross_entropy(in_autocast_dtype(hidden).flatten(0, 1), weight, targets.flatten(), vocab_size)


def in_autocast_dtype(x: Tensor) -> Tensor:
    """Return x in autocast's dtype if autocast is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
