"""Pathfinder: the labels against a flood fill of the pixels, and what must not tell the classes apart."""

from functools import cache

import numpy as np
import pytest

from bench.lra.pathfinder import Drawing, Sizes, generate

COUNTS = {32: 600, 64: 60, 128: 12, 256: 4}
sizes = pytest.mark.parametrize("size", COUNTS)


@cache
def drawn(size: int) -> Drawing:
    return generate(COUNTS[size], size, np.random.default_rng(size))


def flood(image: np.ndarray, start: np.ndarray, reach: float) -> np.ndarray:
    """Return the white pixels that steps of at most `reach` from white pixel to white pixel lead to."""
    white = np.argwhere(image)
    is_reached = (white == start).all(axis=1)
    assert is_reached.any()
    frontier = is_reached.copy()
    while frontier.any():
        steps = white[~is_reached, None] - white[None, frontier]
        frontier = np.zeros_like(is_reached)
        frontier[~is_reached] = ((steps**2).sum(axis=-1) <= reach**2).any(axis=1)
        is_reached |= frontier
    found = np.zeros_like(image)
    found[tuple(white[is_reached].T)] = 1
    return found


@sizes
def test_a_flood_fill_from_a_disc_finds_its_path_and_the_label(size):
    """This also shows that no two paths touch: the fill would spread from one to the other."""
    drawing = drawn(size)
    assert drawing.images.shape == (COUNTS[size], size, size) and drawing.images.dtype == np.uint8
    for image, label, discs, owners in zip(*drawing, strict=True):
        filled = flood(image, discs[0], Sizes(size).reach)
        owner, other = (owners[tuple(disc)] for disc in discs)
        assert (filled == (owners == owner)).all() and (image == (owners > 0)).all()
        assert label == filled[tuple(discs[1])] == (owner == other)


@sizes
def test_images_have_two_full_discs_and_dashes(size):
    drawing, radius, dashes = drawn(size), Sizes(size).disc_radius, []
    rows, columns = np.indices((size, size))
    for image, _, discs, owners in zip(*drawing, strict=True):
        for row, column in discs:
            assert image[(rows - row) ** 2 + (columns - column) ** 2 <= radius**2].all()
        dashes.append(0)
        rest = owners == owners[tuple(discs[0])]
        while rest.any():
            rest = rest & (flood(rest, np.argwhere(rest)[0], 2**0.5) == 0)
            dashes[-1] += 1
    assert np.median(dashes) >= 4 and drawing.images.mean() < 0.1


def test_half_of_the_images_are_positive():
    assert abs(drawn(32).labels.sum() - COUNTS[32] / 2) <= 0.05 * COUNTS[32]


def test_a_seed_decides_every_pixel():
    one, again, other = (generate(20, 32, np.random.default_rng(seed)).images for seed in (5, 5, 6))
    assert np.array_equal(one, again) and len(np.unique(np.concatenate([one, other]), axis=0)) == 40


def separation(values: np.ndarray, labels: np.ndarray) -> float:
    """Return how far the area under the ROC curve of a threshold on `values` is from chance, in standard deviations."""
    values = values.astype(float)
    pairs = np.sign(values[labels == 1][:, None] - values[None, labels == 0])
    positive, negative = (labels == 1).sum(), (labels == 0).sum()
    return abs(pairs.mean()) / 2 / (len(labels) / (12 * positive * negative)) ** 0.5


def test_simple_statistics_do_not_tell_the_classes_apart():
    drawing = drawn(32)
    distance = np.linalg.norm(drawing.discs[:, 0] - drawing.discs[:, 1], axis=1)
    middle = np.linalg.norm(drawing.discs.mean(axis=1) - 15.5, axis=1)
    paths = drawing.owners.max(axis=(1, 2))
    for values in (drawing.images.sum(axis=(1, 2)), drawing.images.mean(axis=1).std(axis=1), distance, middle, paths):
        assert separation(values, drawing.labels) < 3
    assert separation(drawing.labels + distance / 32, drawing.labels) > 10  # the measure itself sees a difference


def test_a_linear_classifier_of_pixels_is_no_better_than_chance():
    drawing, half = drawn(32), COUNTS[32] // 2
    pixels, targets = drawing.images.reshape(2 * half, -1) - 0.06, 2 * drawing.labels - 1
    kernel = pixels[:half] @ pixels[:half].T + 10 * np.eye(half)
    weights = pixels[:half].T @ np.linalg.solve(kernel, targets[:half])
    accuracy = (np.sign(pixels[half:] @ weights) == targets[half:]).mean()
    assert accuracy < 0.5 + 3 * 0.5 / half**0.5
