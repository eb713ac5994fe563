"""flash2 with pairs of tokens left out: a sliding window, or a pattern of blocks."""

from dataclasses import dataclass
from os.path import realpath
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from errors import UserError, check_range
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
            raise ValueError("causal=False does not suit attention=local, which looks back only; use attention=flash2")
        return flash2(q, k, v, causal=True, window=self.window, deterministic=self.deterministic, **options)

    def kept_share(self, seq_len: int) -> float:
        window = min(self.window, seq_len)
        return (window * (window + 1) // 2 + (seq_len - window) * window) / _causal_pairs(seq_len)


class BlockSparse(Attention):
    """flash2 that computes only the blocks of 128 queries by 128 keys that a pattern keeps.

    `pattern` is butterfly, or a .npy file of a square boolean matrix with one row per block of queries. A shorter
    sequence takes the first rows and columns.
    """

    def __init__(self, pattern: str, deterministic: bool | None = None):
        self.pattern, self.deterministic = pattern, deterministic
        if pattern != "butterfly":
            restored = _of_checkpoints.get(realpath(pattern))
            self.matrix = _read_matrix(pattern) if restored is None else restored
        self.cached_lists: dict[tuple, Tensor] = {}
        torch.compiler.assume_constant_result(BlockSparse.lists)  # here, because its import takes two seconds

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, cu_seqlens=None, **options) -> Tensor:
        seq_q, seq_k = q.shape[1], k.shape[1]
        options["deterministic"] = self.deterministic
        if seq_q == 1 < seq_k:  # the last token
            if cu_seqlens is not None:
                check_documents(q, k, cu_seqlens)
            seen = self.blocks(seq_k)[-1].repeat_interleave(BLOCK)[:seq_k].to(q.device)
            return flash2(q, k[:, seen], v[:, seen], causal=False, **options)
        if seq_q != seq_k:
            raise ValueError("attention=block_sparse takes one query, or as many queries as keys; use attention=flash2")
        kind = causal, cu_seqlens is not None, seq_q % BLOCK != 0
        blocks = Listed(self.lists(seq_q, q.device, *kind), *kind)
        return flash2(q, k, v, causal=causal, cu_seqlens=cu_seqlens, blocks=blocks, **options)

    def blocks(self, seq_len: int) -> Tensor:
        """Return which blocks of seq_len tokens are kept, (n, n) boolean on the CPU."""
        n = -(-seq_len // BLOCK)
        return butterfly(n) if self.matrix is None else self.matrix[:n, :n]

    def lists(self, seq_len: int, device: torch.device, *kind: bool) -> Tensor:
        """Return the pattern as the kernels read it. torch.compile takes the result as a constant."""
        key = seq_len, device, kind
        if key not in self.cached_lists:
            self.cached_lists[key] = listed(self.blocks(seq_len), *kind).to(device).lists
        return self.cached_lists[key]

    def kept_share(self, seq_len: int) -> float:
        sizes = (seq_len - torch.arange(0, seq_len, BLOCK)).clamp(max=BLOCK)  # tokens per block: the last may be ragged
        pairs = (sizes[:, None] * sizes).tril(-1) + (sizes * (sizes + 1) // 2).diag()
        return pairs[self.blocks(seq_len)].sum().item() / _causal_pairs(seq_len)

    def check_length(self, context_length: int) -> None:
        n, blocks = -(-context_length // BLOCK), self.blocks(context_length)
        if len(blocks) < n:
            raise UserError(
                f"attention.pattern={self.pattern} has {len(blocks)} blocks of {BLOCK} tokens, but {context_length} "
                f"tokens need {n}; give a larger pattern or a shorter context"
            )
        if empty := [row for row in range(n) if not blocks[row, : row + 1].any()]:
            raise UserError(
                f"attention.pattern={self.pattern} keeps no block up to the diagonal in row {empty[0]}, so the tokens "
                "of the row would see nothing; keep at least the diagonal"
            )


def _causal_pairs(seq_len: int) -> int:
    return seq_len * (seq_len + 1) // 2


_of_checkpoints: dict[str, Tensor] = {}
"""The matrices of the checkpoints that this process continues or uses, by the path of their file."""


def restore_pattern(path: str, matrix: Tensor) -> bool:
    """Let attention.pattern=`path` mean the matrix of a checkpoint. Return whether the file holds another one now."""
    _of_checkpoints[realpath(path)] = matrix
    try:
        return Path(path).is_file() and not torch.equal(_read_matrix(path), matrix)
    except UserError:  # the file is not a matrix any more
        return True


def _read_matrix(path: str) -> Tensor:
    if not Path(path).is_file():
        raise UserError(f"attention.pattern={path} does not exist; give butterfly or a .npy file")
    try:
        matrix = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"attention.pattern={path} is not a .npy file; write one with numpy.save") from error
    if not isinstance(matrix, np.ndarray) or matrix.dtype != bool or matrix.ndim != 2 or len(set(matrix.shape)) > 1:
        raise UserError(f"attention.pattern={path} does not hold a square boolean matrix; save one with numpy.save")
    return torch.from_numpy(matrix)


@dataclass
class LocalConfig(AttentionConfig):
    """flash2 in a sliding window."""

    name: str = "local"
    window: int = 256
    """Keys that a query sees, including its own."""
    deterministic: bool = False
    """As for attention=flash2."""

    def __post_init__(self):
        super().__post_init__()
        check_range("attention.window", self.window, 1)

    @property
    def detail(self) -> str:
        return f"window {self.window}"

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

    @property
    def detail(self) -> str:
        return self.pattern

    def build(self) -> Attention:
        return BlockSparse(self.pattern, self.deterministic or None)
