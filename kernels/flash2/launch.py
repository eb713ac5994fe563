"""What flash2 launches on a GPU: the warp-specialised kernels of Hopper, or the plain ones with their tiles.

The rule is `is_specialised`; `explain` tells in a line what it gives.
"""

import logging
from functools import cache, lru_cache

import torch
from torch import Tensor

from kernels.common.dropout import threshold
from kernels.common.launching import (
    arch_of,
    are_aligned,
    descriptor,
    fits_tma,
    launch,
    strides,
    triton_version,
    uses_tma,
)
from kernels.flash2.block_lists import BLOCK, HEADER
from kernels.flash2.options import Options
from kernels.flash2.tiles import (
    SpecialisedBackward,
    SpecialisedForward,
    Tile,
    Tiles,
    length_bucket,
    padded_head_dim,
    specialised_for,
    tiles_for,
    without_dq,
)
from kernels.flash2.triton_kernels import (
    add_pieces_kernel,
    delta_kernel,
    forward_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)

log = logging.getLogger(__name__)
Chosen = Tiles | SpecialisedForward | SpecialisedBackward


def is_specialised(pass_: str, arch: str, head_dim: int, dtype: torch.dtype, seq_k: int, options: Options) -> bool:
    """Whether the warp-specialised kernels of hopper_forward or hopper_backward compute this pass.

    They do on sm_90 under Triton 3.6 or later, for 16-bit inputs without window, documents or blocks that TMA can read
    (uses_tma), where they were measured to be the faster ones: at the head sizes, masks and lengths that tiles.json has
    settings for. All else is for the plain kernels, and so is the dQ of a backward pass that has to be deterministic:
    the specialised kernel adds it up in the order in which its programs happen to run.
    """
    if arch != "sm_90" or triton_version() < (3, 6) or dtype.itemsize != 2:
        return False
    if options.window or options.documents is not None or options.blocks is not None:
        return False
    kind = options.causal, length_bucket(seq_k), options.dropout_p > 0
    return specialised_for(pass_, head_dim, *kind) is not None


def explain(
    head_dim: int,
    dtype: torch.dtype,
    causal: bool,
    seq_len: int,
    arch: str,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    documents: bool = False,
) -> str:
    """One line: what flash2 launches for contiguous inputs of this kind on an architecture."""
    tiles = tiles_for(arch, head_dim, dtype, causal, length_bucket(seq_len), dropout_p > 0)
    loads = "TMA" if arch == "sm_90" and dtype != torch.float32 else "pointers"
    parts = {name: f"{t.m}x{t.n} in {t.warps} warps and {t.stages} stages" for name, t in tiles._asdict().items()}
    asked = arch, head_dim, dtype, seq_len, Options(None, documents or None, causal=causal, dropout_p=dropout_p)
    kind = head_dim, causal, length_bucket(seq_len), dropout_p > 0
    forward = f"forward by plain Triton, {loads}, {parts['forward']}"
    backward = f"backward by plain Triton, {loads}, {parts['key_gradient']}, {parts['query_gradient']}"
    if is_specialised("forward", *asked):
        forward = f"forward by warp-specialised Gluon, {specialised_for('forward', *kind)}"
    if is_specialised("backward", *asked):
        config = specialised_for("backward", *kind)
        config = without_dq(config, head_dim) if deterministic else config
        backward = f"backward by warp-specialised Gluon, {config}"
        if not config.fused:
            backward += f", dQ by plain Triton, {parts['query_gradient']}"
    return f"{forward}; {backward}"


@cache
def _tell(pass_: str, kind: str, head_dim: int, dtype: torch.dtype, arch: str) -> None:
    """One line of log per kind of kernels, the first time that they run."""
    log.info("flash2 %s of head_dim %d in %s on %s: %s kernels", pass_, head_dim, dtype, arch, kind)


def _choose(
    pass_: str,
    chosen: Chosen | None,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    seq_k: int,
    options: Options,
    tma: bool,
) -> Chosen:
    """The settings of the warp-specialised kernel of a pass, or, where that is not in use, the tiles of the plain ones.

    `tma` says whether TMA can read all inputs.
    """
    if chosen is not None:
        return chosen
    arch, kind = arch_of(device), (options.causal, length_bucket(seq_k), options.dropout_p > 0)
    specialised = tma and is_specialised(pass_, arch, head_dim, dtype, seq_k, options)
    _tell(pass_, "warp-specialised Gluon" if specialised else "plain Triton", head_dim, dtype, arch)
    return specialised_for(pass_, head_dim, *kind) if specialised else tiles_for(arch, head_dim, dtype, *kind)


def _read(x: Tensor, rows: int, tma: bool):
    """x as a kernel reads it, `rows` of one head at a time."""
    return descriptor(x, [1, rows, 1, padded_head_dim(x.shape[3])]) if tma else x


def _constants(tile: Tile, head_dim: int, options: Options, interpreted: bool, tma: bool) -> tuple:
    """M, N, HEAD_DIM, D, CAUSAL, WINDOW, DOCUMENTS, BLOCKS, DROPOUT, UPCAST, TMA: what the kernels are compiled for."""
    masks = options.causal, options.window > 0, options.documents is not None, options.blocks is not None
    return tile.m, tile.n, head_dim, padded_head_dim(head_dim), *masks, options.dropout_p > 0, interpreted, tma


def _sizes(q_shape: torch.Size, k_shape: torch.Size, options: Options) -> tuple:
    """heads, groups, seq_q, seq_k, window, scale, threshold, keep_scale."""
    (seq_q, heads), (seq_k, kv_heads) = q_shape[1:3], k_shape[1:3]
    dropout = threshold(options.dropout_p), 1 / (1 - options.dropout_p)
    return heads, heads // kv_heads, seq_q, seq_k, options.window, options.scale, *dropout


def forward(q: Tensor, k: Tensor, v: Tensor, *options, tiles: Chosen | None = None) -> tuple[Tensor, Tensor]:
    """Same contract as definition.forward: O (B, T, H, D) contiguous, logsumexp (B, H, T) fp32.

    `tiles`, for those who tune and compare, takes the place of the table's, and decides which kernels run.
    """
    options = Options(*options)
    key = q.dtype, q.device
    shapes = q.shape, k.shape, q.stride(), k.stride(), v.stride()
    given = options.documents is not None, options.blocks is not None
    rest = are_aligned(q, k, v), *given, options[3:], tiles
    config, tma, programs, scalars, constants = _plan_forward(*key, *shapes, *rest)
    if isinstance(config, SpecialisedForward):
        from kernels.flash2 import hopper_forward  # Gluon is there by the rule

        return hopper_forward.forward(q, k, v, options, config)
    batch, seq_q, heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    logsumexp = torch.empty((batch, heads, seq_q), dtype=torch.float32, device=q.device)
    reads = _read(q, config.m, tma), _read(k, config.n, tma), _read(v, config.n, tma)
    tensors = *reads, out, logsumexp, *options[:3]
    launched = {"num_warps": config.warps, "num_stages": config.stages}
    with torch.cuda.device_of(q):
        launch(forward_kernel, key, programs, tensors, scalars, constants, **launched)
    return out, logsumexp


@lru_cache(maxsize=4096)
def _plan_forward(
    dtype: torch.dtype,
    device: torch.device,
    q_shape: torch.Size,
    k_shape: torch.Size,
    q_stride: tuple,
    k_stride: tuple,
    v_stride: tuple,
    aligned: bool,
    documents: bool,
    blocks: bool,
    options: tuple,
    chosen: Chosen | None,
) -> tuple[Tile | SpecialisedForward, bool, int, tuple, tuple]:
    """All of a forward launch but its tensors: settings, whether TMA reads, programs, scalars and constants.

    Kept per kind of inputs, since working it out takes the host as long as launching.
    """
    (batch, seq_q, heads, head_dim), seq_k = q_shape, k_shape[1]
    options = Options(None, documents or None, blocks or None, *options)
    in_strides = q_stride[:3] + k_stride[:3] + v_stride[:3]
    tma = aligned and fits_tma(device, dtype, in_strides)
    config = _choose("forward", chosen, device, dtype, head_dim, seq_k, options, tma)
    if isinstance(config, SpecialisedForward):
        return config, tma, 0, (), ()
    tile = config.forward
    out_strides = seq_q * heads * head_dim, heads * head_dim, head_dim
    scalars = *in_strides, *out_strides, *_sizes(q_shape, k_shape, options)
    constants = _constants(tile, head_dim, options, device.type == "cpu", tma)
    return tile, tma, batch * heads * -(-seq_q // tile.m), scalars, constants


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *args, tiles: Chosen | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Same contract as definition.backward: contiguous dq, dk and dv."""
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    _backward_into(*grads, dout, q, k, v, *args, tiles=tiles)
    return grads


def backward_packed(dout: Tensor, qkv: Tensor, *args) -> tuple[Tensor, Tensor]:
    """Same contract as definition.backward_packed: a contiguous gradient, each part written where it belongs."""
    *saved, with_sums = args
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    sums = torch.empty(qkv.shape[2:] if with_sums else 0, dtype=torch.float32, device=qkv.device)
    summed = _backward_into(*dqkv.unbind(2), dout, *qkv.unbind(2), *saved, sums=sums if with_sums else None)
    if with_sums and not summed:
        torch.sum(dqkv, (0, 1), dtype=sums.dtype, out=sums)
    return dqkv, sums


def _backward_into(
    dq,
    dk,
    dv,
    dout,
    q,
    k,
    v,
    out,
    logsumexp,
    dlogsumexp,
    deterministic,
    *options,
    tiles: Chosen | None = None,
    sums: Tensor | None = None,
) -> bool:
    """Three launches, of the plain kernels with divided lists of blocks four. dk and dv share their strides. Whether
    their kernels have written `sums`, if that is given.
    """
    options = Options(*options)
    kind = q.device, q.dtype, q.shape[3], k.shape[1], options
    config, delta = _choose("backward", tiles, *kind, uses_tma(q, k, v, dout, dk, dv)), None
    if isinstance(config, SpecialisedBackward):
        from kernels.flash2 import hopper_backward  # Gluon is there by the rule

        config = without_dq(config, q.shape[3]) if deterministic else config
        sums = sums if config.fused and dlogsumexp is None and not options.dropout_p else None
        tensors = dq, dk, dv, dout, q, k, v, out, logsumexp, dlogsumexp
        delta = hopper_backward.backward_into(*tensors, sums, options, config)
        if config.fused:
            return sums is not None
        mask = options.causal, length_bucket(k.shape[1]), options.dropout_p > 0
        config = tiles_for(arch_of(q.device), q.shape[3], q.dtype, *mask)
    _plain_backward_into(dq, dk, dv, dout, q, k, v, out, logsumexp, dlogsumexp, options, config, delta)
    return False


def _plain_backward_into(
    dq, dk, dv, dout, q, k, v, out, logsumexp, dlogsumexp, options: Options, tiles: Tiles, delta: Tensor | None
) -> None:
    """By the plain kernels, which use no atomics and are deterministic: dq alone if delta is given, else all three."""
    (batch, seq_q, heads, head_dim), (seq_k, kv_heads) = q.shape, k.shape[1:3]
    tma = uses_tma(q, k, v, dout)
    key, read_strides, sizes = (q.dtype, q.device), strides(q, k, v, dout), _sizes(q.shape, k.shape, options)

    def run(kernel, tile: Tile, programs: int, outputs: tuple, extra_scalars=(), extra_constants=()) -> None:
        reads = _read(q, tile.m, tma), _read(k, tile.n, tma), _read(v, tile.n, tma), _read(dout, tile.m, tma)
        tensors = *reads, logsumexp, delta, *outputs, *options[:3]
        scalars = *read_strides, *strides(outputs[0]), *sizes, *extra_scalars
        constants = *_constants(tile, head_dim, options, not q.is_cuda, tma), *extra_constants
        launch(kernel, key, programs, tensors, scalars, constants, num_warps=tile.warps, num_stages=tile.stages)

    with torch.cuda.device_of(q):
        if delta is None:
            delta, rows = torch.empty_like(logsumexp), 64
            constants = rows, head_dim, padded_head_dim(head_dim), dlogsumexp is not None
            scalars = *strides(out, dout), heads, seq_q, 1 - options.dropout_p
            programs = batch * heads * -(-seq_q // rows)
            launch(delta_kernel, key, programs, (out, dout, dlogsumexp, delta), scalars, constants, num_warps=4)
            tile, key_lists, early, pieces = tiles.key_gradient, 0, 0, None
            programs, step = batch * kv_heads * -(-seq_k // tile.n), tile.m
            if options.blocks is not None:
                key_lists, early = _lists_of_keys(options.blocks)
                programs, step = batch * kv_heads * key_lists * (BLOCK // tile.n), BLOCK
                pieces = logsumexp.new_empty((2, early, batch * kv_heads, BLOCK, padded_head_dim(head_dim)))
            run(key_gradient_kernel, tile, programs, (dk, dv, pieces), (key_lists, early), (seq_q % step != 0,))
            if early:
                tensors, scalars = (pieces, dk, dv, options.blocks), (*strides(dk), kv_heads, seq_k, early)
                constants = rows, head_dim, padded_head_dim(head_dim), not q.is_cuda
                programs = early * batch * kv_heads * (BLOCK // rows)
                launch(add_pieces_kernel, key, programs, tensors, scalars, constants, num_warps=4)
        tile = tiles.query_gradient
        programs = batch * heads * -(-seq_q // tile.m)
        run(query_gradient_kernel, tile, programs, (dq,))


def _lists_of_keys(blocks: Tensor) -> tuple[int, int]:
    """How many rows blocks.listed has for keys, and how many of them, the first, to start before all others.

    Among these are all rows of lists in several: of such a list there are at most two for each beyond one.
    """
    n = blocks.shape[1] - HEADER
    key_lists = len(blocks) - n
    return key_lists, min(2 * (key_lists - n), key_lists)
