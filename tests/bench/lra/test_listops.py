"""ListOps against an evaluator that reads the words of an expression."""

import statistics

import numpy as np
import pytest

from bench.lra import listops

COUNT, WIDTH = 600, 2_000
FUNCTIONS = {"[MIN": min, "[MAX": max, "[MED": lambda x: int(statistics.median(x)), "[SM": lambda x: sum(x) % 10}


@pytest.fixture(scope="module")
def examples() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return listops.generate(COUNT, WIDTH, np.random.default_rng(1))


def parse(words: list[str]) -> tuple[int, int]:
    """Return the value and the depth of an expression that the words write completely."""
    open_lists, result = [], None
    for position, word in enumerate(words):
        if word in FUNCTIONS:
            open_lists.append((word, [], []))
            continue
        value, depth = (int(word), 1) if word.isdigit() else (None, None)
        if word == "]":
            name, values, depths = open_lists.pop()
            assert 2 <= len(values) <= 10
            value, depth = FUNCTIONS[name](values), 1 + max(depths)
        if open_lists:
            open_lists[-1][1].append(value)
            open_lists[-1][2].append(depth)
        else:
            assert position == len(words) - 1
            result = value, depth
    assert not open_lists
    return result


def test_labels_are_the_values_of_well_formed_expressions(examples):
    tokens, lengths, labels = examples
    assert tokens.shape == (COUNT, WIDTH) and tokens.dtype == np.uint8
    parsed = [parse([listops.WORDS[token] for token in row[:n]]) for row, n in zip(tokens, lengths, strict=True)]
    assert [value for value, _ in parsed] == labels.tolist()
    assert max(depth for _, depth in parsed) == 10
    assert not any(row[n:].any() for row, n in zip(tokens, lengths, strict=True))
    assert {token for row in tokens for token in np.unique(row)} == set(range(len(listops.WORDS)))


def test_lengths_fill_the_range_and_stay_within_its_limits(examples):
    lengths = examples[1]
    assert 500 < lengths.min() < 520 and 1_900 < lengths.max() < 2_000


def test_no_label_is_rare_or_tells_most_examples(examples):
    shares = np.bincount(examples[2], minlength=10) / COUNT
    assert shares.min() > 0.03 and shares.max() < 0.25


def test_a_seed_decides_every_token(examples):
    again = listops.generate(COUNT, WIDTH, np.random.default_rng(1))
    assert all(np.array_equal(one, other) for one, other in zip(examples, again, strict=True))
    other = listops.generate(COUNT, WIDTH, np.random.default_rng(2))
    assert len(np.unique(np.concatenate([examples[0], other[0]]), axis=0)) == 2 * COUNT
