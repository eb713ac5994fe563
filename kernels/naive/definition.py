"""Standard attention: Algorithm 0 of FlashAttention (Dao et al., 2022), and its backward pass, Algorithm 3.

Every N x N matrix goes to memory. This is the baseline of the fused variants and, in fp64, the reference of their
tests. 16-bit inputs are multiplied as they are and accumulated in fp32. S and dP stay in fp32. Rounding them to 16 bits
makes the error 2 to 3.5 times the error of torch's math attention.

B batch, T query length, S key length, H query heads, G key/value heads, D head size.
"""

import torch
from torch import Tensor

from kernels.common.checks import check_documents
from kernels.common.dtypes import accumulator
from kernels.common.registering import no_second_derivative


def visible(seq_q: int, seq_k: int, device: torch.device) -> Tensor:
    """Return the causal mask (T, S), boolean, aligned at the bottom right: query i sees keys j <= i + S - T."""
    return torch.ones(seq_q, seq_k, dtype=torch.bool, device=device).tril(seq_k - seq_q)


def same_document(q: Tensor, k: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return (B, T, T) boolean, True for two tokens of the same document. Raises like check_documents."""
    check_documents(q, k, cu_seqlens)
    batch, seq_len = q.shape[:2]
    token = torch.arange(batch * seq_len, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, token, right=True).view(batch, seq_len)
    return document[:, :, None] == document[:, None, :]


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b for (B, H, rows, columns) matrices, in `dtype`; 16-bit operands accumulate in fp32."""
    if a.dtype == dtype:
        return a @ b
    if not a.is_cuda:
        return a.to(dtype) @ b.to(dtype)
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=dtype).unflatten(0, a.shape[:2])


class _StandardAttention(torch.autograd.Function):
    """Attention of q (B, G, R, D), which stacks the R = H / G * T queries of a group, to k and v (B, G, S, D).

    The mask `seen` is (R, S) or (B, 1, R, S), and dropout's mask `keep` (B, G, R, S). Both are boolean and may be None.
    """

    @staticmethod
    def forward(ctx, q, k, v, seen, scale, keep, keep_scale):
        wide = accumulator(q.dtype)
        S = _product(q, k.mT, wide) * scale
        if seen is not None:
            S = S.masked_fill(~seen, float("-inf"))
        P = S.softmax(dim=-1).to(q.dtype)
        if seen is not None and q.shape[2] > k.shape[2]:
            P = P.masked_fill(~seen, 0)  # the softmax of a query without keys is 0/0
        ctx.save_for_backward(q, k, v, P, keep)
        ctx.scales = scale, keep_scale
        kept = P if keep is None else P * keep
        return (_product(kept, v, wide) * keep_scale).to(q.dtype)

    @staticmethod
    @no_second_derivative("naive", "attention=sdpa attention.backend=math")
    def backward(ctx, dO):
        q, k, v, P, keep = ctx.saved_tensors
        scale, keep_scale = ctx.scales
        wide = accumulator(q.dtype)
        kept = P if keep is None else P * keep
        dV = (_product(kept.mT, dO, wide) * keep_scale).to(q.dtype)
        dP = _product(dO, v.mT, wide)
        if keep is not None:
            dP = dP * keep * keep_scale
        dS = (P * (dP - (P * dP).sum(-1, keepdim=True)) * scale).to(q.dtype)
        return dS @ k, dS.mT @ q, dV, None, None, None, None


def standard_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, dropout_p: float = 0.0,
    keep: Tensor | None = None, cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return softmax(Q K^T scale) V, with S and P in memory in both passes.

    q is (B, T, H, D), k and v are (B, S, G, D) with H a multiple of G, any floating dtype; the output is (B, T, H, D)
    in q's dtype. A query that sees no key gives zeros. With cu_seqlens each document attends only to itself, as in
    flash2. Autocast has no effect. Tests pass dropout's mask `keep`, boolean (B, H, T, S).

    Raises:
        ValueError: dropout_p is not in [0, 1), or q and k differ in length although cu_seqlens is given.
    """
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p={dropout_p} is out of range; give at least 0 and below 1")
    (batch, seq_q, heads, head_dim), (seq_k, kv_heads) = q.shape, k.shape[1:3]
    rows = heads // kv_heads * seq_q
    seen = visible(seq_q, seq_k, q.device).repeat(heads // kv_heads, 1) if causal else None
    if cu_seqlens is not None:
        same = same_document(q, k, cu_seqlens).repeat(1, heads // kv_heads, 1)[:, None]
        seen = same if seen is None else seen & same
    if dropout_p and keep is None:
        keep = torch.rand(batch, heads, seq_q, seq_k, device=q.device) >= dropout_p
    if keep is not None:
        keep = keep.view(batch, kv_heads, rows, seq_k)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q = q.reshape(batch, kv_heads, rows, head_dim)
    with torch.autocast(q.device.type, enabled=False):
        out = _StandardAttention.apply(q, k, v, seen, scale, keep, 1 / (1 - dropout_p))
    return out.view(batch, heads, seq_q, head_dim).transpose(1, 2)
