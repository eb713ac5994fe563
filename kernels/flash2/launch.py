"""What flash2 launches on a GPU: the warp-specialised kernels of Hopper, or the plain ones with their tiles.

The rule is `is_specialised`; `explain` tells in a line what it gives.
"""

import logging
from functools import cache

import torch
import triton
from torch import Tensor

from kernels.flash2.dropout import threshold
from kernels.flash2.launcher import arch_of, descriptor, launch, strides, triton_version, uses_tma
from kernels.flash2.options import Options
from kernels.flash2.tiles import Tile, Tiles, length_bucket, padded_head_dim, tiles_for
from kernels.flash2.triton_kernels import delta_kernel, forward_kernel, key_gradient_kernel, query_gradient_kernel

log = logging.getLogger(__name__)
SPECIALISED_HEAD_DIMS = {"forward": (80, 96, 128), "backward": (64, 80, 96, 128)}


def is_specialised(pass_: str, arch: str, head_dim: int, dtype: torch.dtype, options: Options) -> bool:
    """Whether the warp-specialised kernels of hopper_forward or hopper_backward compute this pass.

    They do on sm_90 under Triton 3.6 or later, for 16-bit inputs of the head sizes at which they were measured to be
    faster, without window, documents or dropout, where TMA can read the inputs (uses_tma). All else is for the plain
    kernels, and so is a backward pass that has to be deterministic: the specialised one adds up dQ in the order in
    which its programs happen to run.
    """
    if arch != "sm_90" or triton_version() < (3, 6) or dtype.itemsize != 2:
        return False
    plain_options = options.window or options.documents is not None or options.dropout_p
    return head_dim in SPECIALISED_HEAD_DIMS[pass_] and not plain_options


def explain(
    head_dim: int,
    dtype: torch.dtype,
    causal: bool,
    seq_len: int,
    arch: str,
    dropout_p: float = 0.0,
    deterministic: bool = False,
) -> str:
    """One line: what flash2 launches for contiguous inputs of this kind on an architecture."""
    tiles = tiles_for(arch, head_dim, dtype, causal, length_bucket(seq_len), dropout_p > 0)
    loads = "TMA" if arch == "sm_90" and dtype != torch.float32 else "pointers"
    parts = {name: f"{t.m}x{t.n} in {t.warps} warps and {t.stages} stages" for name, t in tiles._asdict().items()}
    asked = arch, head_dim, dtype, Options(causal=causal, dropout_p=dropout_p)
    forward = f"forward by plain Triton, {loads}, {parts['forward']}"
    backward = f"backward by plain Triton, {loads}, {parts['key_gradient']}, {parts['query_gradient']}"
    if is_specialised("forward", *asked):
        from kernels.flash2.hopper_forward import CONFIGS

        forward = f"forward by warp-specialised Gluon, {CONFIGS[head_dim, causal]}"
    if is_specialised("backward", *asked) and not deterministic:
        from kernels.flash2.hopper_backward import CONFIGS

        backward = f"backward by warp-specialised Gluon, {CONFIGS[head_dim, causal]}"
    return f"{forward}; {backward}"


@cache
def _tell(pass_: str, kind: str, head_dim: int, dtype: torch.dtype, arch: str) -> None:
    """One line of log per kind of kernels, the first time that they run."""
    log.info("flash2 %s of head_dim %d in %s on %s: %s kernels", pass_, head_dim, dtype, arch, kind)


def _runs_specialised(pass_: str, options: Options, *inputs: Tensor) -> bool:
    """is_specialised and uses_tma for these inputs, the first of which is q."""
    q = inputs[0]
    arch = arch_of(q.device)
    specialised = is_specialised(pass_, arch, q.shape[3], q.dtype, options) and uses_tma(*inputs)
    _tell(pass_, "warp-specialised Gluon" if specialised else "plain Triton", q.shape[3], q.dtype, arch)
    return specialised


def choose_tiles(q: Tensor, k: Tensor, options: Options) -> Tiles:
    """The table's tiles for these inputs."""
    kind = options.causal, length_bucket(k.shape[1]), options.dropout_p > 0
    return tiles_for(arch_of(q.device), q.shape[3], q.dtype, *kind)


def _read(x: Tensor, rows: int, tma: bool):
    """x as a kernel reads it, `rows` of one head at a time."""
    return descriptor(x, [1, rows, 1, padded_head_dim(x.shape[3])]) if tma else x


def _constants(tile: Tile, head_dim: int, options: Options, interpreted: bool, tma: bool) -> tuple:
    """M, N, HEAD_DIM, D, CAUSAL, WINDOW, DOCUMENTS, DROPOUT, UPCAST, TMA: what the three kernels are compiled for."""
    masks = options.causal, options.window > 0, options.documents is not None
    return tile.m, tile.n, head_dim, padded_head_dim(head_dim), *masks, options.dropout_p > 0, interpreted, tma


def _sizes(q: Tensor, k: Tensor, options: Options) -> tuple:
    """heads, groups, seq_q, seq_k, window, scale, threshold, keep_scale."""
    (seq_q, heads), (seq_k, kv_heads) = q.shape[1:3], k.shape[1:3]
    dropout = threshold(options.dropout_p), 1 / (1 - options.dropout_p)
    return heads, heads // kv_heads, seq_q, seq_k, options.window, options.scale, *dropout


def forward(q: Tensor, k: Tensor, v: Tensor, *options, tiles: Tiles | None = None) -> tuple[Tensor, Tensor]:
    """Same contract as definition.forward: O (B, T, H, D) contiguous, logsumexp (B, H, T) fp32.

    `tiles` makes the plain kernels run, with those: for those who tune and compare.
    """
    options = Options(*options)
    if tiles is None and _runs_specialised("forward", options, q, k, v):
        from kernels.flash2 import hopper_forward  # Gluon is there by the rule

        return hopper_forward.forward(q, k, v, options.causal, options.scale)
    batch, seq_q, heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    logsumexp = torch.empty((batch, heads, seq_q), dtype=torch.float32, device=q.device)
    tile, tma = (tiles or choose_tiles(q, k, options)).forward, uses_tma(q, k, v)
    reads = _read(q, tile.m, tma), _read(k, tile.n, tma), _read(v, tile.n, tma)
    with torch.cuda.device_of(q):
        launch(
            forward_kernel,
            (q.dtype, q.device),
            batch * heads * triton.cdiv(seq_q, tile.m),
            (*reads, out, logsumexp, options.numbers, options.documents),
            (*strides(q, k, v, out), *_sizes(q, k, options)),
            _constants(tile, head_dim, options, not q.is_cuda, tma),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out, logsumexp


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *args, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Same contract as definition.backward: contiguous dq, dk and dv."""
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    _backward_into(*grads, dout, q, k, v, *args, tiles=tiles)
    return grads


def backward_packed(dout: Tensor, qkv: Tensor, *args) -> Tensor:
    """As backward, but from qkv (B, T, 3, H, D) to its gradient, contiguous, each part written where it belongs."""
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    _backward_into(*dqkv.unbind(2), dout, *qkv.unbind(2), *args)
    return dqkv


def _backward_into(
    dq, dk, dv, dout, q, k, v, out, logsumexp, dlogsumexp, deterministic, *options, tiles: Tiles | None = None
) -> None:
    """Three launches. dk and dv share their strides. The plain kernels use no atomics and are deterministic."""
    options = Options(*options)
    if tiles is None and not deterministic and _runs_specialised("backward", options, q, k, v, dout, dk, dv):
        from kernels.flash2 import hopper_backward  # Gluon is there by the rule

        arguments = dq, dk, dv, dout, q, k, v, out, logsumexp, dlogsumexp, options.causal, options.scale
        return hopper_backward.backward_into(*arguments)
    (batch, seq_q, heads, head_dim), (seq_k, kv_heads) = q.shape, k.shape[1:3]
    tiles, tma = tiles or choose_tiles(q, k, options), uses_tma(q, k, v, dout)
    delta = torch.empty_like(logsumexp)
    key, read_strides, sizes = (q.dtype, q.device), strides(q, k, v, dout), _sizes(q, k, options)

    def run(kernel, tile: Tile, programs: int, outputs: tuple, *extra_constants) -> None:
        reads = _read(q, tile.m, tma), _read(k, tile.n, tma), _read(v, tile.n, tma), _read(dout, tile.m, tma)
        tensors = *reads, logsumexp, delta, *outputs, options.numbers, options.documents
        numbers = *read_strides, *strides(outputs[0]), *sizes
        constants = *_constants(tile, head_dim, options, not q.is_cuda, tma), *extra_constants
        launch(kernel, key, programs, tensors, numbers, constants, num_warps=tile.warps, num_stages=tile.stages)

    with torch.cuda.device_of(q):
        rows = 64
        constants = rows, head_dim, padded_head_dim(head_dim), dlogsumexp is not None
        numbers = *strides(out, dout), heads, seq_q, 1 - options.dropout_p
        programs = batch * heads * triton.cdiv(seq_q, rows)
        launch(delta_kernel, key, programs, (out, dout, dlogsumexp, delta), numbers, constants, num_warps=4)
        tile = tiles.key_gradient
        programs = batch * kv_heads * triton.cdiv(seq_k, tile.n)
        run(key_gradient_kernel, tile, programs, (dk, dv), seq_q % tile.m != 0)
        tile = tiles.query_gradient
        programs = batch * heads * triton.cdiv(seq_q, tile.m)
        run(query_gradient_kernel, tile, programs, (dq,))
