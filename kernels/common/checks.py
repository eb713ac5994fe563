"""Input checks that all attention operators share, and the bounds of documents as the kernels read them."""

import math

import torch
from torch import Tensor

DTYPES = torch.bfloat16, torch.float16, torch.float32
LONGEST_STRIDE = 2**24  # elements between rows: the offsets inside a tile of 128 rows then fit 32 bits


def readable(x: Tensor) -> Tensor:
    """Return x (B, length, H, D) if the kernels can address it, or else a contiguous copy.

    The kernels need unit stride along the last dimension and less than LONGEST_STRIDE along dimension 1.
    """
    fits = x.stride(-1) == 1 and (x.shape[1] == 1 or x.stride(1) < LONGEST_STRIDE)
    return x if fits else x.contiguous()


def check_inputs(
    name: str, q: Tensor, k: Tensor, v: Tensor, scale: float, dropout_p: float, cu_seqlens: Tensor | None
) -> None:
    """Check the inputs of the attention called `name`.

    q is (batch, seq_q, heads, head_dim); k and v are (batch, seq_k, kv_heads, head_dim), heads a multiple of kv_heads.

    Raises:
        ValueError: a shape, dtype, device or option that the attention does not support.
    """
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if not len(q_shape) == len(k_shape) == len(v_shape) == 4:
        raise ValueError(
            f"q, k and v have {q.ndim}, {k.ndim} and {v.ndim} dimensions; give {name} tensors (batch, seq, heads, "
            "head_dim)"
        )
    (batch, seq_q, heads, head_dim), (k_batch, seq_k, kv_heads, k_head_dim) = q_shape, k_shape
    if not (batch and seq_q and heads and seq_k and kv_heads):
        raise ValueError(
            f"q {tuple(q_shape)} or k {tuple(k_shape)} is empty; give {name} at least one query and one key"
        )
    if k_shape != v_shape or batch != k_batch or head_dim != k_head_dim or heads % kv_heads:
        raise ValueError(
            f"q {tuple(q_shape)}, k {tuple(k_shape)} and v {tuple(v_shape)} do not fit each other; give {name} k and v "
            "of one shape, batch and head_dim as in q, and heads a multiple of kv_heads"
        )
    if not 16 <= head_dim <= 256:
        raise ValueError(f"head_dim={head_dim} does not suit {name}, which takes 16 to 256; use attention=sdpa")
    dtype, device = q.dtype, q.device
    if not (dtype == k.dtype == v.dtype and device == k.device == v.device):
        found = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        raise ValueError(f"q, k and v are {found}; give all three one dtype and device")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"device={device.type} does not run {name}; use cuda (NVIDIA or ROCm) or cpu, or attention=sdpa"
        )
    if dtype not in DTYPES and (dtype, device.type) != (torch.float64, "cpu"):
        raise ValueError(f"dtype={dtype} does not suit {name} on {device.type}; give float32, float16 or bfloat16")
    if not 0 < scale < math.inf:  # the kernels scale the row maximum after finding it
        raise ValueError(f"scale={scale} is out of range; give a positive, finite scale")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p={dropout_p} is out of range; give at least 0 and below 1")
    if cu_seqlens is not None:
        check_documents(q, k, cu_seqlens)


def check_documents(q: Tensor, k: Tensor, cu_seqlens: Tensor) -> None:
    """Check that cu_seqlens can hold the cumulative document lengths of q and k.

    Raises:
        ValueError: q and k differ in length, or cu_seqlens has a wrong shape, dtype or device.
    """
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"cu_seqlens needs queries and keys of one length, not {q.shape[1]} and {k.shape[1]}; leave cu_seqlens out"
        )
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens is {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}; give the cumulative lengths of n documents, "
            "(n + 1,) int32"
        )
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device} and q on {q.device}; move cu_seqlens to q's device")


def document_bounds(cu_seqlens: Tensor, batch: int, seq_len: int) -> Tensor:
    """Return the start and end of each token's document within its sequence, (B, 2, T) int32.

    cu_seqlens (n + 1,) counts tokens over all sequences laid end to end. Document i has the tokens cu_seqlens[i] to
    cu_seqlens[i + 1]. A document that crosses the end of a sequence is cut there.
    """
    token = torch.arange(batch * seq_len, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, token, right=True)
    sequence = token // seq_len * seq_len
    bounds = torch.stack([cu_seqlens[document - 1], cu_seqlens[document]]) - sequence
    return bounds.clamp(0, seq_len).view(2, batch, seq_len).transpose(0, 1).to(torch.int32).contiguous()
