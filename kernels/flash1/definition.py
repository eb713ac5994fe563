"""FlashAttention in plain PyTorch: the definition of the Triton kernels, and the CPU's path.

Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness" (2022), Algorithm 1 with the
masks and dropout of Algorithm 2 (forward) and Algorithm 4 (backward), in the paper's notation, for all batches and
heads at once. The outer loop is over tiles of K and V, the inner one over tiles of Q. O and the statistics l and m are
rewritten for every tile.

B batch, T query length, S key length, H query heads, G key/value heads, D head size.
"""

import torch
from torch import Tensor

from kernels.common.dropout import keep_mask
from kernels.common.tiling import NEG_INF, Visibility, cut, heads_first, tiles

TILE = 128


def forward(q: Tensor, k: Tensor, v: Tensor, *options) -> tuple[Tensor, Tensor, Tensor]:
    """Return O (B, T, H, D) in q's dtype, and l and m (B, H, T) in fp32 or more.

    q is (B, T, H, D); k and v are (B, S, G, D). m is the row maximum of S, and l the row sum of exp(S - m). A query
    without keys gives O = 0, l = 0 and m = -inf. flash2's Options explains the options.
    """
    numbers, documents, causal, scale, dropout_p = options
    (batch, seq_q, heads, _), seq_k = q.shape, k.shape[1]
    visibility = Visibility(seq_q, seq_k, q.device, documents, causal)
    Q, K, V = (heads_first(x, heads) for x in (q, k, v))
    O = torch.zeros_like(Q)
    l = Q.new_zeros((batch, heads, seq_q, 1))
    m = torch.full_like(l, NEG_INF)
    for cols in tiles(seq_k, TILE):
        Kj, Vj = cut(K, cols), cut(V, cols)
        for rows in tiles(seq_q, TILE):
            if not visibility.overlap(rows, cols):
                continue
            Oi, li, mi = cut(O, rows), cut(l, rows), cut(m, rows)  # views of O, l and m
            S = visibility.hide(scale * cut(Q, rows) @ Kj.mT, rows, cols, NEG_INF)
            m_new = torch.maximum(mi, S.amax(-1, keepdim=True))
            shift = m_new.masked_fill(m_new == NEG_INF, 0)  # keeps exp(-inf - -inf) from being NaN
            P = torch.exp(S - shift)
            old = torch.exp(mi - shift) * li
            l_new = old + P.sum(-1, keepdim=True)
            if dropout_p:
                P = P * keep_mask(numbers, seq_q, rows, cols, dropout_p) / (1 - dropout_p)
            Oi.copy_((old * Oi + P @ Vj) / l_new.masked_fill(l_new == 0, 1))
            li.copy_(l_new)
            mi.copy_(m_new)
    return O.transpose(1, 2).to(q.dtype).contiguous(), l.squeeze(-1), m.squeeze(-1)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, l: Tensor, m: Tensor, *options
) -> tuple[Tensor, Tensor, Tensor]:
    """Run Algorithm 4: return the gradients of q, k and v, shaped and typed like them. Every tile rewrites dQ."""
    numbers, documents, causal, scale, dropout_p = options
    (batch, seq_q, heads, head_dim), (seq_k, kv_heads) = q.shape, k.shape[1:3]
    visibility = Visibility(seq_q, seq_k, q.device, documents, causal)
    Q, K, V, O, dO = (heads_first(x, heads) for x in (q, k, v, out, dout))
    dQ, dK, dV = torch.zeros_like(Q), torch.zeros_like(K), torch.zeros_like(V)
    l, m = l.unsqueeze(-1), m.unsqueeze(-1)
    for cols in tiles(seq_k, TILE):
        Kj, Vj = cut(K, cols), cut(V, cols)
        for rows in tiles(seq_q, TILE):
            if not visibility.overlap(rows, cols):
                continue
            Qi, dOi, Oi, li = cut(Q, rows), cut(dO, rows), cut(O, rows), cut(l, rows)
            S = scale * Qi @ Kj.mT
            P = visibility.hide(torch.exp(S - cut(m, rows)) / li, rows, cols, 0)
            dP, kept = dOi @ Vj.mT, P
            if dropout_p:
                Z = keep_mask(numbers, seq_q, rows, cols, dropout_p) / (1 - dropout_p)
                dP, kept = dP * Z, P * Z
            cut(dV, cols).add_(kept.mT @ dOi)
            dS = P * (dP - (dOi * Oi).sum(-1, keepdim=True))
            cut(dQ, rows).add_(scale * dS @ Kj)
            cut(dK, cols).add_(scale * dS.mT @ Qi)
    groups = batch, kv_heads, heads // kv_heads, seq_k, head_dim
    grads = (dQ, q), (dK.view(groups).sum(2), k), (dV.view(groups).sum(2), v)
    return tuple(grad.transpose(1, 2).to(x.dtype).contiguous() for grad, x in grads)
