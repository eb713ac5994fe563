"""Read the assembly that Triton writes for an AMD GPU, and compute how many waves a SIMD holds.

A compute unit of CDNA 2 (gfx90a) and CDNA 3 (gfx942) has 4 SIMDs and 64 KiB of LDS. A SIMD holds at most 8 waves of 64
threads. It has 512 vector registers per thread, in units of 8, which the waves share. Accumulation registers count as
vector registers. It has 800 scalar registers, in units of 16. LDS is allocated in units of 512 bytes.
"""

import re
from collections import Counter

SIMDS, MOST_WAVES = 4, 8  # of a compute unit; of a SIMD
LDS, LDS_UNIT = 65536, 512  # bytes
VGPRS, VGPR_UNIT = 512, 8
SGPRS, SGPR_UNIT = 800, 16

FACTS = {"sgpr": "TotalNumSgprs", "vgpr": "TotalNumVgprs", "agpr": "NumAgprs", "scratch": "ScratchSize"}
INSTRUCTION = re.compile(r"^\t([a-z]\w*)(?:[ \t]+(\S+))?", re.MULTILINE)
LABEL_OR_INSTRUCTION = re.compile(rf"^(\.L\w+):|{INSTRUCTION.pattern}", re.MULTILINE)
MFMA = re.compile(r"v_mfma_[a-z0-9]+_(\d+)x(\d+)x(\d+)(?:_(\d+)b)?")
CLASSES = {
    "mfma": re.compile(r"v_mfma_"),
    "lds_ops": re.compile(r"ds_"),
    "vmem": re.compile(r"(global|buffer|flat|scratch)_(load|store|atomic)"),
    "valu": re.compile(r"v_(?!mfma_)"),
}


def facts(text: str) -> dict[str, int]:
    """Return a kernel's registers and its bytes of scratch memory per thread, from LLVM's comments."""
    return {key: int(re.search(rf"^; {name}: (\d+)", text, re.MULTILINE)[1]) for key, name in FACTS.items()}


def loops(text: str) -> list[list[str]]:
    """Return the names of the instructions of each loop: from a label to a branch back to this label."""
    at, names, found = {}, [], []
    for label, name, operand in LABEL_OR_INSTRUCTION.findall(text):
        if label:
            at[label] = len(names)
            continue
        names.append(name)
        if name.startswith(("s_cbranch", "s_branch")) and operand in at:
            found.append(names[at[operand] :])
    return found


def inner_loop(text: str) -> list[str]:
    """Return the shortest loop with matrix products: the loop over tiles that need no mask."""
    return min((body for body in loops(text) if any(map(MFMA.match, body))), key=len, default=[])


def counts(names: list[str]) -> dict[str, int]:
    """Return the number of instructions of each class, of all instructions, and the multiply-adds of the products."""
    found = Counter({kind: sum(bool(form.match(name)) for name in names) for kind, form in CLASSES.items()})
    return dict(found) | {"instructions": len(names), "macs": sum(map(multiply_adds, names))}


def multiply_adds(name: str) -> int:
    """Return the multiply-adds of an MFMA instruction, which is one instruction for the 64 threads of a wave."""
    product = MFMA.match(name)
    return int(product[1]) * int(product[2]) * int(product[3]) * int(product[4] or 1) if product else 0


def _up(x: int, unit: int) -> int:
    return -(-x // unit) * unit


def waves_per_simd(vgpr: int, sgpr: int, lds: int, warps: int) -> float:
    """Return the waves that a SIMD holds on average. The workgroups of a compute unit have `warps` waves each.

    LLVM's own figure leaves out the LDS, because Triton allocates it at the launch.
    """
    by_registers = min(MOST_WAVES, VGPRS // _up(max(vgpr, 1), VGPR_UNIT), SGPRS // _up(max(sgpr, 1), SGPR_UNIT))
    groups = by_registers // (warps // SIMDS) if warps > SIMDS else by_registers * (SIMDS // warps)
    if lds:
        groups = min(groups, LDS // _up(lds, LDS_UNIT))
    return groups * warps / SIMDS


def describe(text: str, lds: int, warps: int) -> dict[str, float]:
    """Return everything about a kernel: facts, LDS, waves per SIMD, and the instructions of its inner loop."""
    known = facts(text)
    waves = waves_per_simd(known["vgpr"], known["sgpr"], lds, warps)
    return known | {"lds": lds, "waves": waves} | counts(inner_loop(text))
