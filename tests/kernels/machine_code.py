"""Checks of a compiled kernel's machine code: registers, and for sm_90 serialised products and lost operands."""

import re
import subprocess
import tempfile
from pathlib import Path

import triton

from kernels.common.launching import triton_version

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
BLACKWELL_FROM = 90 if triton_version() >= (3, 9) else 100  # Triton's choice of an assembler by architecture
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/ +(?:@!?\w+ )?([A-Z][\w.]*)([^;]*);")


def assembler_report(compiled, arch: str) -> dict:
    """Return a thread's registers, the bytes that ptxas spills, and whether it serialises the tensor cores' work.

    `arch` may be another one than the kernel was compiled for. A serialised wgmma waits for the one before it, which
    costs about half the speed.
    """
    number = int(arch.removeprefix("sm_"))
    name, tool = f"{arch}a" if number >= 90 else arch, "ptxas-blackwell" if number >= BLACKWELL_FROM else "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(re.sub(r"^\.target \w+", f".target {name}", compiled.asm["ptx"], flags=re.MULTILINE))
        ptx.flush()
        command = [str(TOOLS / tool), "-v", "--gpu-name", name, ptx.name, "-o", "/dev/null"]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spills = re.findall(r"Used (\d+) registers", output), re.findall(r"(\d+) bytes spill", output)
    assert registers and spills, output
    serialised = "wgmma" in output and "serialized" in output
    return {"registers": max(map(int, registers)), "spilled": sum(map(int, spills)), "serialised": serialised}


def disassembled(compiled) -> str:
    """Return the kernel's machine code as text (SASS)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        return subprocess.run(
            [TOOLS / "cuobjdump", "-sass", cubin.name], capture_output=True, text=True, check=True
        ).stdout


def loops(code: str) -> list[list[tuple[int, str, str]]]:
    """Return (address, name, operands) of the instructions of each loop, from the target of a backward branch on.

    Code behind the last EXIT does not count: there, waits go on that were not over at once, and then branch back.
    """
    instructions = [(int(address, 16), name, rest) for address, name, rest in INSTRUCTION.findall(code)]
    exits = [i for i, (_, name, _) in enumerate(instructions) if name == "EXIT"]
    instructions = instructions[: exits[-1] if exits else None]
    found = []
    for end, name, rest in instructions:
        jump = re.match(r" +0x([0-9a-f]+)", rest) if name == "BRA" else None
        if jump and int(jump[1], 16) < end:
            found.append([x for x in instructions if int(jump[1], 16) <= x[0] <= end])
    return found


def spills_beside_products(code: str, partitions: int) -> int:
    """Count the loads and stores of spilled registers in the inner loops with tensor-core products.

    There is one inner loop per partition of computing warps. The inner loops are the shortest loops with products.
    """
    bodies = [body for body in loops(code) if any(name.startswith("HGMMA") for _, name, _ in body)]
    inner = sorted(bodies, key=len)[:partitions]
    return sum(name.startswith(("LDL", "STL")) for body in inner for _, name, _ in body)


def lost_operands(code: str) -> list[str]:
    """Return registers that a loop overwrites although its products read them, set before the loop, in every round.

    ptxas 12.8 once reused the registers of a K held through the loop for P. All rounds but the first were wrong.
    """
    lost = set()
    for body in loops(code):
        read, written = {}, {}  # register: first address
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
