"""The host side of the Hopper forward: TMA descriptors, arguments, launch, and compilation ahead of time."""

from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from kernels.common.dropout import threshold
from kernels.common.launching import descriptor, launch_kernel
from kernels.flash2.hopper_forward.kernel import forward_kernel
from kernels.flash2.hopper_forward.schedule import section_size
from kernels.flash2.hopper_forward.tile import ROWS
from kernels.flash2.options import Options
from kernels.flash2.tiles import HopperForwardConfig, split_head_dim
from kernels.hopper.warpgroups import multiprocessors, signature_of

CONSUMER_REGISTERS = {2: 240, 3: 160}  # per thread, by number of consumers
PRODUCER_REGISTERS = 24  # the minimum


@cache
def _shared_layout(columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=min(2 * columns, 128), element_bitwidth=16, rank=4)


def _tensors(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, numbers: Tensor | None, config: HopperForwardConfig
) -> tuple:
    """Return the tensors that forward_kernel takes."""
    d0, d1 = split_head_dim(q.shape[3])

    def parts(x: Tensor, rows: int) -> tuple:
        whole = descriptor(x, [1, rows, 1, d0], _shared_layout(d0))
        return whole, descriptor(x, [1, rows, 1, d1], _shared_layout(d1)) if d1 else None

    return *parts(q, ROWS.value), *parts(k, config.keys), *parts(v, config.keys), out, logsumexp, numbers


def _constants(head_dim: int, causal: bool, dropout: bool, config: HopperForwardConfig) -> tuple:
    registers = CONSUMER_REGISTERS[config.consumers], PRODUCER_REGISTERS
    return config.keys, config.stages, config.consumers, *split_head_dim(head_dim), causal, dropout, *registers


def compilation(
    head_dim: int, dtype: torch.dtype, causal: bool, dropout: bool, config: HopperForwardConfig
) -> tuple[dict, dict, dict]:
    """Return signature, constants and options of forward_kernel, to compile it ahead of time."""
    x, logsumexp = torch.empty((1, config.keys, 1, head_dim), dtype=dtype), torch.empty(1)
    numbers = torch.empty(1, dtype=torch.int32) if dropout else None
    tensors = _tensors(x, x, x, x, logsumexp, numbers, config)
    sizes, scale, keep_scale = (1,) * 6, 1.0, 1.0
    scalars = *sizes, scale, threshold(0.0), keep_scale
    arguments = *tensors, *scalars, *_constants(head_dim, causal, dropout, config)
    return *signature_of(forward_kernel, arguments), {"num_warps": 4}


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options, config: HopperForwardConfig) -> tuple[Tensor, Tensor]:
    """Return O (B, T, H, D) contiguous and the natural logsumexp (B, H, T) fp32; no visible key gives 0 and -inf.

    q (B, T, H, D), k and v (B, S, G, D) with H a multiple of G and D = 64, 80, 96 or 128, in bf16 or fp16 on an sm_90
    device. Unit stride along D; other strides and the addresses are multiples of 16 bytes. options has no window,
    documents or blocks.
    """
    (batch, seq_q, heads, head_dim), (seq_k, kv_heads) = q.shape, k.shape[1:3]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    logsumexp = torch.empty((batch, heads, seq_q), dtype=torch.float32, device=q.device)
    rows = -(-seq_q // config.queries)
    programs = min(batch * heads * rows, multiprocessors(q.device))
    bytes_of_head = -(-2 * seq_k * head_dim * k.element_size() * kv_heads // heads)
    shape = batch * heads, seq_q, seq_k
    section = section_size(shape, bytes_of_head, programs, config) if options.causal else 1
    sizes = batch, heads, heads // kv_heads, seq_q, seq_k, section
    scalars = *sizes, options.scale, threshold(options.dropout_p), 1 / (1 - options.dropout_p)
    tensors = _tensors(q, k, v, out, logsumexp, options.numbers, config)
    constants = _constants(head_dim, options.causal, options.dropout_p > 0, config)
    with torch.cuda.device_of(q):
        launch_kernel(forward_kernel, (q.dtype, q.device, head_dim), programs, tensors, scalars, constants, num_warps=4)
    return out, logsumexp
