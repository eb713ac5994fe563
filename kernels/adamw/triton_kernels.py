"""AdamW (Loshchilov and Hutter, 2019, algorithm 2) in Triton: one launch for all tensors, at the bandwidth of HBM.

Each element takes four 4-byte reads (weight, gradient, two moments), three writes and little arithmetic. So a program
is short, and each multiprocessor always has other programs' loads in flight. The kernel finds the tensors through a
table of addresses.
"""

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK, WARPS = 1024, 8
COLUMNS: tl.constexpr = tl.constexpr(6)


@triton.jit
def _one_minus_exp(x):
    """Return 1 - e^x for x <= 0. Near zero a series, in Horner's form, avoids cancellation."""
    series = -x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5))))
    return tl.where(x > -0.1, series, 1 - tl.exp(x))


@triton.jit
def _tensor(table, row, column: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the fp32 pointer stored at this row and column of the table."""
    pointer = tl.load(table + row * COLUMNS + column).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def adamw_kernel(
    table, chunks, grad_scale, found_inf, lr, new1, new2, log_beta1, log_beta2, eps, weight_decay,
    CHUNK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Take one step for CHUNK elements of one tensor, or none if found_inf is not zero.

    table (tensors, COLUMNS) int64 holds the addresses of weight, gradient, first moment, second moment and step count,
    all fp32, and the number of elements. chunks (programs, 2) int32 holds a row of the table and the number of a CHUNK
    in that tensor. grad_scale, by which gradients are divided, and found_inf are fp32 scalars on the device. new1 and
    new2 are 1 - beta, computed on the host because fp32 loses digits. log_beta1 and log_beta2 are natural logarithms.
    ALIGNED: all addresses are multiples of 16 and all sizes of 4, so a thread reads four elements at once.
    """
    if tl.load(found_inf) == 0:
        program = tl.program_id(0)
        row = tl.load(chunks + 2 * program)
        o_x = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
        size = tl.load(table + row * COLUMNS + 5)
        mask = o_x < (tl.multiple_of(size, 4) if ALIGNED else size)
        p_weight, p_gradient = _tensor(table, row, 0, ALIGNED) + o_x, _tensor(table, row, 1, ALIGNED) + o_x
        p_first, p_second = _tensor(table, row, 2, ALIGNED) + o_x, _tensor(table, row, 3, ALIGNED) + o_x
        steps = tl.load(_tensor(table, row, 4, False)) + 1
        gradient = tl.load(p_gradient, mask=mask) / tl.load(grad_scale)
        first = tl.load(p_first, mask=mask)
        second = tl.load(p_second, mask=mask)
        weight = tl.load(p_weight, mask=mask)
        # Moments, bias correction, decoupled weight decay.
        first = first * (1 - new1) + gradient * new1
        second = second * (1 - new2) + gradient * gradient * new2
        root = tl.sqrt(second) / tl.sqrt(_one_minus_exp(steps * log_beta2))
        rate = lr / _one_minus_exp(steps * log_beta1)
        tl.store(p_first, first, mask=mask)
        tl.store(p_second, second, mask=mask)
        tl.store(p_weight, weight * (1 - lr * weight_decay) - rate * first / (root + eps), mask=mask)


@lru_cache(maxsize=4)
def _chunks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the kernel's `chunks` for tensors of these sizes."""
    counts = torch.tensor([triton.cdiv(size, CHUNK) for size in sizes])
    rows = torch.arange(len(sizes)).repeat_interleave(counts)
    places = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    return torch.stack((rows, places), 1).to(device, torch.int32)


def adamw_(
    weights: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor], steps: list[Tensor],
    grad_scale: Tensor, found_inf: Tensor,
    *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """Take one step in place like torch's fused AdamW: update weights, first and second moments, and step counts.

    All tensors are contiguous fp32 on one device, one of each kind per weight. grad_scale and found_inf are scalars on
    that device. Gradients are divided by grad_scale. If found_inf is not zero, nothing changes.

    Raises:
        ValueError: a tensor is not fp32, or not contiguous.
    """
    table, aligned, device = [], True, found_inf.device
    for tensors in zip(weights, gradients, first, second, steps, strict=True):
        for x in tensors:
            if x.dtype != torch.float32 or not x.is_contiguous():
                raise ValueError(
                    f"a tensor is {x.dtype} of strides {x.stride()}; give AdamW's kernel contiguous fp32 tensors"
                )
        addresses = [x.data_ptr() for x in tensors]
        size = tensors[0].numel()
        aligned = aligned and size % 4 == 0 and not any(address % 16 for address in addresses[:4])
        table.append([*addresses, size])
    chunks = _chunks(tuple(x.numel() for x in weights), device)
    on_device = torch.tensor(table, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    logarithms = [math.log(beta) if beta else -math.inf for beta in (beta1, beta2)]
    scalars = lr, 1 - beta1, 1 - beta2, *logarithms, eps, weight_decay
    with torch.cuda.device_of(found_inf):
        arguments = on_device, chunks, grad_scale, found_inf, *scalars, CHUNK, aligned
        adamw_kernel[(len(chunks),)](*arguments, num_warps=WARPS)
    # With one tensor instead of a list, the host would wait for its value.
    torch._foreach_add_(steps, [1 - found_inf] * len(steps))
