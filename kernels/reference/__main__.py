"""Walk through attention on a 4 x 2 example, tile by tile: python -m kernels.reference."""

from collections.abc import Callable
from inspect import getdoc

import torch
from rich.console import Console
from torch import Tensor

from kernels.reference import algorithms

Q = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, -1.0]], dtype=torch.float64)
K = torch.tensor([[1.0, 1.0], [0.0, 2.0], [3.0, 0.0], [-1.0, 1.0]], dtype=torch.float64)
V = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0], [4.0, -1.0]], dtype=torch.float64)
dO = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, -1.0], [0.5, 0.5]], dtype=torch.float64)
TILE = 2
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
    heading, _, explanation = getdoc(algorithm).partition(": ")
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

    title(algorithms.flash_attention)
    check("O", algorithms.flash_attention(Q, K, V, TILE, TILE, show), expected)

    title(algorithms.flash_attention_2)
    O, L = algorithms.flash_attention_2(Q, K, V, TILE, TILE, show)
    check("O", O, expected)
    check("L = m + log(l), the row's logsumexp,", L, (Q @ K.T).logsumexp(1))

    title(algorithms.flash_attention_2_backward)
    found = algorithms.flash_attention_2_backward(Q, K, V, O, dO, L, TILE, TILE, show)
    for name, ours, autograds in zip(("dQ", "dK", "dV"), found, gradients, strict=True):
        check(name, ours, autograds)


if __name__ == "__main__":
    walk()
