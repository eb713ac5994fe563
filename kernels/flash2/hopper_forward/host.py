"""The host side of the Hopper forward: TMA descriptors, arguments and launch."""

import torch
from torch import Tensor

from kernels.common.launching import launch_kernel
from kernels.flash2.hopper_forward.kernel import forward_kernel
from kernels.flash2.hopper_forward.schedule import MOST_TOGETHER, section_size
from kernels.flash2.hopper_forward.tile import ROWS
from kernels.flash2.options import Options
from kernels.flash2.tiles import HopperForwardConfig, split_head_dim
from kernels.hopper.warpgroups import blocks_of, multiprocessors

CONSUMER_REGISTERS = {2: 240, 3: 160}  # per thread, by number of consumers
PRODUCER_REGISTERS = 24  # the minimum


def arguments_of(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, counter: Tensor | None, options: Options,
    section: int, config: HopperForwardConfig,
) -> tuple[tuple, tuple, tuple]:  # fmt: skip
    """Return the tensors, scalars and constants of forward_kernel."""
    batch, seq_q, heads, head_dim = q.shape
    d0, d1 = split_head_dim(head_dim)

    def parts(x: Tensor, rows: int) -> tuple:
        return blocks_of(x, 1, rows, 1, d0), blocks_of(x, 1, rows, 1, d1) if d1 else None

    reads = *parts(q, ROWS.value), *parts(k, config.keys), *parts(v, config.keys)
    tensors = *reads, out, logsumexp, options.numbers, options.documents, counter
    sizes = batch, heads, heads // k.shape[2], seq_q, k.shape[1], section, options.window
    registers = CONSUMER_REGISTERS[config.consumers], PRODUCER_REGISTERS
    shape = config.keys, config.stages, config.consumers, d0, d1
    constants = *shape, *options.masks, options.dropout_p > 0, *registers
    return tensors, (*sizes, *options.factors), constants


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options, config: HopperForwardConfig) -> tuple[Tensor, Tensor]:
    """Return O (B, T, H, D) contiguous and the natural logsumexp (B, H, T) fp32; no visible key gives 0 and -inf.

    q (B, T, H, D), k and v (B, S, G, D) with H a multiple of G and D = 64, 80, 96 or 128, in bf16 or fp16 on an sm_90
    device. Unit stride along D; other strides and the addresses are multiples of 16 bytes. options has no blocks.
    """
    (batch, seq_q, heads, head_dim), (seq_k, kv_heads) = q.shape, k.shape[1:3]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    logsumexp = torch.empty((batch, heads, seq_q), dtype=torch.float32, device=q.device)
    rows = -(-seq_q // config.queries)
    tiles = batch * heads * rows
    programs = min(tiles, multiprocessors(q.device))
    bytes_of_head = -(-2 * seq_k * head_dim * k.element_size() * kv_heads // heads)
    counter = None
    if options.documents is not None:
        counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    if options.window or options.documents is not None:
        section = MOST_TOGETHER  # a tile of a window or a document reads only part of a head's keys
    elif options.causal:
        section = section_size((batch * heads, seq_q, seq_k), bytes_of_head, programs, config)
    else:
        section = 1
    arguments = arguments_of(q, k, v, out, logsumexp, counter, options, section, config)
    with torch.cuda.device_of(q):
        launch_kernel(forward_kernel, (q.dtype, q.device, head_dim), programs, *arguments, num_warps=4)
    return out, logsumexp
