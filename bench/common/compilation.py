"""Compile the Triton attention kernels for a GPU that this machine does not have."""

from collections.abc import Iterable

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.flash2.options import Options
from kernels.flash2.tiles import TileConfig
from kernels.flash2.triton_kernels import host

TARGETS = {f"sm_{capability}": GPUTarget("cuda", capability, 32) for capability in (75, 80, 86, 89, 90, 100, 103, 120)}
TARGETS |= {arch: GPUTarget("hip", arch, 64) for arch in ("gfx90a", "gfx942")}
MULTIPLE = "i32 of 16"  # a multiple of 16, which Triton detects at a launch


def compile_triton(kernel, types: Iterable[str], constants: dict, target: str, **options):
    """Compile a kernel for pointers that are multiples of 16 bytes, as torch allocates them."""
    types = list(types)
    kinds = ["i32" if kind == MULTIPLE else kind for kind in types]
    aligned = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(types) if x.startswith("*") or x == MULTIPLE}
    source = ASTSource(kernel, dict(zip(kernel.arg_names, kinds, strict=True)), constants, aligned)
    return triton.compile(source, target=TARGETS[target], options=options)


def attention_types(kernel, constants: dict, dtype: str, fp32: tuple[str, ...] = ()) -> Iterable[str]:
    """Yield the types of an attention kernel's arguments by their names; tensors in `fp32` do not have `dtype`."""
    for name in kernel.arg_names:
        if name in constants:
            yield "constexpr"
        elif name in ("scale", "keep_scale"):
            yield "fp32"
        elif constants.get("TMA") and name in ("q", "k", "v", "dout"):
            yield f"tensordesc<{dtype}[1,{constants['N' if name in ('k', 'v') else 'M']},1,{constants['D']}]>"
        elif name in ("heads", "groups", "kv_heads", "seq_q", "seq_k", "window", "threshold", "key_lists", "early"):
            yield "i32"
        elif name.startswith("s") and "_" in name:  # strides
            yield MULTIPLE
        elif name in ("numbers", "documents", "blocks"):
            yield "*i32"
        else:
            yield "*fp32" if name in ("logsumexp", "delta", "pieces", "l", "m", *fp32) else f"*{dtype}"


def compile_attention(kernel, values: Iterable, tile: TileConfig, dtype: str, target: str, fp32: tuple[str, ...] = ()):
    """Compile an attention kernel; its last arguments are constants with these values."""
    values = tuple(values)
    constants = dict(zip(kernel.arg_names[-len(values) :], values, strict=True))
    types = attention_types(kernel, constants, dtype, fp32)
    return compile_triton(kernel, types, constants, target, num_warps=tile.warps, num_stages=tile.stages)


def compile_flash2(
    name: str, tile: TileConfig, head_dim: int, options: Options, dtype: str, target: str, tma: bool = False
):
    """Compile one of flash2's plain kernels at a tile; `name` is forward, key_gradient or query_gradient."""
    values = host.constants_of(tile, head_dim, options, interpreted=False, tma=tma)
    bounded = (False,) if name == "key_gradient" else ()
    return compile_attention(getattr(host, f"{name}_kernel"), values + bounded, tile, dtype, target)
