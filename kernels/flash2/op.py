"""flash2 as PyTorch operators: Triton kernels on CUDA and ROCm, the tiled PyTorch definition on CPU.

The operators are opaque to torch.compile. An autograd.Function around them takes about half the host time of
`custom_op` with `register_autograd`.
"""

import torch
from torch import Tensor, library
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kernels.common import dropout
from kernels.common.checks import check_inputs, document_bounds, readable
from kernels.common.dtypes import accumulator
from kernels.common.registering import define, implementation, no_second_derivative
from kernels.flash2.block_lists import BLOCK, HEADER, Listed
from kernels.flash2.options import Options

_OPTIONS = "Tensor? numbers, Tensor? documents, Tensor? blocks, bool causal, int window, float scale, float dropout_p"
_SAVED = f"Tensor out, Tensor logsumexp, Tensor? dlogsumexp, bool deterministic, {_OPTIONS}"
_library = define(
    "flash2",
    "dispatch",
    forward=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    backward=f"(Tensor dout, Tensor q, Tensor k, Tensor v, {_SAVED}) -> (Tensor, Tensor, Tensor)",
    backward_packed=f"(Tensor dout, Tensor qkv, {_SAVED}, bool with_sums) -> (Tensor, Tensor)",
)


def _forward(q: Tensor, *args):
    """Call the operator, or on a GPU its kernels directly: this saves the host 9 microseconds.

    torch.compile, dispatch modes (the FLOP counter, make_fx) and subclasses of Tensor need the operator.
    """
    if not q.is_cuda or torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or type(q) is not Tensor:
        return torch.ops.flash2.forward(q, *args)
    return implementation("flash2", q.device.type, "dispatch").forward(q, *args)


@library.register_fake("flash2::forward")
def _(q, k, v, *options):
    batch, seq_q, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, seq_q), dtype=accumulator(q.dtype))


@library.register_fake("flash2::backward")
def _(dout, q, k, v, *rest):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@library.register_fake("flash2::backward_packed")
def _(dout, qkv, *rest):
    shape = qkv.shape[2:] if rest[-1] else 0
    return qkv.new_empty(qkv.shape), qkv.new_empty(shape, dtype=accumulator(qkv.dtype))


class _Flash2(torch.autograd.Function):
    """Map (q, k, v, None) or (qkv, None, None, bias) to the output and, if return_lse, the logsumexp."""

    @staticmethod
    def forward(ctx, return_lse, deterministic, options, q, k, v, bias):
        inputs = (q,) if k is None else (q, k, v)
        if k is None:
            q, k, v = q.unbind(2)
        out, logsumexp = _forward(q, k, v, *options)
        ctx.save_for_backward(*options[:3], *inputs, out, logsumexp)
        ctx.deterministic, ctx.rest = deterministic, options[3:]
        ctx.bias_dtype = bias.dtype if ctx.needs_input_grad[6] else None
        return (out, logsumexp) if return_lse else out

    @staticmethod
    @no_second_derivative("flash2", "attention=sdpa attention.backend=math")
    def backward(ctx, dout, dlogsumexp=None):
        dout = readable(dout)
        dlogsumexp = None if dlogsumexp is None else dlogsumexp.contiguous()
        numbers, documents, blocks, *saved = ctx.saved_tensors
        rest = dlogsumexp, ctx.deterministic, numbers, documents, blocks, *ctx.rest
        if len(saved) == 5:
            return None, None, None, *torch.ops.flash2.backward(dout, *saved, *rest), None
        with_sums = ctx.bias_dtype is not None
        dqkv, sums = torch.ops.flash2.backward_packed(dout, *saved, *rest, with_sums)
        return None, None, None, dqkv, None, None, sums.flatten().to(ctx.bias_dtype) if with_sums else None


def flash2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    blocks: Listed | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return softmax(Q K^T scale) V by FlashAttention-2 (Dao, 2023, Algorithms 1 and 2).

    Neither pass stores the scores. q is (batch, seq_q, heads, head_dim), k and v are (batch, seq_k, kv_heads,
    head_dim). heads is a multiple of kv_heads, and head_dim is from 16 to 256. The dtype is float32, float16 or
    bfloat16, or float64 on a CPU. Strided views, for example parts of one packed projection, are read in place if the
    last dimension has unit stride, and copied otherwise. The output is (batch, seq_q, heads, head_dim), contiguous, in
    q's dtype.

    Args:
        causal: align the mask at the bottom right: query i sees the keys up to i + seq_k - seq_q. A query without a key
            gives zeros.
        scale: factor of the scores, positive; 1 / sqrt(head_dim) by default.
        dropout_p: share of the probabilities dropped, in [0, 1), by torch's generator.
        window: with causal, each query sees only the last `window` keys up to its own; all of them by default.
        cu_seqlens: cumulative lengths of n documents, (n + 1,) int32, from 0 to batch * seq. The documents fill the
            sequences of the batch, laid end to end. Each document attends only to itself. The values stay on the device
            and are not checked. Wrong values give wrong results. A deterministic backward may then never end.
        blocks: compute only these blocks of 128 queries by 128 keys, from kernels.flash2.block_lists.listed. It
            requires seq_q = seq_k and no window.
        return_lse: also return the natural logsumexp of the scaled scores, (batch, heads, seq_q) in fp32, or -inf for
            a query without a key. It has a gradient.
        deterministic: give the same bits at every run of the backward pass, at some cost in speed; by default as
            torch.use_deterministic_algorithms says.

    Raises:
        ValueError: shapes, dtypes, devices or options outside the above.
    """
    options = _prepare(q, k, v, causal, scale, dropout_p, window, cu_seqlens, blocks)
    q, k, v = readable(q), readable(k), readable(v)
    return _Flash2.apply(return_lse, _is_deterministic(deterministic), options, q, k, v, None)


def flash2_packed(
    qkv: Tensor, *, bias: Tensor | None = None, return_lse: bool = False, deterministic: bool | None = None, **options
) -> Tensor | tuple[Tensor, Tensor]:
    """Return flash2 of the three parts of one projection, qkv (batch, seq, 3, heads, head_dim); options as in flash2.

    The gradient is one tensor shaped like qkv, which saves the copy that gathers dq, dk and dv.

    bias (3 heads head_dim,) is the bias that the projection already added to qkv, without its gradient. This function
    computes that gradient: the sum of qkv's gradient over the tokens, in fp32 or more.
    """
    if qkv.ndim != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv is {tuple(qkv.shape)}; give flash2_packed qkv (batch, seq, 3, heads, head_dim)")
    if bias is not None and bias.shape != (qkv.shape[2:].numel(),):
        raise ValueError(
            f"bias is {tuple(bias.shape)}, and qkv is {tuple(qkv.shape)}; give a bias ({qkv.shape[2:].numel()},)"
        )
    options = _prepare(*qkv.unbind(2), **options)
    qkv = readable(qkv)
    return _Flash2.apply(return_lse, _is_deterministic(deterministic), options, qkv, None, None, bias)


def _is_deterministic(asked: bool | None) -> bool:
    return torch.are_deterministic_algorithms_enabled() if asked is None else asked


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, dropout_p: float = 0.0,
    window: int | None = None, cu_seqlens: Tensor | None = None, blocks: Listed | None = None,
) -> Options:  # fmt: skip
    """Check the inputs and return the operators' options. The defaults are flash2's."""
    if scale is None:
        scale = max(q.shape[-1:].numel(), 1) ** -0.5  # shapes are only checked below
    scale, dropout_p = float(scale), float(dropout_p)
    check_inputs("flash2", q, k, v, scale, dropout_p, cu_seqlens)
    if window is not None and not (causal and isinstance(window, int) and window >= 1):
        raise ValueError(
            f"window={window} is not a number of keys, or the call is not causal; use causal=True and an integer >= 1"
        )
    if window is not None and window >= k.shape[1]:
        window = None  # it hides nothing
    if blocks is not None:
        _check_blocks(q, k, causal, cu_seqlens is not None, window, blocks)
    numbers = dropout.draw(q.shape[0], q.shape[2], q.shape[1], k.shape[1], q.device) if dropout_p else None
    documents = None if cu_seqlens is None else document_bounds(cu_seqlens, *q.shape[:2])
    lists = None if blocks is None else blocks.lists
    return Options(numbers, documents, lists, causal, window or 0, scale, dropout_p)


def _check_blocks(q: Tensor, k: Tensor, causal: bool, documents: bool, window: int | None, blocks: Listed) -> None:
    if not isinstance(blocks, Listed):
        raise ValueError(
            f"blocks is a {type(blocks).__name__}; pass the result of kernels.flash2.block_lists.listed(pattern, ...)"
        )
    if q.shape[1] != k.shape[1] or window is not None:
        raise ValueError(
            f"blocks do not fit seq_q={q.shape[1]}, seq_k={k.shape[1]} and window={window}; give as many queries as "
            "keys and no window, or no blocks"
        )
    n, lists = -(-q.shape[1] // BLOCK), blocks.lists
    rows = lists.shape[0] if lists.ndim == 2 and lists.dtype == torch.int32 and lists.is_contiguous() else 0
    if rows < 2 * n or lists.shape[1] != HEADER + n:
        raise ValueError(
            f"blocks.lists is {tuple(lists.shape)} {lists.dtype}; for {q.shape[1]} tokens, give "
            f"({2 * n} or more, {HEADER + n}) int32, contiguous"
        )
    if lists.device != q.device:
        raise ValueError(f"blocks are on {lists.device} and q is on {q.device}; move blocks with blocks.to(device)")
    # Lists for another kind of call name other blocks as whole: queries would see hidden keys, or keys past the end.
    call = Listed(lists, causal, documents, q.shape[1] % BLOCK != 0)
    for key, here, then in zip(Listed._fields[1:], call[1:], blocks[1:], strict=True):
        if here != then:
            raise ValueError(f"blocks were listed with {key}={then}, and this call has {key}={here}; list them again")
