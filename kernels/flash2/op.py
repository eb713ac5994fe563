"""flash2 as one PyTorch operator: Triton kernels on CUDA and ROCm, the tiled PyTorch definition on CPU.

The operators are opaque to torch.compile (no graph break) and need no autograd key of their own: an autograd.Function
around them costs about half the host time of `custom_op` with `register_autograd`.
"""

import torch
from torch import Tensor

from kernels.flash2 import definition

_library = torch.library.Library("flash2", "DEF")
_library.define(
    "forward(Tensor q, Tensor k, Tensor v, Tensor? seed, bool causal, float scale, float dropout_p) -> (Tensor, Tensor)"
)
_library.define(
    "backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, Tensor? seed, "
    "bool causal, float scale, float dropout_p) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "backward_packed(Tensor dout, Tensor qkv, Tensor out, Tensor logsumexp, Tensor? seed, "
    "bool causal, float scale, float dropout_p) -> Tensor"
)


def _cuda_forward(*args):
    from kernels.flash2 import launch  # Triton is needed, and installed, only where there is a GPU

    return launch.forward(*args)


def _cuda_backward(*args):
    from kernels.flash2 import launch

    return launch.backward(*args)


def _cuda_backward_packed(*args):
    from kernels.flash2 import launch

    return launch.backward_packed(*args)


_library.impl("forward", definition.forward, "CPU")
_library.impl("backward", definition.backward, "CPU")
_library.impl("backward_packed", definition.backward_packed, "CPU")
_library.impl("forward", _cuda_forward, "CUDA")
_library.impl("backward", _cuda_backward, "CUDA")
_library.impl("backward_packed", _cuda_backward_packed, "CUDA")


@torch.library.register_fake("flash2::forward")
def _(q, k, v, seed, causal, scale, dropout_p):
    batch, seq_q, heads, _ = q.shape
    logsumexp_dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty((batch, heads, seq_q), dtype=logsumexp_dtype)


@torch.library.register_fake("flash2::backward")
def _(dout, q, k, v, out, logsumexp, seed, causal, scale, dropout_p):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.register_fake("flash2::backward_packed")
def _(dout, qkv, out, logsumexp, seed, causal, scale, dropout_p):
    return qkv.new_empty(qkv.shape)


class _Flash2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, seed, causal, scale, dropout_p):
        out, logsumexp = torch.ops.flash2.forward(q, k, v, seed, causal, scale, dropout_p)
        ctx.save_for_backward(q, k, v, out, logsumexp, seed)
        ctx.options = causal, scale, dropout_p
        return out

    @staticmethod
    def backward(ctx, dout):
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        *saved, seed = ctx.saved_tensors
        return (*torch.ops.flash2.backward(dout, *saved, seed, *ctx.options), None, None, None, None)


class _Flash2Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, seed, causal, scale, dropout_p):
        out, logsumexp = torch.ops.flash2.forward(*qkv.unbind(2), seed, causal, scale, dropout_p)
        ctx.save_for_backward(qkv, out, logsumexp, seed)
        ctx.options = causal, scale, dropout_p
        return out

    @staticmethod
    def backward(ctx, dout):
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        return torch.ops.flash2.backward_packed(dout, *ctx.saved_tensors, *ctx.options), None, None, None, None


def flash2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """FlashAttention-2: softmax(Q K^T scale) V without ever holding the scores, forward and backward.

    q is (batch, seq_q, heads, head_dim), k and v are (batch, seq_k, kv_heads, head_dim) with heads a multiple of
    kv_heads, head_dim from 16 to 256, float32, float16 or bfloat16 (float64 too on a CPU). Strided views, such as those
    of one packed projection, are read in place if the last dimension has unit stride, and copied otherwise. The output
    is (batch, seq_q, heads, head_dim), contiguous, in q's dtype.

    Args:
        causal: mask aligned at the bottom right: query i sees the keys up to i + seq_k - seq_q. A query without a key
            gives zeros.
        scale: factor on the scores, positive; 1 / sqrt(head_dim) by default.
        dropout_p: share of the probabilities dropped, in [0, 1).
        seed: one int64 on q's device that fixes the dropout; drawn from torch's generator by default.

    Raises:
        ValueError: shapes, dtypes, devices or options outside the above.
    """
    scale, seed = _prepare(q, k, v, scale, dropout_p, seed)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return _Flash2.apply(q, k, v, seed, causal, scale, dropout_p)


def flash2_packed(
    qkv: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """flash2 of the three parts of one projection, qkv (batch, seq, 3, heads, head_dim).

    The gradient comes as one tensor shaped like qkv, which saves the copy that gathers those of q, k and v. Options,
    output and errors are those of flash2.
    """
    if qkv.ndim != 5 or qkv.shape[2] != 3:
        raise ValueError(f"flash2_packed takes qkv (batch, seq, 3, heads, head_dim), not {tuple(qkv.shape)}")
    scale, seed = _prepare(*qkv.unbind(2), scale, dropout_p, seed)
    qkv = qkv if qkv.stride(-1) == 1 else qkv.contiguous()
    return _Flash2Packed.apply(qkv, seed, causal, scale, dropout_p)


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout_p: float, seed: Tensor | None
) -> tuple[float, Tensor | None]:
    """The scale and the seed with their defaults, once everything is found in order."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    _check(q, k, v, scale, dropout_p)
    if dropout_p and seed is None:
        seed = torch.randint(2**62, (1,), device=q.device)
    return scale, seed


def _check(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout_p: float) -> None:
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"flash2 takes (batch, seq, heads, head_dim) tensors, not {q.ndim}, {k.ndim}, {v.ndim}-D ones")
    if k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]) or q.shape[2] % k.shape[2]:
        raise ValueError(
            "flash2 needs k and v of one shape, batch and head_dim as in q, and heads a multiple of kv_heads; "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"flash2 needs at least one query and one key; got q {tuple(q.shape)}, k {tuple(k.shape)}")
    if not 16 <= q.shape[3] <= 256:
        raise ValueError(f"flash2 takes head sizes from 16 to 256, not {q.shape[3]}; use attention=sdpa")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise ValueError(f"q, k and v must share dtype and device; got {q.dtype}, {k.dtype}, {v.dtype} on {q.device}")
    if q.device.type not in ("cpu", "cuda"):
        raise ValueError(f"flash2 runs on cuda (NVIDIA or ROCm) and cpu, not on {q.device.type}; use attention=sdpa")
    dtypes = (torch.float32, torch.float16, torch.bfloat16) + ((torch.float64,) if q.device.type == "cpu" else ())
    if q.dtype not in dtypes:
        raise ValueError(f"flash2 takes float32, float16 or bfloat16 on {q.device.type}, not {q.dtype}")
    if not scale > 0:
        raise ValueError(f"flash2 needs a positive scale, not {scale}: it scales the row maximum as it finds it")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), not {dropout_p}")
