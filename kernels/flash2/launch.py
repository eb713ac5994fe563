"""Launching the Triton kernels of flash2: which tiles, by pointer or by TMA, strides and grids."""

from functools import cache

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.flash2.dropout import threshold
from kernels.flash2.options import Options
from kernels.flash2.tiles import Tile, Tiles, length_bucket, padded_head_dim, tiles_for
from kernels.flash2.triton_kernels import delta_kernel, forward_kernel, key_gradient_kernel, query_gradient_kernel


@cache
def arch_of(device: torch.device) -> str:
    """ "sm_90", "gfx942", ...; "cpu" under the interpreter."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def choose_tiles(q: Tensor, k: Tensor, options: Options) -> Tiles:
    """The table's tiles for these inputs."""
    return tiles_for(arch_of(q.device), q.shape[3], q.dtype, options.causal, length_bucket(k.shape[1]))


def explain(head_dim: int, dtype: torch.dtype, causal: bool, seq_len: int, arch: str) -> str:
    """One line: what flash2 launches for contiguous inputs of this kind on an architecture."""
    tiles = tiles_for(arch, head_dim, dtype, causal, length_bucket(seq_len))
    loads = "TMA" if arch == "sm_90" and dtype != torch.float32 else "pointers"
    parts = [f"{name} {t.m}x{t.n}, {t.warps} warps, {t.stages} stages" for name, t in tiles._asdict().items()]
    return f"plain Triton, loads by {loads}; {'; '.join(parts)}"


def uses_tma(*inputs: Tensor) -> bool:
    """Whether the kernels read (batch, length, heads, head_dim) inputs through TMA, Hopper's copy engine.

    On sm_90, for 16-bit inputs whose address and strides it takes: multiples of 16 bytes, none of them zero. By pointer
    otherwise: on architectures where it has not been measured, and for views cut at odd places.
    """
    first = inputs[0]
    if arch_of(first.device) != "sm_90" or not _strides_fit_tma(first.dtype, _strides(*inputs)):
        return False
    return all(x.data_ptr() % 16 == 0 for x in inputs)


@cache
def _strides_fit_tma(dtype: torch.dtype, strides: tuple[int, ...]) -> bool:
    return dtype.itemsize == 2 and all(stride > 0 and stride % 8 == 0 for stride in strides)


def _read(x: Tensor, rows: int, tma: bool) -> Tensor | TensorDescriptor:
    """x as a kernel reads it, `rows` of one head at a time."""
    if not tma:
        return x
    # Made without its checks, which take microseconds and find what uses_tma has found.
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides = x, x.shape, x.stride()
    descriptor.block_shape = [1, rows, 1, padded_head_dim(x.shape[3])]
    return descriptor


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Batch, row and head strides of (batch, length, heads, head_dim) tensors."""
    return tuple(stride for x in tensors for stride in x.stride()[:3])


_compiled: dict[tuple, object] = {}


def _launch(kernel, key: tuple, programs: int, tensors: tuple, numbers: tuple, constants: tuple, tile: Tile) -> None:
    """kernel[programs](*tensors, *numbers, *constants), with the tile's warps and stages.

    Triton inspects every argument at every call to choose among its compilations of the kernel, which takes longer than
    launching it. So the choice is kept for arguments of the same `key`, numbers and alignment, on which it depends.
    """
    aligned = tuple(x.data_ptr() % 16 == 0 for x in tensors if isinstance(x, Tensor))
    key = (kernel, key, numbers, constants, tile, aligned)
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[programs, 1, 1](*tensors, *numbers, *constants)
        return
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    compiled = kernel[(programs,)](*tensors, *numbers, *constants, **options)
    if compiled is not None:  # the interpreter compiles nothing
        _compiled[key] = compiled


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

    `tiles` is for those who tune; the table's by default.
    """
    options = Options(*options)
    batch, seq_q, heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    logsumexp = torch.empty((batch, heads, seq_q), dtype=torch.float32, device=q.device)
    tile, tma = (tiles or choose_tiles(q, k, options)).forward, uses_tma(q, k, v)
    reads = _read(q, tile.m, tma), _read(k, tile.n, tma), _read(v, tile.n, tma)
    with torch.cuda.device_of(q):
        _launch(
            forward_kernel,
            (q.dtype, q.device),
            batch * heads * triton.cdiv(seq_q, tile.m),
            (*reads, out, logsumexp, options.numbers, options.documents),
            (*_strides(q, k, v, out), *_sizes(q, k, options)),
            _constants(tile, head_dim, options, not q.is_cuda, tma),
            tile,
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
    """Three launches, no atomics, hence deterministic. dk and dv share their strides."""
    options = Options(*options)
    (batch, seq_q, heads, head_dim), (seq_k, kv_heads) = q.shape, k.shape[1:3]
    tiles, tma = tiles or choose_tiles(q, k, options), uses_tma(q, k, v, dout)
    delta = torch.empty_like(logsumexp)
    key, strides, sizes = (q.dtype, q.device), _strides(q, k, v, dout), _sizes(q, k, options)

    def launch(kernel, tile: Tile, programs: int, outputs: tuple, *extra_constants) -> None:
        reads = _read(q, tile.m, tma), _read(k, tile.n, tma), _read(v, tile.n, tma), _read(dout, tile.m, tma)
        constants = _constants(tile, head_dim, options, not q.is_cuda, tma)
        _launch(
            *(kernel, key, programs, (*reads, logsumexp, delta, *outputs, options.numbers, options.documents)),
            *((*strides, *_strides(outputs[0]), *sizes), (*constants, *extra_constants), tile),
        )

    with torch.cuda.device_of(q):
        rows = Tile(64, 64, 4, 1)
        constants = rows.m, head_dim, padded_head_dim(head_dim), dlogsumexp is not None
        programs = batch * heads * triton.cdiv(seq_q, rows.m)
        tensors = out, dout, dlogsumexp, delta
        _launch(delta_kernel, key, programs, tensors, (*_strides(out, dout), heads, seq_q), constants, rows)
        tile = tiles.key_gradient
        programs = batch * kv_heads * triton.cdiv(seq_k, tile.n)
        launch(key_gradient_kernel, tile, programs, (dk, dv), seq_q % tile.m != 0)
        tile = tiles.query_gradient
        programs = batch * heads * triton.cdiv(seq_q, tile.m)
        launch(query_gradient_kernel, tile, programs, (dq,))
