"""Compare attention kernels on one GPU: python -m bench.attention.

It measures the shapes of the FlashAttention-2 paper (16k tokens, hidden size 2048, heads of 64 and 128) and a few more.
Every variant is first compared with an fp64 reference, then timed in turn with the others.

Examples:
  python -m bench.attention                                                  all shapes and variants
  python -m bench.attention 'cells=[d64_causal,gpt2]' 'variants=[sdpa_cudnn,flash2]'
  python -m bench.attention batch=4 heads=16 seq_len=4096 head_dim=128 causal=true
  python -m bench.attention function=my_module:my_attention check=true       is my kernel right?
  python -m bench.attention function=my_module:my_attention out=rows.json    and how fast is it?
"""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.attention import charts
from bench.attention.contenders import available
from bench.attention.function_check import check_function
from bench.attention.measurement import measure_all
from bench.attention.shapes import DTYPES, HIDDEN, SHAPES, TOKENS, AttentionShape
from bench.common.command_line import check_choice, check_output_file, check_positive, launch
from bench.common.results import environment, results_folder
from bench.common.timing import Gpu
from errors import UserError
from model.attention import Attention, Custom, load_function
from model.attention.custom import is_installed

LARGEST = {"seq_len": 2**24, "batch": 2**20, "heads": 2**16, "kv_heads": 2**16, "head_dim": 1024, "rounds": 10_000}
ARCHITECTURES = "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "gfx90a", "gfx942"
UNUSED = {"explain": ("function", "variants", "rounds", "out")}
UNUSED["check"] = "cells", "seq_len", "variants", "dtype", "rounds", "out"


@dataclass
class AttentionSettings:
    """What `python -m bench.attention` reads."""

    cells: list[str] | None = None
    """Names of shapes, or their beginnings, such as d64_causal; null for all. explain=true lists the names."""
    variants: list[str] | None = None
    """Names of variants, such as sdpa_cudnn; null for all that this machine has."""
    function: str | None = None
    """An attention function of yours, module:function, which is checked and then timed beside the variants."""
    check: bool = False
    """Only check `function`. Without a GPU this is always so."""
    dtype: str = "bfloat16"
    """bfloat16, float16 or float32. check=true tries all three."""
    seq_len: int | None = None
    """Measure one shape of your own with this length, instead of `cells`."""
    batch: int | None = None
    """Sequences of your shape; null for 16384 tokens."""
    heads: int | None = None
    """Query heads of your shape; null for a hidden size of 2048."""
    kv_heads: int | None = None
    """Key/value heads of your shape; null for as many as heads."""
    head_dim: int | None = None
    """Head size of your shape; null for 64."""
    causal: bool = False
    """Mask your shape causally."""
    rounds: int = 20
    """Smallest number of samples of each variant and pass. It is rounded up, so that the orders are balanced."""
    out: Path | None = None
    """Results file. By default only a run of all shapes and variants writes bench/results/<this GPU>/attention.json."""
    explain: bool = False
    """Only print what flash2 would launch for each shape."""
    arch: str | None = None
    """Architecture for `explain`, such as sm_80; null for the one of this machine, or sm_90 if it has no GPU."""

    def __post_init__(self):
        for key, most in LARGEST.items():
            check_positive(self, key, most=most)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("arch", self.arch, ARCHITECTURES)
        check_output_file("out", self.out)
        if self.check and not self.function:
            raise UserError("check=true checks a function of yours; name it with function=module:function")
        if self.arch and not self.explain:
            raise UserError(f"arch={self.arch} has no effect; add explain=true, or leave arch out")
        for mode, key in ((mode, key) for mode, keys in UNUSED.items() if getattr(self, mode) for key in keys):
            if getattr(self, key) != getattr(AttentionSettings, key):  # its default
                raise UserError(f"{key}=... has no effect with {mode}=true; leave one of the two out")


def run(settings: AttentionSettings) -> None:
    """Measure; or with `explain` or `check`, only print launches or check the function."""
    shapes, variants = chosen_shapes(settings), chosen_variants(settings)
    if settings.explain:
        return explain(shapes, settings.arch)
    on_gpu = torch.cuda.is_available()
    if not (on_gpu or settings.function):
        raise UserError("bench.attention finds no GPU; without one, use explain=true or function=module:function")
    counts = check_function(settings.function, "cuda" if on_gpu else "cpu") if settings.function else Counter()
    if not (on_gpu or settings.check):
        print("This machine has no GPU, so the function was checked but not timed.")
    if on_gpu and not settings.check:
        out = destination(settings)
        rows = measure_all(shapes, variants, Gpu(), settings.rounds, out)
        if out:
            charts.draw(rows, out, environment())
        for row in rows:
            if (row["variant"], row["status"]) == (settings.function, "failed"):
                raise UserError(f"function={settings.function} failed in a timed shape: {row['message']}; see the rows")
    elif not counts["ok"] + counts["wrong"]:  # a shape that is timed is also checked, so timing needs no such case
        raise UserError(f"function={settings.function} supports none of the cases; see the reasons above")
    if wrong := counts["wrong"]:
        raise UserError(f"function={settings.function} computes wrong results in {wrong} cases; see the table above")


def chosen_shapes(settings: AttentionSettings) -> list[AttentionShape]:
    """Return the shapes of SHAPES that the settings name, or the one shape that they describe."""
    if settings.seq_len and settings.cells:
        raise UserError(f"cells=[{','.join(settings.cells)}] has no effect with seq_len; leave one of the two out")
    if settings.seq_len:
        return [own_shape(settings)]
    if any((settings.batch, settings.heads, settings.kv_heads, settings.head_dim, settings.causal)):
        raise UserError(
            "seq_len=null leaves your own shape incomplete; give seq_len=..., or choose cells=[...] instead"
        )
    names = [shape.name for shape in SHAPES]
    wanted = names if settings.cells is None else settings.cells
    if not wanted:
        raise UserError("cells=[] is empty; give at least one value")
    for part in wanted:
        if not any(f"{name}_".startswith(f"{part}_") for name in names):
            raise UserError(f"cells=[{part}] is unknown; choose among {', '.join(names)}")
    shapes = [shape for shape in SHAPES if any(f"{shape.name}_".startswith(f"{part}_") for part in wanted)]
    return [replace(shape, dtype=settings.dtype) for shape in shapes]


def own_shape(settings: AttentionSettings) -> AttentionShape:
    length, head_dim = settings.seq_len, settings.head_dim or 64
    batch, heads = settings.batch or max(TOKENS // length, 1), settings.heads or max(HIDDEN // head_dim, 1)
    kv_heads = settings.kv_heads or heads
    if heads % kv_heads:
        raise UserError(f"heads={heads} is not a multiple of kv_heads={kv_heads}; give a multiple")
    return AttentionShape("shape", batch, length, heads, head_dim, settings.causal, kv_heads, dtype=settings.dtype)


def chosen_variants(settings: AttentionSettings) -> dict[str, Attention]:
    """Return the variants that the settings ask for, and the user's function under its own name."""
    variants = available()
    wanted = list(variants) if settings.variants is None else settings.variants
    check_choice("variants", wanted, variants)
    chosen = {name: variants[name] for name in wanted}
    if settings.function:
        chosen[settings.function] = Custom(f"function={settings.function}", load_function(settings.function))
    return chosen


def destination(settings: AttentionSettings) -> Path | None:
    """Return the results file: `out`, or the GPU's own file if all shapes and variants are measured."""
    part = settings.cells or settings.variants or settings.seq_len or settings.function or settings.dtype != "bfloat16"
    return settings.out or (None if part else results_folder() / "attention.json")


def explain(shapes: list[AttentionShape], arch: str | None) -> None:
    """Print what flash2 would launch for each shape."""
    if not 16 <= shapes[0].head_dim <= 256:
        raise UserError(f"head_dim={shapes[0].head_dim} does not suit flash2; give 16 to 256 with explain=true")
    if not is_installed("triton"):
        raise UserError("explain=true needs Triton, which this machine lacks; install it or use another machine")
    from kernels.common.launching import arch_of
    from kernels.flash2 import dispatch
    from kernels.flash2.tiles import check_arch

    reason = ""
    if arch is None and torch.cuda.is_available():
        arch = arch_of(torch.device("cuda"))
    elif arch is None:
        arch, reason = "sm_90", ", as an example because this machine has no GPU; arch=... describes another one"
    try:
        check_arch(arch)
    except ValueError as error:
        raise UserError(f"arch={arch} does not run flash2: {error}") from error
    print(f"flash2 on {arch}{reason}:")
    for shape in shapes:
        kernel = dispatch.explain(shape.head_dim, DTYPES[shape.dtype], shape.causal, shape.seq_len, arch)
        print(f"{shape.name:17} {kernel}")


if __name__ == "__main__":
    launch(run, AttentionSettings)
