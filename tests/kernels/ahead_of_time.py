"""Compile every kernel for Hopper and AMD GPUs, and print one JSON line per kernel. cards.py has the other GPUs.

Run the program in a process of its own, without the interpreter of Triton: python -m tests.kernels.ahead_of_time

With the argument "few", the program compiles for sm_90 only. It then takes two shapes of the plain attention kernels
and every third of Hopper's attention kernels. With "gluon", it compiles only the Gluon kernels among these.

A row names Triton's release, the target and the kernel ("group" and "name"). It has the bytes of machine code and of
shared memory, the threads of a program and, for sm_90, the results of machine_code.py. The rows of FP8 kernels list the
moves of FP8 tiles.
"""

import itertools
import json
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import triton
from triton.experimental.gluon._runtime import GluonASTSource

from bench.common.compilation import MULTIPLE, TARGETS, compile_attention, compile_flash2, compile_triton
from kernels.adamw import triton_kernels as adamw
from kernels.common.launching import triton_version
from kernels.cross_entropy import hopper as hopper_loss
from kernels.cross_entropy import triton_kernels as cross_entropy
from kernels.flash1 import launch as flash1_launch
from kernels.flash1 import triton_kernels as flash1
from kernels.flash2.hopper_backward import host as hopper_backward
from kernels.flash2.hopper_forward import host as hopper_forward
from kernels.flash2.options import Options
from kernels.flash2.tiles import TileConfig, plain_tiles_for, read_table, without_dq
from kernels.flash2.triton_kernels import host as plain
from kernels.fp8 import triton_kernels as fp8
from kernels.fp8.definition import E4M3, E5M2
from kernels.fused_softmax import triton_kernels as softmax
from kernels.fused_softmax.op import LONGEST_ROW
from kernels.gelu import hopper as hopper_gelu
from kernels.gelu import triton_kernels as gelu
from kernels.layer_norm import triton_kernels as layer_norm
from kernels.linear import hopper as hopper_linear
from tests.kernels import gluon_signatures as signatures
from tests.kernels.flash2_cases import hopper_configs
from tests.kernels.machine_code import assembler_report, disassembled, lost_operands, spills_beside_products

# The largest shared memory of a block in bytes, by the vendors' programming guides.
SHARED_MEMORY = {"sm_90": 227 * 1024, "gfx90a": 65536, "gfx942": 65536}
# Shapes: head_dim, dtype, causal, dropout.
COMMON = [(64, "bf16", False, False), (80, "bf16", True, False)]
SMALL, LARGE = (16, "bf16", True, False), (256, "bf16", True, False)
DROPOUT, FP32 = (32, "bf16", False, True), (40, "fp32", True, False)
SHAPES = {
    "sm_90": [*COMMON, SMALL, LARGE, DROPOUT, FP32],
    "gfx90a": [*COMMON, DROPOUT],
    "gfx942": [*COMMON, LARGE, FP32],
}
LONG = 16384  # tokens, beyond the limits of the table of tiles
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def compile_gluon(kernel, signature: dict, constants: dict, options: dict, multiples: tuple[str, ...] = ()):
    """Compile a kernel for Hopper. Pointers and the arguments named in `multiples` are multiples of 16."""
    named = enumerate(signature.items())
    aligned = {(i,): [["tt.divisibility", 16]] for i, (name, x) in named if x.startswith("*") or name in multiples}
    return triton.compile(GluonASTSource(kernel, signature, constants, aligned), TARGETS["sm_90"], options)


def report(target: str, group: str, name, compiled) -> dict:
    """Return the row of one kernel."""
    binary = compiled.asm.get("cubin") or compiled.asm.get("hsaco")
    row = {"triton": triton.__version__, "target": target, "group": group, "name": name}
    row |= {"bytes": len(binary), "shared": compiled.metadata.shared}
    row |= {"threads": compiled.metadata.num_warps * TARGETS[target].warp_size}
    return row | (assembler_report(compiled, target) if target == "sm_90" else {})


def compile_plain(group, target, head_dim, dtype, causal, dropout, seq_len=LONG, blocks=None) -> list[dict]:
    """Compile flash2's three plain kernels for one shape; block-sparse if `blocks` is given."""
    tiles = plain_tiles_for(target, head_dim, DTYPES[dtype], causal, seq_len, dropout)
    options, rows = Options(blocks=blocks, causal=causal, dropout_p=0.1 if dropout else 0.0), []
    for name, tile in tiles._asdict().items():
        tma = target == "sm_90" and dtype != "fp32"
        compiled = compile_flash2(name, tile, head_dim, options, dtype, target, tma)
        rows.append(report(target, group, [name, head_dim, dtype, causal, dropout, seq_len], compiled))
    return rows


def compile_baselines(target: str) -> list[dict]:
    """Compile flash2's block-sparse kernels and flash1, for Hopper at all its tiles."""
    rows = compile_plain("block_sparse", target, 64, "bf16", True, False, blocks=True)
    compiled = compile_attention(plain.add_pieces_kernel, (64, 80, 128, False), TileConfig(0, 0, 4, 1), "bf16", target)
    rows.append(report(target, "block_sparse", "add_pieces", compiled))
    shapes = [(64, "bf16"), (40, "fp32")] + [(80, "fp16"), (128, "bf16"), (256, "bf16")] * (target == "sm_90")
    for head_dim, dtype in shapes:
        forward, backward = flash1_launch.tiles_for(target, head_dim, DTYPES[dtype])
        kernels = (flash1.forward_kernel, forward, "out"), (flash1.backward_kernel, backward, "dq")
        for kernel, tile, summed in kernels:
            values = flash1_launch.constants_of(tile, head_dim, True, False, False, interpreted=False)
            compiled = compile_attention(kernel, values, tile, dtype, target, fp32=(summed,))
            rows.append(report(target, "flash1", [kernel.__name__, head_dim, dtype], compiled))
    return rows


def compile_hopper(pass_: str, head_dim: int, dtype: str, mask: str, config, ordered: bool = False) -> list[dict]:
    """Compile flash2's warp-specialised kernel of one pass. If `ordered`, additions to dQ have an order."""
    kernel = {"forward": hopper_forward.forward_kernel, "backward": hopper_backward.main_kernel}[pass_]
    signature, constants, options = signatures.attention(head_dim, DTYPES[dtype], mask, config, ordered)
    named = {kernel.arg_names[key[0]] if isinstance(key, tuple) else key: x for key, x in constants.items()}
    assert (named["CAUSAL"], named["DROPOUT"]) == (mask != "full", mask == "dropout")
    assert (named["WINDOW"], named["DOCUMENTS"]) == (mask == "window", mask == "documents")
    compiled = compile_gluon(kernel, signature, constants, options)
    code = disassembled(compiled)
    row = report("sm_90", "hopper", [pass_, head_dim, dtype, mask, config, *([True] if ordered else [])], compiled)
    row["beside_products"] = spills_beside_products(code, config.consumers if pass_ == "forward" else 1)
    return [row | ({"lost": lost_operands(code)} if pass_ == "backward" else {})]


def compile_fused(name: str, *options: bool) -> list[dict]:
    """Compile a matrix product of Hopper with work in its epilogue: "gelu", "sum" or, for the loss, "exponentials"."""
    if name == "gelu":
        kernel, compilation = hopper_gelu.linear_gelu_kernel, signatures.gelu(*options)
    elif name == "sum":
        kernel, compilation = hopper_linear.linear_sum_kernel, signatures.linear(*options)
    else:
        kernel, compilation = hopper_loss.linear_exponentials_kernel, signatures.exponentials()
    compiled = compile_gluon(kernel, *compilation, multiples=("columns", "depth"))
    return [report("sm_90", "fused", [name, *options], compiled)]


def others(dtype: str, target: str) -> list[tuple]:
    """List the Triton kernels that are not attention: name, kernel, types of arguments, constants in order, warps.

    Types: x pointer to `dtype`, f to fp32, n to int32, l to int64; i integer, j multiple of 16, s fp32 scalar.
    """
    *softmax_tile, softmax_warps = softmax.tile(LONGEST_ROW, target)
    softmax_constants = *softmax_tile, True, True, True, False
    *gelu_tile, gelu_warps = gelu.FORWARD
    *gradient_tile, gradient_warps = gelu.BACKWARD
    loss, loss_warps = cross_entropy, cross_entropy.warps_of(cross_entropy.LONGEST_BLOCK, target)
    rows = [
        ("adamw", adamw.adamw_kernel, "lnffsssssss", (adamw.CHUNK, True), adamw.WARPS),
        ("loss", loss.cross_entropy_kernel, "xlfiii", (loss.LONGEST_BLOCK, True, False), loss_warps),
        ("loss targets", loss.cross_entropy_target_kernel, "xxlfij", loss.TARGETS_TILE, loss.TARGETS_WARPS),
        ("loss sums", loss.cross_entropy_sums_kernel, "xflffjii", (loss.SUMS_ROWS, 256, False), loss.SUMS_WARPS),
        ("rescale", loss.cross_entropy_rescale_kernel, "xxxxlfij", (*loss.RESCALE_TILE, False), loss.RESCALE_WARPS),
        ("softmax", softmax.softmax_kernel, "xxxnniiiisis", softmax_constants, softmax_warps),
        ("softmax gradient", softmax.softmax_gradient_kernel, "xxxnniiiisis", softmax_constants, softmax_warps),
        ("gelu", gelu.gelu_kernel, "xfxii", (*gelu_tile, True, False), gelu_warps),
        ("gelu gradient", gelu.gelu_gradient_kernel, "xxfxxfiii", (*gradient_tile, False, False), gradient_warps),
    ]
    for width in (768, 1000, layer_norm.WIDEST):
        columns = "i" if width % 16 else "j"
        m, n, warps, stages = layer_norm.forward_tile(width, DTYPES[dtype])
        constants = m, n, stages, False
        rows.append(("layer_norm", layer_norm.layer_norm_kernel, f"xffxffi{columns}s", constants, warps))
        m, n, warps = layer_norm.backward_tile(width)
        for with_sum in (True, False) if width == 768 else (True,):
            constants = m, n, layer_norm.stages(m * n, DTYPES[dtype]), with_sum, False
            kernel = layer_norm.layer_norm_gradient_kernel
            rows.append(("layer_norm gradient", kernel, f"xxxfffxfi{columns}", constants, warps))
    return rows


def compile_other(job: tuple, dtype: str, target: str):
    """Compile a kernel of `others`."""
    _, kernel, types, values, warps = job
    letters = {"x": f"*{dtype}", "f": "*fp32", "n": "*i32", "l": "*i64", "i": "i32", "j": MULTIPLE, "s": "fp32"}
    constants = dict(zip(kernel.arg_names[len(types) :], values, strict=True))
    kinds = [*(letters[letter] for letter in types), *["constexpr"] * len(values)]
    return compile_triton(kernel, kinds, constants, target, num_warps=warps)


def compile_others(target: str) -> list[dict]:
    """Compile the kernels of `others` in bf16, and for Hopper in all dtypes."""
    return [
        report(target, "other", [job[0], dtype, *job[3]], compile_other(job, dtype, target))
        for dtype in (DTYPES if target == "sm_90" else ["bf16"])
        for job in others(dtype, target)
    ]


def compile_fp8(target: str) -> list[dict]:
    """Compile the FP8 kernels for each dtype and format that they take."""
    names = {E4M3: "*fp8e4nv", E5M2: "*fp8e5"}
    jobs = [(fp8.quantise_kernel, fp8.QUANTISE, dtype, to) for dtype in DTYPES for to in names]
    gelus = (fp8.gelu_kernel, fp8.GELU, E4M3), (fp8.gelu_gradient_kernel, fp8.GRADIENT, E5M2)
    jobs += [(*gelu[:2], dtype, gelu[2]) for gelu in gelus for dtype in ("bf16", "fp16")]
    rows = []
    for kernel, (m, n, warps), dtype, to in jobs:
        types = dict.fromkeys(("x", "pre", "dout"), f"*{dtype}") | {"out_t": names[E4M3], "rows": "i32"}
        types |= {"columns": "i32"} | dict.fromkeys(("out", "transposed", "dpre", "dpre_t"), names[to])
        limit, tiny = fp8.LIMITS[to]
        constants = {"LIMIT": limit, "TINY": tiny, "M": m, "N": n, "UPCAST": False, "OUT_LIMIT": fp8.LIMITS[E4M3][0]}
        constants = {name: x for name, x in constants.items() if name in kernel.arg_names}
        kinds = ["constexpr" if name in constants else types.get(name, "*fp32") for name in kernel.arg_names]
        compiled = compile_triton(kernel, kinds, constants, target, num_warps=warps)
        moves = re.findall(r"ttg\.(?:convert_layout|local_alloc) .*xf8.*", compiled.asm["ttgir"])
        rows.append(report(target, "fp8", [kernel.__name__, dtype, names[to]], compiled) | {"moves": moves})
    return rows


def hopper_jobs() -> list[tuple]:
    """List compile_hopper's arguments: each entry of the table; causal backward passes without dQ; fused backward
    passes with additions to dQ in a fixed order; causal passes in fp16 with heads of 80 and 128.
    """
    jobs = [(pass_, head_dim, "bf16", mask, config) for pass_, head_dim, mask, config in hopper_configs()]
    causal = [job for job in jobs if job[3] == "causal"]
    jobs += [(*job[:4], without_dq(job[4], job[1])) for job in causal if job[0] == "backward"]
    jobs += [(*job, True) for job in jobs if job[0] == "backward" and job[4].fused]
    jobs += [(job[0], job[1], "fp16", *job[3:]) for job in causal if job[1] in (80, 128)]
    return list(dict.fromkeys(jobs))


def fused_jobs() -> list[tuple]:
    """List compile_fused's arguments: GELU and its gradient, with and without the saved output; sums, with and without
    a residual; the loss."""
    either = False, True
    pairs = itertools.product(either, either)
    return [*(("gelu", *pair) for pair in pairs), *(("sum", residual) for residual in either), ("exponentials",)]


def tuned_jobs() -> list[tuple]:
    """List compile_plain's arguments for every entry of the table that was tuned on sm_90."""
    return [
        ("sm_90", row["head_dim"], "bf16", row["mask"] != "full", row["mask"] == "dropout", row["max_seq_len"] or LONG)
        for row in read_table()["plain"]
        if row["arch"] == "sm_90"
    ]


def run(function, arguments: tuple) -> list[dict]:
    return function(*arguments)


def all_jobs(extent: str | None) -> list[tuple]:
    """List (function, arguments) of all compilations, the slowest first; see the module's docstring for `extent`."""
    targets = list(SHAPES) if extent is None else ["sm_90"]
    gluon = [(compile_hopper, job) for job in (hopper_jobs() if extent is None else hopper_jobs()[1::3])]
    gluon += [(compile_fused, job) for job in fused_jobs()]
    if extent == "gluon":
        return gluon
    jobs = gluon if triton_version() >= (3, 6) else []
    jobs += [
        (compile_plain, ("shape", target, *shape))
        for target in targets
        for shape in SHAPES[target][: None if extent is None else 2]
    ]
    jobs += [(compile_plain, ("tuned", *job)) for job in tuned_jobs() if extent is None]
    jobs += [(function, (target,)) for function in (compile_others, compile_baselines) for target in targets]
    return jobs + [(compile_fp8, (target,)) for target in (("sm_90", "sm_89") if extent is None else ["sm_90"])]


def main() -> None:
    jobs = all_jobs(*sys.argv[1:] or [None])
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for rows in pool.map(run, *zip(*jobs, strict=True)):
            for row in rows:
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
