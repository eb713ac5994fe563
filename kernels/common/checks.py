"""What every attention of ours asks of its inputs, and says where it does not get it."""

import math

import torch
from torch import Tensor

DTYPES = torch.bfloat16, torch.float16, torch.float32
LONGEST_STRIDE = 2**24  # between rows, of which a tile has at most 128


def readable(x: Tensor) -> Tensor:
    """x, whose rows lie along dimension 1, or a copy that the kernels can address: with unit stride along a row, and
    rows so near to each other that offsets inside a tile have 32 bits."""
    fits = x.stride(-1) == 1 and (x.shape[1] == 1 or x.stride(1) < LONGEST_STRIDE)
    return x if fits else x.contiguous()


def check_inputs(
    name: str, q: Tensor, k: Tensor, v: Tensor, scale: float, dropout_p: float, cu_seqlens: Tensor | None
) -> None:
    """Raises a ValueError in the name of an attention unless q is (batch, seq_q, heads, head_dim), k and v (batch,
    seq_k, kv_heads, head_dim) with heads a multiple of kv_heads, and all the rest is in order too."""
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if not len(q_shape) == len(k_shape) == len(v_shape) == 4:
        raise ValueError(f"{name} takes (batch, seq, heads, head_dim) tensors, not {q.ndim}, {k.ndim}, {v.ndim}-D ones")
    (batch, seq_q, heads, head_dim), (k_batch, seq_k, kv_heads, k_head_dim) = q_shape, k_shape
    if not (batch and seq_q and heads and seq_k and kv_heads):
        raise ValueError(f"{name} needs at least one query and one key; got q {tuple(q_shape)}, k {tuple(k_shape)}")
    if k_shape != v_shape or batch != k_batch or head_dim != k_head_dim or heads % kv_heads:
        raise ValueError(
            f"{name} needs k and v of one shape, batch and head_dim as in q, and heads a multiple of kv_heads; "
            f"got q {tuple(q_shape)}, k {tuple(k_shape)}, v {tuple(v_shape)}"
        )
    if not 16 <= head_dim <= 256:
        raise ValueError(f"{name} takes head sizes from 16 to 256, not {head_dim}; use attention=sdpa")
    dtype, device = q.dtype, q.device
    if not (dtype == k.dtype == v.dtype and device == k.device == v.device):
        found = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        raise ValueError(f"q, k and v must share dtype and device; got {found}")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} runs on cuda (NVIDIA or ROCm) and cpu, not on {device.type}; use attention=sdpa")
    if dtype not in DTYPES and (dtype, device.type) != (torch.float64, "cpu"):
        raise ValueError(f"{name} takes float32, float16 or bfloat16 on {device.type}, not {dtype}")
    if not 0 < scale < math.inf:
        raise ValueError(
            f"{name} needs a positive, finite scale, not {scale}: it scales the row maximum as it finds it"
        )
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), not {dropout_p}")
    if cu_seqlens is not None:
        check_documents(q, k, cu_seqlens)


def check_documents(q: Tensor, k: Tensor, cu_seqlens: Tensor) -> None:
    """Raises a ValueError unless cu_seqlens can be the cumulative lengths of documents in q and as many keys."""
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"cu_seqlens needs queries and keys of one length, not {q.shape[1]} and {k.shape[1]}")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "cu_seqlens holds the cumulative lengths of documents, (n + 1,) int32, "
            f"not {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}"
        )
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, and q on {q.device}; they must share a device")
