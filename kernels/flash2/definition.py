"""FlashAttention-2 in plain PyTorch: the tiled algorithm that the Triton kernels implement. It runs on a CPU.

Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023), Algorithm 1 (forward)
and Algorithm 2 (backward), in the paper's notation, for all batches and heads at once. The forward pass keeps only the
output and the logsumexp; the backward pass recomputes the probabilities tile by tile.

B batch, T query length, S key length, H query heads, G key/value heads, D head size.
"""

import torch
from torch import Tensor

from kernels.common.dropout import keep_mask
from kernels.common.dtypes import accumulator
from kernels.common.tiling import NEG_INF, Visibility, cut, heads_first, tiles
from kernels.flash2.block_lists import BLOCK, HEADER
from kernels.flash2.options import Options

TILE = 128  # divides BLOCK


class BlockVisibility(Visibility):
    """The keys that each query sees, without the blocks that a block-sparse pattern leaves out."""

    def __init__(self, q: Tensor, k: Tensor, options: Options):
        super().__init__(q.shape[1], k.shape[1], q.device, options.documents, options.causal, options.window)
        rows = None if options.blocks is None else options.blocks.tolist()
        self.kept = rows and [row[HEADER : HEADER + row[3]] for row in rows]  # of block i of queries in entry i

    def overlap(self, rows: range, cols: range) -> bool:
        if self.kept is not None and cols.start // BLOCK not in self.kept[rows.start // BLOCK]:
            return False
        return super().overlap(rows, cols)


def forward(q: Tensor, k: Tensor, v: Tensor, *options) -> tuple[Tensor, Tensor]:
    """Run Algorithm 1: q (B, T, H, D), k and v (B, S, G, D) -> O (B, T, H, D) in q's dtype, logsumexp (B, H, T).

    The logsumexp L = m + log(l) is natural, in fp32, or fp64 for fp64 inputs. A query that sees no key gives O = 0 and
    L = -inf. Dropout acts on P after its row sum. `options` are the fields of Options.
    """
    options = Options(*options)
    dropout_p, numbers = options.dropout_p, options.numbers
    (batch, seq_q, heads, _), seq_k = q.shape, k.shape[1]
    visibility = BlockVisibility(q, k, options)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    logsumexp = q.new_empty((batch, heads, seq_q), dtype=accumulator(q.dtype))
    Q, K, V = (heads_first(x, heads) for x in (q, k, v))
    Q = Q * options.scale
    for rows in tiles(seq_q, TILE):
        Qi = cut(Q, rows)
        Oi = torch.zeros_like(Qi)
        m = Qi.new_full((*Qi.shape[:3], 1), NEG_INF)
        l = torch.zeros_like(m)
        for cols in tiles(seq_k, TILE):
            if not visibility.overlap(rows, cols):
                continue
            Kj, Vj = cut(K, cols), cut(V, cols)
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
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, dlogsumexp: Tensor | None,
    deterministic: bool, *options,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run Algorithm 2: return dQ, dK and dV in the inputs' shapes and dtypes, from dO (B, T, H, D) and dL (B, H, T).

    dL may be None. The derivative of the logsumexp by S is P, so dL adds P o dL to dS = P o (dP - D). The function
    therefore subtracts dL from D. The computation is always deterministic.
    """
    options = Options(*options)
    dropout_p, numbers = options.dropout_p, options.numbers
    (batch, seq_q, heads, head_dim), (seq_k, kv_heads) = q.shape, k.shape[1:3]
    visibility = BlockVisibility(q, k, options)
    Q, K, V, O, dO = (heads_first(x, heads) for x in (q, k, v, out, dout))
    Q = Q * options.scale  # S and dK then need no scaling; dQ does, at the end
    L = logsumexp.unsqueeze(-1)
    D = (dO * O).sum(-1, keepdim=True)
    if dlogsumexp is not None:
        D = D - dlogsumexp.unsqueeze(-1)
    dQ, dK, dV = torch.zeros_like(Q), torch.zeros_like(K), torch.zeros_like(V)
    for cols in tiles(seq_k, TILE):
        Kj, Vj = cut(K, cols), cut(V, cols)
        for rows in tiles(seq_q, TILE):
            if not visibility.overlap(rows, cols):
                continue
            Qi, dOi = cut(Q, rows), cut(dO, rows)
            P = visibility.hide((Qi @ Kj.mT).sub_(cut(L, rows)).exp_(), rows, cols, 0)
            dP = dOi @ Vj.mT
            kept = P
            if dropout_p:
                Z = keep_mask(numbers, seq_q, rows, cols, dropout_p) / (1 - dropout_p)
                kept, dP = P * Z, dP * Z
            cut(dV, cols).add_(kept.mT @ dOi)
            dS = dP.sub_(cut(D, rows)).mul_(P)
            cut(dQ, rows).add_(dS @ Kj)
            cut(dK, cols).add_(dS.mT @ Qi)

    groups = batch, kv_heads, heads // kv_heads, seq_k, head_dim
    grads = (dQ * options.scale, q), (dK.view(groups).sum(2), k), (dV.view(groups).sum(2), v)
    return tuple(grad.transpose(1, 2).to(x.dtype).contiguous() for grad, x in grads)


def backward_packed(dout: Tensor, qkv: Tensor, *args) -> tuple[Tensor, Tensor]:
    """Return the gradient of qkv (B, T, 3, H, D), and its sums over B and T; other arguments as in backward.

    The last argument says whether to compute the sums, (3, H, D) in fp32 or fp64. Otherwise they are empty.
    """
    *saved, with_sums = args
    dqkv = torch.stack(backward(dout, *qkv.unbind(2), *saved), dim=2)
    wide = accumulator(qkv.dtype)
    return dqkv, dqkv.sum((0, 1), dtype=wide) if with_sums else dqkv.new_empty(0, dtype=wide)
