"""Attention as the papers write it, in plain PyTorch: one head, no scale, matrices (N, d).

The numbers at the ends of lines are the line numbers of the papers' listings. The last tiles may be smaller. `watch` is
called with the state after every tile; the default does nothing. With `causal`, query i sees the keys j <= i, and tiles
without a visible pair are skipped.

Q, K, V (N, d); O output; S scores and P probabilities, (N, N) or a tile of them; m row maxima and l row sums of
exponentials, (N,); L logsumexp, (N,); B_r rows of a Q tile, counted by i; B_c rows of a K and V tile, counted by j.
"""

from collections.abc import Callable
from math import ceil

import torch
from torch import Tensor

Watch = Callable[..., None]
HIDDEN = -1e30  # finite: for -inf, the S - m of a row without a visible key would be NaN


def ignore(**state) -> None:
    """Do nothing: the default `watch`."""


def block_sizes(M: int, d: int) -> tuple[int, int]:
    """Return B_c and B_r for an on-chip memory of M elements: FlashAttention, Algorithm 1, line 1."""
    B_c = ceil(M / (4 * d))
    return B_c, min(B_c, d)


def standard_attention(Q: Tensor, K: Tensor, V: Tensor, watch: Watch = ignore) -> Tensor:
    """Run Algorithm 0 of FlashAttention (Dao et al., 2022): S and P, N x N each, go to memory."""
    S = Q @ K.T  # 1
    P = S.softmax(dim=1)  # 2
    O = P @ V  # 3
    watch(S=S, P=P, O=O)
    return O


def online_softmax(x: Tensor, watch: Watch = ignore) -> Tensor:
    """Run Algorithm 3 of Milakov and Gimelshein (2018): softmax of x (N,), with maximum and sum found in one pass.

    When the maximum m rises, the sum l shrinks by exp(m_old - m).
    """
    m, d = x.new_tensor(float("-inf")), x.new_tensor(0.0)  # 1, 2
    for j, x_j in enumerate(x):  # 3
        m_new = torch.maximum(m, x_j)  # 4
        d = d * torch.exp(m - m_new) + torch.exp(x_j - m_new)  # 5: the old sum is rescaled
        m = m_new
        watch(j=j, x=x_j, m=m, l=d)
    return torch.exp(x - m) / d  # 7, 8


Block = tuple[Tensor, Tensor, Tensor, Tensor]


def softmax_block(x: Tensor, V: Tensor) -> Block:
    """Return m, f, l and o of one block of a row of scores: FlashAttention, section 3.1. x (B,), V (B, d)."""
    m = x.max()
    f = torch.exp(x - m)
    l = f.sum()
    return m, f, l, f @ V / l


def merge(a: Block, b: Block) -> Block:
    """Merge two blocks of a row, as in section 3.1 of FlashAttention: softmax(x) is f / l.

    m is the maximum. exp(m_a - m) and exp(m_b - m) rescale f and l of the blocks. o is the mean weighted by l.
    """
    (m_a, f_a, l_a, o_a), (m_b, f_b, l_b, o_b) = a, b
    m = torch.maximum(m_a, m_b)
    r_a, r_b = torch.exp(m_a - m), torch.exp(m_b - m)
    l = r_a * l_a + r_b * l_b
    return m, torch.cat([r_a * f_a, r_b * f_b]), l, (r_a * l_a * o_a + r_b * l_b * o_b) / l


def is_hidden(i: int, j: int, B_r: int, B_c: int) -> bool:
    """Return whether every key of tile j comes after every query of tile i, so that a causal mask hides the tile."""
    return j * B_c >= (i + 1) * B_r


def mask(S: Tensor, i: int, j: int, B_r: int, B_c: int) -> Tensor:
    """Return the tile S_ij with HIDDEN in place of the scores of keys that come after their query."""
    query, key = i * B_r + torch.arange(S.shape[0]), j * B_c + torch.arange(S.shape[1])
    return S.masked_fill(key > query[:, None], HIDDEN)


def flash_attention(
    Q: Tensor, K: Tensor, V: Tensor, B_r: int, B_c: int, watch: Watch = ignore, causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Run Algorithm 1 of FlashAttention (Dao et al., 2022): outer loop over tiles of K and V, inner loop over Q's.

    O, l and m are in HBM. Every tile reads and rewrites them, and normalises O. Return O, l and m.
    """
    O = torch.zeros_like(Q)  # 2
    l, m = Q.new_zeros(len(Q)), Q.new_full((len(Q),), float("-inf"))
    for j, (K_j, V_j) in enumerate(zip(K.split(B_c), V.split(B_c), strict=True)):  # 5, 6
        tiles = zip(Q.split(B_r), O.split(B_r), l.split(B_r), m.split(B_r), strict=True)
        for i, (Q_i, O_i, l_i, m_i) in enumerate(tiles):  # 7, 8: views, so 12 and 13 write O, l, m
            if causal and is_hidden(i, j, B_r, B_c):
                continue
            S = Q_i @ K_j.T  # 9
            if causal:
                S = mask(S, i, j, B_r, B_c)
            m_tile = S.amax(1)  # 10
            P = torch.exp(S - m_tile[:, None])
            l_tile = P.sum(1)
            m_new = torch.maximum(m_i, m_tile)  # 11
            l_new = torch.exp(m_i - m_new) * l_i + torch.exp(m_tile - m_new) * l_tile
            old = (l_i * torch.exp(m_i - m_new))[:, None] * O_i
            O_i.copy_((old + torch.exp(m_tile - m_new)[:, None] * (P @ V_j)) / l_new[:, None])  # 12
            l_i.copy_(l_new)  # 13
            m_i.copy_(m_new)
            watch(i=i, j=j, S=S, m=m_i, l=l_i, O=O_i)
    return O, l, m


def flash_attention_backward(
    Q: Tensor, K: Tensor, V: Tensor, O: Tensor, dO: Tensor, l: Tensor, m: Tensor, B_r: int, B_c: int,
    watch: Watch = ignore, causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run Algorithm 4 of FlashAttention (Dao et al., 2022): outer loop over tiles of K and V. Return dQ, dK and dV.

    P is recomputed from l and m. dQ is in HBM; every tile reads and rewrites it.
    """
    dQ, dK, dV = torch.zeros_like(Q), torch.zeros_like(K), torch.zeros_like(V)  # 5
    of_keys = (x.split(B_c) for x in (K, V, dK, dV))
    for j, (K_j, V_j, dK_j, dV_j) in enumerate(zip(*of_keys, strict=True)):  # 6, 7, 8
        of_queries = (x.split(B_r) for x in (Q, O, dO, dQ, l, m))
        for i, (Q_i, O_i, dO_i, dQ_i, l_i, m_i) in enumerate(zip(*of_queries, strict=True)):  # 9, 10
            if causal and is_hidden(i, j, B_r, B_c):
                continue
            S = Q_i @ K_j.T  # 11
            if causal:
                S = mask(S, i, j, B_r, B_c)  # 12
            P = torch.exp(S - m_i[:, None]) / l_i[:, None]  # 13
            dV_j += P.T @ dO_i  # 16
            dP = dO_i @ V_j.T  # 17
            D_i = (dO_i * O_i).sum(1)  # 19
            dS = P * (dP - D_i[:, None])  # 20
            dQ_i += dS @ K_j  # 21
            dK_j += dS.T @ Q_i  # 22
            watch(i=i, j=j, P=P, dS=dS, dQ=dQ_i, dK=dK_j, dV=dV_j)
    return dQ, dK, dV


def flash_attention_2(
    Q: Tensor, K: Tensor, V: Tensor, B_r: int, B_c: int, watch: Watch = ignore, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Run Algorithm 1 of FlashAttention-2 (Dao, 2023): outer loop over tiles of Q. Return O and L.

    A tile of O stays on chip until it is complete and is normalised once. Of the statistics only L is kept.
    """
    O, L = [], []
    for i, Q_i in enumerate(Q.split(B_r)):  # 3, 4
        O_i = torch.zeros_like(Q_i)  # 5
        l, m = Q_i.new_zeros(len(Q_i)), Q_i.new_full((len(Q_i),), float("-inf"))
        for j, (K_j, V_j) in enumerate(zip(K.split(B_c), V.split(B_c), strict=True)):  # 6, 7
            if causal and is_hidden(i, j, B_r, B_c):
                continue
            S = Q_i @ K_j.T  # 8
            if causal:
                S = mask(S, i, j, B_r, B_c)
            m_new = torch.maximum(m, S.amax(1))  # 9
            P = torch.exp(S - m_new[:, None])
            shrunk = torch.exp(m - m_new)
            l = shrunk * l + P.sum(1)
            O_i = shrunk[:, None] * O_i + P @ V_j  # 10
            m = m_new
            watch(i=i, j=j, S=S, m=m, l=l, O=O_i)
        O.append(O_i / l[:, None])  # 12, 14
        L.append(m + l.log())  # 13, 15
    return torch.cat(O), torch.cat(L)


def flash_attention_2_backward(
    Q: Tensor, K: Tensor, V: Tensor, O: Tensor, dO: Tensor, L: Tensor, B_r: int, B_c: int,
    watch: Watch = ignore, causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run Algorithm 2 of FlashAttention-2 (Dao, 2023): outer loop over tiles of K and V. Return dQ, dK and dV.

    P = exp(S - L) is recomputed. dS = P o (dP - D) with D = rowsum(dO o O).
    """
    D = (dO * O).sum(1)  # 4
    dQ, dK, dV = torch.zeros_like(Q), torch.zeros_like(K), torch.zeros_like(V)  # 3
    of_keys = (x.split(B_c) for x in (K, V, dK, dV))
    for j, (K_j, V_j, dK_j, dV_j) in enumerate(zip(*of_keys, strict=True)):  # 5, 6, 7
        of_queries = (x.split(B_r) for x in (Q, dO, dQ, L, D))
        for i, (Q_i, dO_i, dQ_i, L_i, D_i) in enumerate(zip(*of_queries, strict=True)):  # 8, 9
            if causal and is_hidden(i, j, B_r, B_c):
                continue
            S = Q_i @ K_j.T  # 10
            if causal:
                S = mask(S, i, j, B_r, B_c)
            P = torch.exp(S - L_i[:, None])  # 11
            dV_j += P.T @ dO_i  # 12
            dP = dO_i @ V_j.T  # 13
            dS = P * (dP - D_i[:, None])  # 14
            dQ_i += dS @ K_j  # 15
            dK_j += dS.T @ Q_i  # 16
            watch(i=i, j=j, P=P, dS=dS, dQ=dQ_i, dK=dK_j, dV=dV_j)
    return dQ, dK, dV
