"""Rounding of the values that the Triton kernels store."""

import triton
import triton.language as tl


@triton.jit
def to(x, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """Round x to the nearest value of `dtype`, ties to even. UPCAST is for the interpreter, which truncates to bf16."""
    if UPCAST and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)
