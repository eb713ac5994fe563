"""FlashAttention-2 in plain PyTorch: the tiled algorithm the Triton kernels implement, and what runs on a CPU.

Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023), Algorithm 1 (forward)
and Algorithm 2 (backward), in the paper's notation, for all batches and heads at once. Only the output and the
logsumexp are kept from the forward pass; the backward pass recomputes the probabilities tile by tile.

B batch, T query length, S key length, H query heads, G key/value heads, D head size.
"""

import torch
from torch import Tensor

from kernels.dropout import keep_mask
from kernels.flash2.blocks import BLOCK

TILE = 128  # divides BLOCK
NEG_INF = float("-inf")


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _heads_first(x: Tensor, heads: int) -> Tensor:
    """(B, length, G, D) -> (B, H, length, D) in the accumulator's dtype, each key/value head repeated for its group."""
    x = x.transpose(1, 2).to(_accumulator(x.dtype))
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _tiles(length: int) -> list[range]:
    return [range(start, min(start + TILE, length)) for start in range(0, length, TILE)]


class _Visibility:
    """The keys [first, end) that each query sees; both (B or 1, T)."""

    def __init__(
        self, q: Tensor, k: Tensor, documents: Tensor | None, blocks: Tensor | None, causal: bool, window: int
    ):
        seq_q, seq_k = q.shape[1], k.shape[1]
        self.kept = None if blocks is None else [row[2 : 2 + row[1]] for row in blocks[0].tolist()]
        own = torch.arange(seq_q, device=q.device)[None] + seq_k - seq_q  # the key at a query's own place
        self.first, self.end = torch.zeros_like(own), torch.full_like(own, seq_k)
        if documents is not None:
            self.first, self.end = documents.long().unbind(1)
        if causal:
            self.end = torch.minimum(self.end, own + 1)
        if window:
            self.first = torch.maximum(self.first, own + 1 - window)

    def overlap(self, rows: range, cols: range) -> bool:
        """Whether any query of a tile may see any key of it."""
        if self.kept is not None and cols.start // BLOCK not in self.kept[rows.start // BLOCK]:
            return False
        first, end = self.first[:, rows.start : rows.stop], self.end[:, rows.start : rows.stop]
        return cols.start < end.max() and cols.stop > first.min()

    def hide(self, x: Tensor, rows: range, cols: range, value: float) -> Tensor:
        """x (B, H, rows, cols) with `value` in place of what the query does not see."""
        first, end = (bound[:, None, rows.start : rows.stop, None] for bound in (self.first, self.end))
        if first.max() <= cols.start and cols.stop <= end.min():
            return x
        j = torch.arange(cols.start, cols.stop, device=x.device)
        return x.masked_fill_((j < first) | (j >= end), value)


def _cut(x: Tensor, rows: range) -> Tensor:
    return x[..., rows.start : rows.stop, :]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    numbers: Tensor | None,
    documents: Tensor | None,
    blocks: Tensor | None,
    causal: bool,
    window: int,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Algorithm 1. q (B, T, H, D), k and v (B, S, G, D) -> O (B, T, H, D) in q's dtype, logsumexp (B, H, T).

    The logsumexp L = m + log(l) is natural and in the accumulator's dtype (fp32, or fp64 for fp64 inputs); a query that
    sees no key gives O = 0 and L = -inf. Causal masks align at the bottom right. Dropout acts on P after its row sum.
    The rest is explained in Options.
    """
    (batch, seq_q, heads, _), seq_k = q.shape, k.shape[1]
    visibility = _Visibility(q, k, documents, blocks, causal, window)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    logsumexp = q.new_empty((batch, heads, seq_q), dtype=_accumulator(q.dtype))
    Q, K, V = (_heads_first(x, heads) for x in (q, k, v))
    Q = Q * scale
    for rows in _tiles(seq_q):
        Qi = _cut(Q, rows)
        Oi = torch.zeros_like(Qi)
        m = Qi.new_full((*Qi.shape[:3], 1), NEG_INF)
        l = torch.zeros_like(m)
        for cols in _tiles(seq_k):
            if not visibility.overlap(rows, cols):
                continue
            Kj, Vj = _cut(K, cols), _cut(V, cols)
            S = visibility.hide(Qi @ Kj.mT, rows, cols, NEG_INF)
            m_new = torch.maximum(m, S.amax(-1, keepdim=True))
            shift = m_new.masked_fill(m_new == NEG_INF, 0)  # keeps exp(-inf - -inf) from being NaN
            P = S.sub_(shift).exp_()
            alpha = torch.exp(m - shift)
            l = alpha * l + P.sum(-1, keepdim=True)
            if dropout_p:
                P = P * keep_mask(numbers, seq_q, rows, cols, dropout_p)
            Oi = alpha * Oi + P @ Vj
            m = m_new
        Oi = Oi / l.masked_fill(l == 0, 1) / (1 - dropout_p)
        out[:, rows.start : rows.stop] = Oi.transpose(1, 2).to(out.dtype)
        logsumexp[:, :, rows.start : rows.stop] = (m + l.log()).squeeze(-1)
    return out, logsumexp


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dlogsumexp: Tensor | None,
    deterministic: bool,
    numbers: Tensor | None,
    documents: Tensor | None,
    blocks: Tensor | None,
    causal: bool,
    window: int,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2. Gradients of q, k and v, shaped and typed like them, from dO (B, T, H, D) and dL (B, H, T), if any.

    As dL / dS = P, the gradient of the logsumexp adds P o dL to dS = P o (dP - D), and so comes off D.
    What is computed here is always deterministic.
    """
    (batch, seq_q, heads, head_dim), (seq_k, kv_heads) = q.shape, k.shape[1:3]
    visibility = _Visibility(q, k, documents, blocks, causal, window)
    Q, K, V, O, dO = (_heads_first(x, heads) for x in (q, k, v, out, dout))
    Q = Q * scale  # so that S needs no scaling, nor dK; dQ does, at the end
    L = logsumexp.unsqueeze(-1)
    D = (dO * O).sum(-1, keepdim=True)
    if dlogsumexp is not None:
        D = D - dlogsumexp.unsqueeze(-1)
    dQ, dK, dV = torch.zeros_like(Q), torch.zeros_like(K), torch.zeros_like(V)
    for cols in _tiles(seq_k):
        Kj, Vj = _cut(K, cols), _cut(V, cols)
        for rows in _tiles(seq_q):
            if not visibility.overlap(rows, cols):
                continue
            Qi, dOi = _cut(Q, rows), _cut(dO, rows)
            P = visibility.hide((Qi @ Kj.mT).sub_(_cut(L, rows)).exp_(), rows, cols, 0)
            dP = dOi @ Vj.mT
            kept = P
            if dropout_p:
                Z = keep_mask(numbers, seq_q, rows, cols, dropout_p) / (1 - dropout_p)
                kept, dP = P * Z, dP * Z
            _cut(dV, cols).add_(kept.mT @ dOi)
            dS = dP.sub_(_cut(D, rows)).mul_(P)
            _cut(dQ, rows).add_(dS @ Kj)
            _cut(dK, cols).add_(dS.mT @ Qi)

    def per_kv_head(grad: Tensor) -> Tensor:
        return grad.view(batch, kv_heads, heads // kv_heads, seq_k, head_dim).sum(2)

    grads = (dQ * scale, q), (per_kv_head(dK), k), (per_kv_head(dV), v)
    return tuple(grad.transpose(1, 2).to(x.dtype).contiguous() for grad, x in grads)


def backward_packed(dout: Tensor, qkv: Tensor, *args) -> Tensor:
    """As backward, but from qkv (B, T, 3, H, D) to its gradient."""
    return torch.stack(backward(dout, *qkv.unbind(2), *args), dim=2)
