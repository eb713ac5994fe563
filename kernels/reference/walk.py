"""Print a walk through attention on two 4 x 2 examples, tile by tile."""

from collections.abc import Callable
from inspect import getdoc
from itertools import product

import torch
from rich.console import Console
from torch import Tensor

from kernels.reference import algorithms

Q = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, -1.0]], dtype=torch.float64)
K = torch.tensor([[1.0, 1.0], [0.0, 2.0], [3.0, 0.0], [-1.0, 1.0]], dtype=torch.float64)
V = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0], [4.0, -1.0]], dtype=torch.float64)
dO = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, -1.0], [0.5, 0.5]], dtype=torch.float64)
TILE = 2
PUBLISHED = (  # Q, K and V of an example from a published text
    torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]], dtype=torch.float64),
    torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, -1.0]], dtype=torch.float64),
    torch.tensor([[1.0, 2.0], [2.0, 3.0], [3.0, 4.0], [4.0, 5.0]], dtype=torch.float64),
)
ON_CHIP_KIB = {"A100": 192, "H100": 228}  # of one multiprocessor; A100 as in FlashAttention, H100's shared memory
console = Console(highlight=False, width=120)


def lines_of(x: Tensor) -> list[str]:
    """Format a matrix, or a vector as a column, as lines of aligned numbers."""
    x = x.reshape(len(x), -1) if x.ndim else x.reshape(1, 1)
    return ["  ".join(f"{value:8.4f}" for value in row) for row in x.tolist()]


def side_by_side(**matrices: Tensor) -> str:
    """Format matrices next to each other, each below its name."""
    columns = []
    for name, matrix in matrices.items():
        rows = lines_of(matrix)
        columns.append([f"{name:^{len(rows[0])}}", *rows])
    height = max(map(len, columns))
    padded = [column + [" " * len(column[0])] * (height - len(column)) for column in columns]
    return "\n".join("    " + "   |  ".join(line) for line in zip(*padded, strict=True))


def show(**state) -> None:
    """Print the state after a tile."""
    tile = ", ".join(f"{name} = {state.pop(name) + 1}" for name in ("i", "j") if name in state)
    if tile:
        console.print(f"  [bold]{tile}[/bold]")
    console.print(side_by_side(**state) + "\n")


def check(name: str, found: Tensor, expected: Tensor) -> None:
    """Print the distance of a result from Algorithm 0's, and exit if they differ."""
    distance = (found - expected).abs().max().item()
    console.print(f"  {name} matches Algorithm 0 to {distance:.1e}\n")
    if not distance < 1e-12:
        raise SystemExit(f"{name} differs from Algorithm 0's by {distance}")


def title(algorithm: Callable) -> None:
    """Print an algorithm's docstring as a heading and an explanation."""
    heading, _, explanation = getdoc(algorithm).removeprefix("Run ").partition(": ")
    console.rule(f"[bold]{heading}")
    console.print(f"{explanation[:1].upper()}{explanation[1:]}\n")


def walk() -> None:
    """Print all algorithms with their intermediate states, and check their results."""
    console.print("Four tokens, head size 2, tiles of 2 rows (B_r = B_c = 2); no scale and no mask.\n")
    console.print(side_by_side(Q=Q, K=K, V=V, dO=dO) + "\n")

    title(algorithms.standard_attention)
    inputs = [x.clone().requires_grad_() for x in (Q, K, V)]
    expected = algorithms.standard_attention(*inputs)
    gradients = torch.autograd.grad(expected, inputs, dO)
    algorithms.standard_attention(Q, K, V, show)

    title(algorithms.online_softmax)
    first = Q[0] @ K.T
    check("The softmax of the first row of S", algorithms.online_softmax(first, show), first.softmax(0))

    title(algorithms.merge)
    walk_merge()

    title(algorithms.flash_attention)
    O, l, m = algorithms.flash_attention(Q, K, V, TILE, TILE, show)
    check("O", O, expected)

    title(algorithms.flash_attention_backward)
    found = algorithms.flash_attention_backward(Q, K, V, O, dO, l, m, TILE, TILE, show)
    check_gradients(found, gradients)

    title(algorithms.flash_attention_2)
    O, L = algorithms.flash_attention_2(Q, K, V, TILE, TILE, show)
    check("O", O, expected)
    check("L = m + log(l), the row's logsumexp,", L, (Q @ K.T).logsumexp(1))

    title(algorithms.flash_attention_2_backward)
    found = algorithms.flash_attention_2_backward(Q, K, V, O, dO, L, TILE, TILE, show)
    check_gradients(found, gradients)

    walk_published()
    walk_block_sizes()


def check_gradients(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Check dQ, dK and dV."""
    for name, ours, autograds in zip(("dQ", "dK", "dV"), found, expected, strict=True):
        check(name, ours, autograds)


def walk_merge() -> None:
    """Print the merge of the blocks 1, 2 and 3, 4 of a row of scores."""
    x, values = torch.arange(1.0, 5.0, dtype=torch.float64), PUBLISHED[2]
    console.print(side_by_side(x=x, V=values) + "\n")
    blocks = [algorithms.softmax_block(*half) for half in zip(x.split(TILE), values.split(TILE), strict=True)]
    merged = algorithms.merge(*blocks)
    for name, block in zip(("block 1, 2", "block 3, 4", "merged"), (*blocks, merged), strict=True):
        console.print(f"  [bold]{name}[/bold]")
        m, f, l, o = block
        console.print(side_by_side(m=m, f=f, l=l, o=o[None]) + "\n")
    check("f / l", merged[1] / merged[2], x.softmax(0))
    check("o", merged[3], x.softmax(0) @ values)


def walk_published() -> None:
    """Print FlashAttention on the published example."""
    console.rule("[bold]A published example")
    console.print(
        "FlashAttention's Algorithm 1. A published version has l = 1, 1 and O = 1, 2; 2, 3 after the first tile.\n"
        "These values count only one of the two keys. Row 1 has S = 1, 1: l is 2, and O is the mean of two rows of V.\n"
    )
    console.print(side_by_side(**dict(zip("QKV", PUBLISHED, strict=True))) + "\n")
    O, _, _ = algorithms.flash_attention(*PUBLISHED, TILE, TILE, show)
    check("O", O, algorithms.standard_attention(*PUBLISHED))


def walk_block_sizes() -> None:
    """Print the tiles that Algorithm 1 of FlashAttention chooses for the on-chip memory of a multiprocessor."""
    console.rule("[bold]Tiles from the on-chip memory")
    console.print(
        "FlashAttention, Algorithm 1, line 1: B_c = ceil(M / 4d), B_r = min(B_c, d). M counts elements, not bytes.\n"
        "A100: 192 KiB per multiprocessor, as in the paper. H100: 228 KiB of shared memory per multiprocessor.\n"
    )
    console.print("    GPU    KiB   bytes per element  M (elements)     d   B_c   B_r")
    for (gpu, kib), size, d in product(ON_CHIP_KIB.items(), (2, 4), (64, 128)):
        M = kib * 1024 // size
        B_c, B_r = algorithms.block_sizes(M, d)
        kind = {2: "2 (fp16, bf16)", 4: "4 (fp32)"}[size]
        console.print(f"    {gpu:5}{kib:5}   {kind:17}{M:14,}{d:6}{B_c:6}{B_r:6}")
    console.print()
