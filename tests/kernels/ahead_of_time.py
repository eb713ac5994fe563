"""Compiles every kernel for GPUs that are not here, and prints what each needs as JSON lines.

Run in a process of its own, in which Triton does not interpret: python -m tests.kernels.ahead_of_time
"""

import itertools
import json
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from kernels.adamw import triton_kernel as adamw
from kernels.common.launching import triton_version
from kernels.cross_entropy import hopper as hopper_loss
from kernels.cross_entropy import triton_kernels as cross_entropy
from kernels.flash1 import launch as flash1_launch
from kernels.flash1 import triton_kernels as flash1
from kernels.flash2 import hopper_backward, hopper_forward, launch, triton_kernels
from kernels.flash2.options import Options
from kernels.flash2.tiles import (
    SPECIALISED,
    SpecialisedBackward,
    Tile,
    read_table,
    specialised_settings,
    tiles_for,
    without_dq,
)
from kernels.fused_softmax import triton_kernels as softmax
from kernels.fused_softmax.op import LONGEST_ROW
from kernels.gelu import hopper as hopper_gelu
from kernels.gelu import triton_kernels as gelu
from kernels.layer_norm import triton_kernels as layer_norm
from kernels.linear import hopper as hopper_linear

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Bytes of shared memory a block may have, by the vendors' programming guides.
SHARED_MEMORY = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx90a": 65536, "gfx942": 65536}
# Shapes: head_dim, dtype, causal, dropout.
COMMON = [(64, "bf16", False, False), (80, "bf16", True, False)]
SMALL, LARGE = (16, "bf16", True, False), (256, "bf16", True, False)
DROPOUT, FP32 = (32, "bf16", False, True), (40, "fp32", True, False)
SHAPES = {
    "sm_80": [*COMMON, DROPOUT],
    "sm_90": [*COMMON, SMALL, LARGE, DROPOUT, FP32],
    "sm_100": [*COMMON, LARGE],
    "gfx90a": [*COMMON, DROPOUT],
    "gfx942": [*COMMON, LARGE, FP32],
}
PTXAS, CUOBJDUMP = (Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / x for x in ("ptxas", "cuobjdump"))
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/ +(?:@!?\w+ )?([A-Z][\w.]*)([^;]*);")
POINTER_TYPES = {
    "logsumexp": "*fp32",
    "delta": "*fp32",
    "numbers": "*i32",
    "documents": "*i32",
    "blocks": "*i32",
    "pieces": "*fp32",
    "l": "*fp32",
    "m": "*fp32",
}
MULTIPLE = "i32 of 16"  # of which Triton knows that it is a multiple, as it finds out where it launches
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def signature(kernel, constants: dict, dtype: str) -> dict[str, str]:
    """Types of a kernel's arguments, told by their names: sizes and strides are i32, tensors have the data's dtype."""
    floats = {"scale", "keep_scale"}
    integers = {"heads", "groups", "kv_heads", "seq_q", "seq_k", "window", "threshold", "key_lists", "early"}
    types = {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name in floats:
            types[name] = "fp32"
        elif constants.get("TMA") and name in ("q", "k", "v", "dout"):
            rows = constants["N" if name in ("k", "v") else "M"]
            types[name] = f"tensordesc<{dtype}[1,{rows},1,{constants['D']}]>"
        elif name in integers or (name.startswith("s") and "_" in name):
            types[name] = "i32"
        else:
            types[name] = POINTER_TYPES.get(name, f"*{dtype}")
    return types


def compile_kernel(kernel, constants: dict, tile, dtype: str, target: GPUTarget, summed: str | None = None):
    """As launched on aligned tensors with aligned strides; `summed` names a tensor that is fp32 whatever the dtype."""
    types = signature(kernel, constants, dtype) | ({summed: "*fp32"} if summed else {})
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(types.items())
        if kind.startswith("*") or (kind == "i32" and (name.startswith("s") and name not in ("seq_q", "seq_k")))
    }
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=target, options={"num_warps": tile.warps, "num_stages": tile.stages})


def variants(target: str, head_dim: int, dtype: str, causal: bool, dropout: bool, bucket: str = "long", blocks=None):
    """(name, kernel, constants, tile) of every launch at one head size; block-sparse if `blocks` is given."""
    tiles = tiles_for(target, head_dim, DTYPES[dtype], causal, bucket, dropout)
    tma = target == "sm_90" and dtype != "fp32"
    for name, tile in tiles._asdict().items():
        kernel = getattr(triton_kernels, f"{name}_kernel")
        options = Options(blocks=blocks, causal=causal, dropout_p=0.1 if dropout else 0.0)
        values = launch._constants(tile, head_dim, options, interpreted=False, tma=tma)
        names = ("M", "N", "HEAD_DIM", "D", "CAUSAL", "WINDOW", "DOCUMENTS", "BLOCKS", "DROPOUT", "UPCAST", "TMA")
        bounded = {"BOUNDED": False} if name == "key_gradient" else {}
        yield name, kernel, {**dict(zip(names, values, strict=True)), **bounded}, tile


def assembler_report(compiled) -> dict:
    """What ptxas says of a kernel for sm_90: bytes spilled, and whether it serialised the tensor cores' instructions.

    A serialised wgmma waits for the one before it, which costs about half the speed.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(compiled.asm["ptx"])
        ptx.flush()
        command = [str(PTXAS), "-v", "--gpu-name", "sm_90a", ptx.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", said)]
    assert spills, said
    return {"spilled": sum(spills), "serialised": "wgmma" in said and "serialized" in said}


def disassembled(compiled) -> str:
    """The machine code of a kernel in words."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        return subprocess.run([CUOBJDUMP, "-sass", cubin.name], capture_output=True, text=True, check=True).stdout


def loops(code: str) -> list[list[tuple[int, str, str]]]:
    """Addresses, names and operands of the instructions of each loop, from where a branch leads back to."""
    instructions = [(int(address, 16), name, rest) for address, name, rest in INSTRUCTION.findall(code)]
    found = []
    for end, name, rest in instructions:
        jump = re.match(r" +0x([0-9a-f]+)", rest) if name == "BRA" else None
        if jump and int(jump[1], 16) < end:
            found.append([x for x in instructions if int(jump[1], 16) <= x[0] <= end])
    return found


def spills_beside_products(code: str, partitions: int) -> int:
    """Loads and stores of spilled registers in the inner loops with products of the tensor cores.

    Those are the shortest, one for each of the partitions of warps that compute; the longer ones have them inside.
    """
    bodies = [body for body in loops(code) if any(name.startswith("HGMMA") for _, name, _ in body)]
    inner = sorted(bodies, key=len)[:partitions]
    return sum(name.startswith(("LDL", "STL")) for body in inner for _, name, _ in body)


def lost_operands(code: str) -> list[str]:
    """Registers that are a product's first operand in each round of a loop, come from before it, and are overwritten in
    it: ptxas 12.8 gave the registers of a K held through the loop to P, and all rounds but the first were wrong.
    """
    lost = set()
    for body in loops(code):
        read, written = {}, {}
        for at, name, rest in body:
            numbers = [int(number) for number in re.findall(r"\bR(\d+)\b", rest)]
            if not re.match(r" +R\d+\b", rest):
                continue
            product = re.match(r"HGMMA\.64x(\d+)x", name)
            if product and re.match(r" +R\d+, R\d+, gdesc", rest):
                for register in range(numbers[1], numbers[1] + 4):
                    read.setdefault(register, at)
            count = int(product[1]) // 2 if product else 2 if name == "CS2R" else 1  # CS2R zeroes two at once
            for register in range(numbers[0], numbers[0] + count):
                written.setdefault(register, at)
        lost |= {f"R{register}" for register, at in read.items() if at < written.get(register, at)}
    return sorted(lost)


def compile_shape(job: tuple) -> list[dict]:
    """One row per kernel for a (target, shape)."""
    target, *shape = job
    rows = []
    for name, kernel, constants, tile in variants(target, *shape):
        compiled = compile_kernel(kernel, constants, tile, shape[1], TARGETS[target])
        rows.append(report(target, compiled, shape=shape, kernel=name, tile=tile))
    return rows


def report(target: str, compiled, **what) -> dict:
    """A row of a kernel that is told apart by `what`."""
    binary = compiled.asm.get("cubin") or compiled.asm.get("hsaco")
    row = {"target": target, **what, "bytes": len(binary), "shared": compiled.metadata.shared}
    return {**row, **(assembler_report(compiled) if target == "sm_90" else {})}


def compile_baselines(target: str) -> list[dict]:
    """flash1, and flash2's kernels where they walk a list of blocks; on Hopper all that is shipped for it."""
    rows, shapes = [], [(64, "bf16"), (40, "fp32")]
    if target == "sm_90":
        shapes += [(80, "fp16"), (128, "bf16"), (256, "bf16")]
    for name, kernel, constants, tile in variants(target, 64, "bf16", True, False, blocks=True):
        compiled = compile_kernel(kernel, constants, tile, "bf16", TARGETS[target])
        rows.append(report(target, compiled, baseline=f"block_sparse {name}"))
    constants = {"ROWS": 64, "HEAD_DIM": 80, "D": 128, "UPCAST": False}
    compiled = compile_kernel(triton_kernels.add_pieces_kernel, constants, Tile(0, 0, 4, 1), "bf16", TARGETS[target])
    rows.append(report(target, compiled, baseline="block_sparse add_pieces"))
    names = ("M", "N", "HEAD_DIM", "D", "CAUSAL", "DOCUMENTS", "DROPOUT", "UPCAST")
    for head_dim, dtype in shapes:
        for name, tile in flash1_launch.tiles_for(head_dim, DTYPES[dtype])._asdict().items():
            values = flash1_launch.constants(tile, head_dim, True, False, False, interpreted=False)
            kernel, summed = getattr(flash1, f"{name}_kernel"), {"forward": "out", "backward": "dq"}[name]
            constants = dict(zip(names, values, strict=True))
            compiled = compile_kernel(kernel, constants, tile, dtype, TARGETS[target], summed)
            rows.append(report(target, compiled, baseline=f"flash1 {name} {head_dim} {dtype}"))
    return rows


def compile_specialised(job: tuple) -> list[dict]:
    """The warp-specialised kernel of Hopper for one pass."""
    pass_, head_dim, dtype, causal, dropout, config = job
    module = {"forward": hopper_forward, "backward": hopper_backward}[pass_]
    kernel = {"forward": hopper_forward.forward_kernel, "backward": hopper_backward.main_kernel}[pass_]
    config = SPECIALISED[pass_](*config)
    signature, constants, options = module.compilation(head_dim, DTYPES[dtype], causal, dropout, config)
    named = {kernel.arg_names[key[0]] if isinstance(key, tuple) else key: x for key, x in constants.items()}
    assert (named["CAUSAL"], named["DROPOUT"]) == (causal, dropout), job
    compiled = compile_gluon(kernel, signature, constants, options)
    code = disassembled(compiled)
    beside = spills_beside_products(code, config.consumers if pass_ == "forward" else 1)
    found = {"lost": lost_operands(code)} if pass_ == "backward" else {}
    return [report("sm_90", compiled, specialised=job, beside_products=beside) | found]


def compile_gluon(kernel, signature: dict, constants: dict, options: dict, sizes: tuple[str, ...] = ()):
    """For Hopper; arguments named in `sizes` are multiples of 16, as pointers are."""
    named = enumerate(signature.items())
    aligned = {(i,): [["tt.divisibility", 16]] for i, (name, kind) in named if kind.startswith("*") or name in sizes}
    return triton.compile(GluonASTSource(kernel, signature, constants, aligned), TARGETS["sm_90"], options)


def compile_fused(job: tuple) -> list[dict]:
    """A matrix product of Hopper with GELU, a sum or, for the head, exponentials in its epilogue."""
    name, *kind = job
    if name == "gelu":
        kernel, compilation = hopper_gelu.linear_gelu_kernel, hopper_gelu.compilation(torch.bfloat16, *kind)
    elif name == "sum":
        kernel, compilation = hopper_linear.linear_sum_kernel, hopper_linear.compilation(torch.bfloat16, *kind)
    else:
        kernel, compilation = hopper_loss.linear_exponentials_kernel, hopper_loss.compilation()
    compiled = compile_gluon(kernel, *compilation, ("columns", "depth"))
    return [report("sm_90", compiled, fused=job)]


def others(dtype: str) -> dict:
    """The kernels beside attention as they are launched: kernel, types of its arguments, constants, warps."""
    data, fp32, size = f"*{dtype}", "*fp32", "i32"
    upcast = {"UPCAST": False}
    loss = (data, "*i64", fp32, size, size, size), {"N": cross_entropy.LONGEST_BLOCK, "GRADIENT": True} | upcast
    (m_t, k_t), m_r = cross_entropy.TARGETS_TILE, cross_entropy.SUMS_ROWS
    own = (data, data, "*i64", fp32, size, MULTIPLE), {"M": m_t, "K": k_t}
    left = (data, fp32, "*i64", fp32, fp32, MULTIPLE, size, size), {"M": m_r, "N": 256} | upcast
    m_c, k_c = cross_entropy.RESCALE_TILE
    scaled = (data, data, data, data, "*i64", fp32, size, MULTIPLE), {"M": m_c, "K": k_c} | upcast
    (m, n, forward_warps), (rows, columns, backward_warps) = gelu.FORWARD, gelu.BACKWARD
    forward = (data, fp32, data, size, size), {"M": m, "N": n, "KEEP_OUTPUT": True} | upcast
    m_s, n_s, softmax_warps = softmax.tile(LONGEST_ROW)
    masks = {"M": m_s, "N": n_s, "CAUSAL": True, "DOCUMENTS": True, "DROPOUT": True} | upcast
    rows_of_scores = (data, data, data, "*i32", "*i32", *[size] * 4, fp32[1:], size, fp32[1:]), masks
    constants = {"M": rows, "N": columns, "KEEP_OUTPUT": False} | upcast
    backward = (data, data, fp32, data, data, fp32, size, size, size), constants
    norms = {}
    for width in (768, 1000, layer_norm.WIDEST):
        columns_l = size if width % 16 else MULTIPLE
        m_l, n_l, warps = layer_norm.tile(width)
        types = data, fp32, fp32, data, fp32, fp32, size, columns_l, fp32[1:]
        *sizes, forward_warps_l, ahead = layer_norm.forward_tile(width, DTYPES[dtype])
        constants_l = dict(zip(("M", "N", "STAGES"), (*sizes, ahead), strict=True)) | upcast
        norms[f"layer_norm {width}"] = layer_norm.layer_norm_kernel, types, constants_l, forward_warps_l
        types = data, data, data, fp32, fp32, fp32, data, fp32, size, columns_l
        constants_l = {"STAGES": layer_norm.stages(m_l * n_l, DTYPES[dtype]), "WITH_SUM": True} | upcast
        constants_l |= {"M": m_l, "N": n_l}
        norms[f"layer_norm gradient {width}"] = layer_norm.layer_norm_gradient_kernel, types, constants_l, warps
        if width == 768:  # after dropout
            without = constants_l | {"WITH_SUM": False}
            norms["layer_norm gradient without a sum"] = layer_norm.layer_norm_gradient_kernel, types, without, warps
    step = ("*i64", "*i32", fp32, fp32, *[fp32[1:]] * 7), {"CHUNK": adamw.CHUNK, "ALIGNED": True}
    return {
        "adamw": (adamw.adamw_kernel, *step, adamw.WARPS),
        "cross_entropy": (cross_entropy.cross_entropy_kernel, *loss, cross_entropy.WARPS),
        "cross_entropy targets": (cross_entropy.cross_entropy_target_kernel, *own, cross_entropy.TARGETS_WARPS),
        "cross_entropy rescale": (cross_entropy.cross_entropy_rescale_kernel, *scaled, cross_entropy.RESCALE_WARPS),
        "cross_entropy sums": (cross_entropy.cross_entropy_sums_kernel, *left, cross_entropy.SUMS_WARPS),
        "softmax": (softmax.softmax_kernel, *rows_of_scores, softmax_warps),
        "softmax gradient": (softmax.softmax_gradient_kernel, *rows_of_scores, softmax_warps),
        "gelu forward": (gelu.gelu_kernel, *forward, forward_warps),
        "gelu backward": (gelu.gelu_gradient_kernel, *backward, backward_warps),
        **norms,
    }


def compile_others(target: str) -> list[dict]:
    """One row per kernel and dtype, of which the others than bf16 are of Hopper alone."""
    rows = []
    for dtype in DTYPES if target == "sm_90" else ["bf16"]:
        for name, (kernel, types, constants, warps) in others(dtype).items():
            kinds = ["i32" if kind == MULTIPLE else kind for kind in types]
            kinds += ["constexpr"] * (len(kernel.arg_names) - len(kinds))
            signature = dict(zip(kernel.arg_names, kinds, strict=True))
            aligned = [i for i, kind in enumerate(types) if kind.startswith("*") or kind == MULTIPLE]
            source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
            compiled = triton.compile(source, target=TARGETS[target], options={"num_warps": warps})
            rows.append(report(target, compiled, other=f"{name} {dtype}"))
    return rows


def specialised() -> list[tuple]:
    """Jobs for every entry of the table; the backward's causal ones without dQ too (a deterministic pass), and those of
    heads of 80 and 128 in fp16. None under a Triton that cannot compile them, for which the rules choose none."""
    if triton_version() < (3, 6):
        return []
    jobs = [
        (pass_, head_dim, "bf16", mask != "full", mask == "dropout", config)
        for pass_, head_dim, mask, config in specialised_settings()
    ]
    causal = [job for job in jobs if job[3:5] == (True, False)]
    for _, head_dim, *kind, config in [job for job in causal if job[0] == "backward"]:
        jobs.append(("backward", head_dim, *kind, tuple(without_dq(SpecialisedBackward(*config), head_dim))))
    jobs += [(job[0], job[1], "fp16", *job[3:]) for job in causal if job[1] in (80, 128)]
    return list(dict.fromkeys(jobs))


def fused() -> list[tuple]:
    """Jobs for the products with more in their epilogue, a few seconds each: GELU's, whether of the gradient, whether
    its output is kept; the sums, whether with a residual; the head's. None where there are no specialised ones."""
    if triton_version() < (3, 6):
        return []
    either = False, True
    return (
        [("gelu", *kind) for kind in itertools.product(either, either)]
        + [("sum", kind) for kind in either]
        + [("exponentials",)]
    )


def tuned() -> list[tuple]:
    """Jobs for every entry of the table that was tuned on sm_90."""
    return [
        ("sm_90", int(size), "bf16", mask != "full", mask == "dropout", bucket)
        for size, masks in read_table()["sm_90"].items()
        for mask, buckets in masks.items()
        for bucket in buckets
    ]


def main() -> None:
    jobs = [(target, *shape) for target in TARGETS for shape in SHAPES[target]] + tuned()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        done = pool.map(compile_specialised, specialised()), pool.map(compile_shape, jobs)
        beside = (
            pool.map(compile_others, TARGETS),
            pool.map(compile_baselines, TARGETS),
            pool.map(compile_fused, fused()),
        )
        for rows in itertools.chain(*done, *beside):
            for row in rows:
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
