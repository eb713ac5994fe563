"""flash2 with pairs of tokens left out: a sliding window, or a pattern of blocks."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from errors import UserError
from kernels.common.checks import check_documents
from kernels.flash2 import flash2
from kernels.flash2.block_lists import BLOCK, Listed, butterfly, listed
from model.attention.protocol import Attention, AttentionConfig


class Local(Attention):
    """flash2 in a sliding window: each query sees the last `window` keys up to its own."""

    def __init__(self, window: int, deterministic: bool | None = None):
        self.window, self.deterministic = window, deterministic

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **options) -> Tensor:
        if not causal and q.shape[1] > 1:  # a single query is the last token, which looks back anyway
            raise ValueError("attention=local looks back from each token and has to be causal; use attention=flash2")
        return flash2(q, k, v, causal=True, window=self.window, deterministic=self.deterministic, **options)

    def kept_share(self, seq_len: int) -> float:
        window = min(self.window, seq_len)
        return (window * (window + 1) // 2 + (seq_len - window) * window) / _causal_pairs(seq_len)


class BlockSparse(Attention):
    """flash2 that computes only the blocks of 128 queries by 128 keys that `pattern` keeps: see read_pattern."""

    def __init__(self, pattern: str, deterministic: bool | None = None):
        self.pattern, self.deterministic = pattern, deterministic
        torch.compiler.assume_constant_result(_block_lists)  # here, because the import behind it takes two seconds

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, cu_seqlens=None, **options) -> Tensor:
        seq_q, seq_k = q.shape[1], k.shape[1]
        options["deterministic"] = self.deterministic
        if seq_q == 1 < seq_k:  # the last token
            if cu_seqlens is not None:
                check_documents(q, k, cu_seqlens)
            seen = read_pattern(self.pattern, seq_k)[-1].repeat_interleave(BLOCK)[:seq_k].to(q.device)
            return flash2(q, k[:, seen], v[:, seen], causal=False, **options)
        if seq_q != seq_k:
            raise ValueError("attention=block_sparse needs as many queries as keys, or one; use attention=flash2")
        kind = causal, cu_seqlens is not None, seq_q % BLOCK != 0
        blocks = Listed(_block_lists(self.pattern, seq_q, *kind, q.device), *kind)
        return flash2(q, k, v, causal=causal, cu_seqlens=cu_seqlens, blocks=blocks, **options)

    def kept_share(self, seq_len: int) -> float:
        pattern = read_pattern(self.pattern, seq_len)
        sizes = (seq_len - torch.arange(0, seq_len, BLOCK)).clamp(max=BLOCK)  # tokens per block: the last may be ragged
        pairs = (sizes[:, None] * sizes).tril(-1) + (sizes * (sizes + 1) // 2).diag()
        return pairs[pattern].sum().item() / _causal_pairs(seq_len)

    def check_length(self, context_length: int) -> None:
        read_pattern(self.pattern, context_length)


def _causal_pairs(seq_len: int) -> int:
    return seq_len * (seq_len + 1) // 2


def _block_lists(*kind) -> Tensor:
    """Return the pattern as the kernels read it. torch.compile takes the result as a constant."""
    return _cached_block_lists(*kind)


@cache
def _cached_block_lists(
    pattern: str, seq_len: int, causal: bool, documents: bool, ragged: bool, device: torch.device
) -> Tensor:
    return listed(read_pattern(pattern, seq_len), causal, documents, ragged).to(device).lists


def read_pattern(pattern: str, seq_len: int) -> Tensor:
    """Return which blocks of seq_len tokens are kept, (n, n) boolean on the CPU.

    `pattern` is butterfly, or a .npy file of a square boolean matrix with one row per block of queries. A shorter
    sequence takes the first rows and columns.

    Raises:
        UserError: the file is missing, is not such a matrix, or has too few blocks.
    """
    n = -(-seq_len // BLOCK)
    if pattern == "butterfly":
        return butterfly(n)
    if not Path(pattern).is_file():
        raise UserError(f"attention.pattern={pattern} does not exist; give butterfly or a .npy file")
    try:
        matrix = np.load(pattern, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"attention.pattern={pattern} is not a .npy file; write one with numpy.save") from error
    if not isinstance(matrix, np.ndarray) or matrix.dtype != bool or matrix.ndim != 2 or len(set(matrix.shape)) > 1:
        raise UserError(f"attention.pattern={pattern} does not hold a square boolean matrix; save one with numpy.save")
    if len(matrix) < n:
        raise UserError(
            f"attention.pattern={pattern} has {len(matrix)} blocks of {BLOCK} tokens, but {seq_len} tokens need {n}; "
            "give a larger pattern or a shorter model.context_length"
        )
    return torch.from_numpy(matrix[:n, :n].copy())


@dataclass
class LocalConfig(AttentionConfig):
    """flash2 in a sliding window."""

    name: str = "local"
    window: int = 256
    """Keys that a query sees, including its own."""
    deterministic: bool = False
    """As for attention=flash2."""
    sparse_setting = "window"

    def __post_init__(self):
        super().__post_init__()
        if self.window < 1:
            raise UserError(f"attention.window={self.window} must be at least 1")

    def build(self) -> Attention:
        return Local(self.window, self.deterministic or None)


@dataclass
class BlockSparseConfig(AttentionConfig):
    """flash2 that computes only some blocks of 128 by 128 tokens."""

    name: str = "block_sparse"
    pattern: str = "butterfly"
    """butterfly, or a .npy file of a boolean matrix of blocks of 128 tokens."""
    deterministic: bool = False
    """As for attention=flash2."""
    sparse_setting = "pattern"

    def build(self) -> Attention:
        return BlockSparse(self.pattern, self.deterministic or None)
