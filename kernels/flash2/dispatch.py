"""flash2 on a GPU: choose the warp-specialised kernels of Hopper, or the plain Triton kernels and their tiles.

`uses_hopper_kernels` is the rule; `explain` describes the choice in one line.
"""

from functools import lru_cache

import torch
from torch import Tensor

from kernels.common.launching import arch_of, are_aligned, fits_tma, runs_gluon, uses_tma
from kernels.flash2.options import Options
from kernels.flash2.tiles import (
    HopperBackwardConfig,
    HopperConfig,
    HopperForwardConfig,
    PlainTiles,
    TileConfig,
    hopper_config_for,
    mask_of,
    plain_tiles_for,
    without_dq,
)
from kernels.flash2.triton_kernels import host as plain

Settings = PlainTiles | HopperConfig


def uses_hopper_kernels(pass_: str, arch: str, head_dim: int, dtype: torch.dtype, seq_k: int, options: Options) -> bool:
    """Return whether the warp-specialised kernels of hopper_forward or hopper_backward compute this pass.

    They need sm_90, Triton 3.6 or later, 16-bit inputs that TMA can read (the caller checks uses_tma), and no blocks.
    Windows and documents exclude dropout. They run for the head sizes, masks and lengths that have rows in tiles.json,
    because they were measured to be faster there. The plain kernels do the rest. They also compute dQ if the Hopper
    backward is not fused.
    """
    banded = options.window > 0 or options.documents is not None
    if not runs_gluon(arch, dtype) or options.blocks is not None or (banded and options.dropout_p > 0):
        return False
    return hopper_config_for(pass_, head_dim, _mask_of(options), _length_of(seq_k, options)) is not None


def _mask_of(options: Options) -> str:
    """Return the name of the mask in the table's rows for Hopper."""
    if options.documents is not None:
        return "documents"
    return "window" if options.window else mask_of(options.causal, options.dropout_p > 0)


def _length_of(seq_k: int, options: Options) -> int:
    """Return the length that chooses a row of the table: the number of keys that a query can see."""
    return options.window or seq_k


def deterministic_config(
    config: HopperBackwardConfig, head_dim: int, options: Options, grouped: bool
) -> HopperBackwardConfig:
    """Return the settings of a deterministic backward. If they are fused, the programs add to dQ in a fixed order.

    The plain kernel computes dQ with documents and no causal mask, because a program cannot compute its turn there. It
    also does so for grouped heads of 128, because it was measured to be faster there.
    """
    if (options.documents is not None and not options.causal) or (grouped and head_dim == 128):
        return without_dq(config, head_dim)
    return config


def explain(
    head_dim: int, dtype: torch.dtype, causal: bool, seq_len: int, arch: str, dropout_p: float = 0.0,
    deterministic: bool = False, documents: bool = False, window: int = 0, grouped: bool = False,
) -> str:  # fmt: skip
    """Return one line that says what flash2 launches for contiguous inputs of this kind on an architecture.

    grouped says that several query heads share a key/value head.
    """
    window = window if window < seq_len else 0  # as in flash2
    options = Options(None, documents or None, causal=causal, window=window, dropout_p=dropout_p)
    length = _length_of(seq_len, options)
    tiles = plain_tiles_for(arch, head_dim, dtype, causal, length, dropout_p > 0)
    loads = "TMA" if fits_tma(arch, dtype, (head_dim,)) else "pointers"  # the other strides are multiples of head_dim
    parts = {
        name: f"{t.queries}x{t.keys} in {t.warps} warps and {t.stages} stages" for name, t in tiles._asdict().items()
    }
    asked, kind = (arch, head_dim, dtype, seq_len, options), (head_dim, _mask_of(options), length)
    forward = f"forward by plain Triton, {loads}, {parts['forward']}"
    backward = f"backward by plain Triton, {loads}, {parts['key_gradient']}, {parts['query_gradient']}"
    if uses_hopper_kernels("forward", *asked):
        forward = f"forward by warp-specialised Gluon, {hopper_config_for('forward', *kind)}"
    if uses_hopper_kernels("backward", *asked):
        config = hopper_config_for("backward", *kind)
        if deterministic:
            config = deterministic_config(config, head_dim, options, grouped)
        backward = f"backward by warp-specialised Gluon, {config}"
        if not config.fused:
            backward += f", dQ by plain Triton, {parts['query_gradient']}"
        elif deterministic:
            backward += ", additions to dQ in a fixed order"
    return f"{forward}; {backward}"


def _choose(
    pass_: str, given: Settings | None, device: torch.device, dtype: torch.dtype, head_dim: int, seq_k: int,
    options: Options, tma: bool,
) -> Settings:  # fmt: skip
    """Return the given settings, or the table's. `tma` says whether TMA can read all inputs."""
    if given is not None:
        return given
    arch = arch_of(device)
    length = _length_of(seq_k, options)
    if tma and uses_hopper_kernels(pass_, arch, head_dim, dtype, seq_k, options):
        return hopper_config_for(pass_, head_dim, _mask_of(options), length)
    return plain_tiles_for(arch, head_dim, dtype, options.causal, length, options.dropout_p > 0)


def forward(q: Tensor, k: Tensor, v: Tensor, *options, tiles: Settings | None = None) -> tuple[Tensor, Tensor]:
    """Return O (B, T, H, D) contiguous and the logsumexp (B, H, T) fp32, as definition.forward does.

    `tiles`, for tuning and comparisons, replaces the table's settings and so decides which kernels run.
    """
    options = Options(*options)
    shapes = q.shape, k.shape, q.stride(), k.stride(), v.stride()
    present = options.documents is not None, options.blocks is not None
    plan = _plan_forward(q.dtype, q.device, *shapes, are_aligned(q, k, v), *present, options[3:], tiles)
    config = plan[0]
    if isinstance(config, HopperForwardConfig):
        from kernels.flash2.hopper_forward import host as hopper  # needs Gluon, which uses_hopper_kernels checks

        return hopper.forward(q, k, v, options, config)
    return plain.forward(q, k, v, options, *plan)


@lru_cache(maxsize=4096)
def _plan_forward(
    dtype: torch.dtype, device: torch.device, q_shape: torch.Size, k_shape: torch.Size,
    q_stride: tuple, k_stride: tuple, v_stride: tuple, aligned: bool, documents: bool, blocks: bool,
    options: tuple, given: Settings | None,
) -> tuple[TileConfig | HopperForwardConfig, bool, int, tuple, tuple]:  # fmt: skip
    """Return settings, whether TMA reads, programs, scalars and constants of a launch.

    The result is cached, because computing it takes the time of a launch.
    """
    (batch, seq_q, heads, head_dim), seq_k = q_shape, k_shape[1]
    options = Options(None, documents or None, blocks or None, *options)
    in_strides = q_stride[:3] + k_stride[:3] + v_stride[:3]
    tma = aligned and fits_tma(arch_of(device), dtype, in_strides)
    config = _choose("forward", given, device, dtype, head_dim, seq_k, options, tma)
    if isinstance(config, HopperForwardConfig):
        return config, tma, 0, (), ()
    tile = config.forward
    out_strides = seq_q * heads * head_dim, heads * head_dim, head_dim
    scalars = *in_strides, *out_strides, *plain.sizes_of(q_shape, k_shape, options)
    constants = plain.constants_of(tile, head_dim, options, device.type == "cpu", tma)
    return tile, tma, batch * heads * -(-seq_q // tile.queries), scalars, constants


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *args, tiles: Settings | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return contiguous dq, dk and dv, as definition.backward does."""
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    _backward_into(*grads, dout, q, k, v, *args, tiles=tiles)
    return grads


def backward_packed(dout: Tensor, qkv: Tensor, *args) -> tuple[Tensor, Tensor]:
    """Return a contiguous gradient and its sums, as definition.backward_packed does; each part is written in place."""
    *saved, with_sums = args
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    sums = torch.empty(qkv.shape[2:] if with_sums else 0, dtype=torch.float32, device=qkv.device)
    summed = _backward_into(*dqkv.unbind(2), dout, *qkv.unbind(2), *saved, sums=sums if with_sums else None)
    if with_sums and not summed:
        torch.sum(dqkv, (0, 1), dtype=sums.dtype, out=sums)
    return dqkv, sums


def _backward_into(
    dq, dk, dv, dout, q, k, v, out, logsumexp, dlogsumexp, deterministic, *options,
    tiles: Settings | None = None, sums: Tensor | None = None,
) -> bool:  # fmt: skip
    """Write dq, dk and dv, and return whether the kernels wrote `sums` too. dk and dv share their strides."""
    options = Options(*options)
    tensors = dq, dk, dv, dout, q, k, v, out, logsumexp, dlogsumexp
    kind = q.device, q.dtype, q.shape[3], k.shape[1], options
    config, delta = _choose("backward", tiles, *kind, tma=uses_tma(q, k, v, dout, dk, dv)), None
    if isinstance(config, HopperBackwardConfig):
        from kernels.flash2.hopper_backward import host as hopper  # needs Gluon, which uses_hopper_kernels checks

        if deterministic:
            config = deterministic_config(config, q.shape[3], options, grouped=k.shape[2] < q.shape[2])
        sums = sums if config.fused and dlogsumexp is None and not options.dropout_p else None
        delta = hopper.backward_into(*tensors, sums, options, config, deterministic)
        if config.fused:
            return sums is not None
        config = _choose("backward", None, *kind, tma=False)  # the plain kernels' tiles
    plain.backward_into(*tensors, options, config, delta)
    return False
