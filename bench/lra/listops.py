"""ListOps: nested lists of digits with the operators MIN, MAX, MED and SM. The label is the value of the expression.

The grammar is from Nangia and Bowman (arXiv 1804.06028), with the parameters of Long Range Arena's generator. A node
above the largest depth is an operator with probability 1/4, with 2 to 10 arguments, and otherwise a digit. Expressions
with 500 tokens or fewer, or with 2,000 tokens or more, are dropped.

All trees of a batch grow together, one level at a time. The arguments of a node are neighbours in the next level.
"""

from typing import NamedTuple

import numpy as np

OPERATOR_SHARE, MAX_DEPTH, MAX_ARGUMENTS = 0.25, 10, 10
SHORTEST, LONGEST = 501, 1_999
OPERATORS = ("MIN", "MAX", "MED", "SM")
DIGIT_0, OPERATOR_0, END = 1, 11, 15
"""Tokens of the digit 0, of the first operator (which also opens its list), and of the closing bracket."""
WORDS = ("", *"0123456789", *(f"[{name}" for name in OPERATORS), "]")
"""The text of each token. Token 0 is padding."""
BATCH = 4_000


class Level(NamedTuple):
    """The nodes of one depth, in reading order."""

    tree: np.ndarray
    """The tree of each node."""
    arity: np.ndarray
    """Number of arguments; 0 for a digit."""
    symbol: np.ndarray
    """The digit, or the index of the operator."""


def generate(count: int, width: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens (count, width) uint8, lengths and labels of random expressions."""
    parts, found = [], 0
    while found < count:
        parts.append(_batch(width, rng))
        found += len(parts[-1][1])
    tokens, lengths, labels = (np.concatenate(part)[:count] for part in zip(*parts, strict=True))
    return tokens, lengths, labels


def _batch(width: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    levels, lengths = _grow(rng)
    is_kept = (lengths >= SHORTEST) & (lengths <= min(LONGEST, width))
    row = np.cumsum(is_kept) - 1
    levels = [Level(row[tree], *rest) for tree, *rest in (_select(level, is_kept[level.tree]) for level in levels)]
    return _write(levels, int(is_kept.sum()), width), lengths[is_kept].astype(np.int32), _evaluate(levels)


def _select(level: Level, is_kept: np.ndarray) -> Level:
    return Level(*(values[is_kept] for values in level))


def _grow(rng: np.random.Generator) -> tuple[list[Level], np.ndarray]:
    """Return the levels of BATCH trees, and the number of tokens of each tree."""
    levels, tree, lengths = [], np.arange(BATCH), np.zeros(BATCH, np.int64)
    for depth in range(1, MAX_DEPTH + 1):
        is_operator = rng.random(tree.size) < (OPERATOR_SHARE if depth < MAX_DEPTH else 0)
        arity = np.where(is_operator, rng.integers(2, MAX_ARGUMENTS, tree.size, endpoint=True), 0)
        symbol = np.where(is_operator, rng.integers(len(OPERATORS), size=tree.size), rng.integers(10, size=tree.size))
        levels.append(Level(tree, arity, symbol))
        lengths += np.bincount(tree, minlength=BATCH) + np.bincount(tree[is_operator], minlength=BATCH)
        tree = np.repeat(tree, arity)
    return levels, lengths


def _first_arguments(arity: np.ndarray) -> np.ndarray:
    """Return the index in the next level of the first argument of each operator."""
    return np.cumsum(arity) - arity


def _evaluate(levels: list[Level]) -> np.ndarray:
    """Return the values of the roots."""
    below = np.empty(0, np.int64)
    for level in reversed(levels):
        is_operator, values = level.arity > 0, level.symbol.copy()
        if is_operator.any():
            values[is_operator] = _apply(level.symbol[is_operator], level.arity[is_operator], below)
        below = values
    return below


def _apply(operators: np.ndarray, arity: np.ndarray, arguments: np.ndarray) -> np.ndarray:
    first = _first_arguments(arity)
    owner = np.repeat(np.arange(arity.size), arity)
    in_order = np.sort(owner * 10 + arguments) % 10
    median = (in_order[first + (arity - 1) // 2] + in_order[first + arity // 2]) // 2
    total = np.add.reduceat(arguments, first) % 10
    return np.choose(operators, [in_order[first], in_order[first + arity - 1], median, total])


def _write(levels: list[Level], count: int, width: int) -> np.ndarray:
    """Return the tokens. The two tokens of an operator surround its arguments."""
    spans = [np.empty(0, np.int64)]
    for level in reversed(levels):
        is_operator, span = level.arity > 0, np.ones(level.arity.size, np.int64)
        if is_operator.any():
            span[is_operator] = 2 + np.add.reduceat(spans[0], _first_arguments(level.arity[is_operator]))
        spans.insert(0, span)
    tokens, start = np.zeros((count, width), np.uint8), np.zeros(count, np.int64)
    for level, span, below in zip(levels, spans, spans[1:], strict=False):
        is_operator = level.arity > 0
        tokens[level.tree, start] = level.symbol + np.where(is_operator, OPERATOR_0, DIGIT_0)
        tokens[level.tree[is_operator], (start + span - 1)[is_operator]] = END
        arity, before = level.arity[is_operator], np.cumsum(below) - below
        offset = start[is_operator] + 1 - before[_first_arguments(arity)]
        start = np.repeat(offset, arity) + before
    return tokens
