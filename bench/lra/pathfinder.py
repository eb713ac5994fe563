"""Pathfinder: are two discs the ends of one dashed path, or do they lie on two paths?

This is our own generator for the task of Linsley et al. (arXiv 1805.08315). An image has two long paths, shorter
distractors and two discs. In a positive image, the discs are the two ends of one long path. In a negative image, each
long path has a disc at one end. An image is kept only if both are possible with similar discs: the distance of
the two discs and the distance of their middle from the image's centre are nearly equal. So the classes have the same
paths, the same number of white pixels and the same places of discs.

The label can be decided from the white pixels alone: gaps within a path are at most `Sizes.reach` wide, and white
pixels of different paths are farther apart.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

CANDIDATES = 16
POINTS_PER_PIXEL = 2
WAVES, BEND = 3, 1.2
"""Sine waves of a path's direction, and the standard deviation of the first one's amplitude in radians."""


class Drawing(NamedTuple):
    """N images of S x S pixels, and what they show."""

    images: np.ndarray
    """(N, S, S) uint8: 1 is white."""
    labels: np.ndarray
    """(N,): 1 if one path connects the discs."""
    discs: np.ndarray
    """(N, 2, 2): row and column of the centre of each disc."""
    owners: np.ndarray
    """(N, S, S) uint8: the number of the path of each white pixel, from 1 on."""


class Sizes:
    """Lengths in pixels. Strokes and gaps grow with the root of the image's size, and paths with the size itself."""

    def __init__(self, size: int):
        scale = (size / 32) ** 0.5
        self.image = size
        self.dash, self.period = 3 * scale, 5 * scale
        self.stroke_radius, self.disc_radius = 0.5 * scale, 1.5 * scale
        self.reach = self.period - self.dash + 1 / POINTS_PER_PIXEL + 2**0.5  # rounding moves each end by 2**0.5 / 2
        self.separation = 5.2 * scale  # of the centre lines; more than reach, the disc and the stroke together
        self.least_distance, self.tolerance = 8 * scale, 1.5 * scale  # of the discs
        self.long, self.short = self._whole(0.7 * size), self._whole(0.25 * size)
        self.distractors = 3 * size // 32  # fewer if the image is full
        self.batch = 8_000 // size  # images that are drawn together

    def _whole(self, length: float) -> float:
        """Return the length near `length` that begins and ends with a whole dash."""
        return self.dash + round((length - self.dash) / self.period) * self.period


def generate(count: int, size: int, rng: np.random.Generator) -> Drawing:
    """Return drawings. About half of them are positive."""
    parts, found = [], 0
    while found < count:
        parts.append(_batch(Sizes(size), rng))
        found += len(parts[-1].labels)
    return Drawing(*(np.concatenate(part)[:count] for part in zip(*parts, strict=True)))


def _batch(sizes: Sizes, rng: np.random.Generator) -> Drawing:
    blocked = np.zeros((sizes.batch, sizes.image, sizes.image), bool)
    positive = rng.integers(2, size=sizes.batch)
    one, has_one = _place(sizes.long, blocked, sizes, rng)
    _stamp(blocked, one, sizes.separation, True)

    def has_discs(candidates: np.ndarray) -> np.ndarray:
        given = np.broadcast_to(one[:, None], candidates.shape)
        return _choose_discs(given, candidates, positive[:, None], sizes)[1]

    other, has_other = _place(sizes.long, blocked, sizes, rng, has_discs)
    kept = has_one & has_other
    one, other, blocked = one[kept], other[kept], blocked[kept]
    _stamp(blocked, other, sizes.separation, True)
    images = np.arange(len(one))
    labels = rng.permutation(images % 2)
    discs = _choose_discs(one, other, positive[kept], sizes)[0][images, labels]
    owners = np.zeros(blocked.shape, np.uint8)
    for number, path in enumerate((one, other), start=1):
        _draw(path, number, owners, sizes)
    _stamp(owners, discs.swapaxes(1, 2), sizes.disc_radius, owners[images[:, None], discs[..., 0], discs[..., 1]])
    for number in range(3, 3 + sizes.distractors):
        path, is_placed = _place(sizes.short, blocked, sizes, rng)
        _draw(path, number, owners, sizes, is_placed)
        _stamp(blocked, path, sizes.separation, True, is_placed)
    return Drawing((owners > 0).astype(np.uint8), labels, discs, owners)


def _place(
    length: float,
    blocked: np.ndarray,
    sizes: Sizes,
    rng: np.random.Generator,
    accepts: Callable[[np.ndarray], np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels (N, 2, points) of a new path in each image, and whether the image has room for the path.

    `accepts` returns which candidates (N, CANDIDATES, 2, points) meet another condition.
    """
    candidates = _walk(length, len(blocked), sizes, rng)
    margin, images = sizes.disc_radius + 1, np.arange(len(blocked))
    low, high = candidates.min(axis=-1), candidates.max(axis=-1)
    room = sizes.image - 1 - 2 * margin - (high - low)
    candidates += (margin - low + rng.random(low.shape) * room)[..., None]
    pixels = np.rint(candidates).astype(np.int32).clip(0, sizes.image - 1)
    is_good = ~blocked[images[:, None, None], pixels[:, :, 0], pixels[:, :, 1]].any(axis=-1) & (room >= 0).all(axis=-1)
    if accepts:
        is_good &= accepts(pixels)
    return pixels[images, is_good.argmax(axis=1)], is_good.any(axis=1)


def _walk(length: float, images: int, sizes: Sizes, rng: np.random.Generator) -> np.ndarray:
    """Return smooth random paths (images, CANDIDATES, 2, points) that begin anywhere."""
    shape, waves = (images, CANDIDATES, WAVES), np.arange(1, WAVES + 1)
    angles = np.pi * waves[:, None] * np.arange(int(length * POINTS_PER_PIXEL) + 1) / (POINTS_PER_PIXEL * sizes.image)
    amplitude, phase = rng.normal(0, BEND / waves, shape), rng.random(shape) * 2 * np.pi
    direction = amplitude * np.cos(phase) @ np.sin(angles) + amplitude * np.sin(phase) @ np.cos(angles)
    direction += rng.random((*shape[:2], 1)) * 2 * np.pi
    return np.cumsum(np.stack([np.sin(direction), np.cos(direction)], axis=-2), axis=-1) / POINTS_PER_PIXEL


def _choose_discs(
    one: np.ndarray, other: np.ndarray, positive: np.ndarray, sizes: Sizes
) -> tuple[np.ndarray, np.ndarray]:
    """Return the discs (..., label, disc, 2) of a negative and of a positive image, and whether both are similar.

    `positive` is the path, 0 or 1, whose ends are the discs of the positive image. The negative image takes the most
    similar ends of the two paths.
    """
    ends = np.stack([one[..., [0, -1]], other[..., [0, -1]]], axis=-3).swapaxes(-1, -2)
    negatives = np.stack([ends[..., [0, 1], [i, j], :] for i in (0, 1) for j in (0, 1)], axis=-3)
    joined = np.where(positive[..., None, None] == 0, ends[..., 0, :, :], ends[..., 1, :, :])
    differences = np.abs(_places(negatives, sizes) - _places(joined, sizes)[..., None, :]).max(axis=-1)
    nearest = differences.argmin(axis=-1)
    apart = np.take_along_axis(negatives, nearest[..., None, None, None], axis=-3).squeeze(-3)
    is_far = np.minimum(_places(apart, sizes)[..., 0], _places(joined, sizes)[..., 0]) >= sizes.least_distance
    return np.stack([apart, joined], axis=-3), is_far & (differences.min(axis=-1) <= sizes.tolerance)


def _places(discs: np.ndarray, sizes: Sizes) -> np.ndarray:
    """Return the distance of two discs from each other, and of their middle from the image's centre."""
    from_centre = discs.mean(axis=-2) - (sizes.image - 1) / 2
    return np.linalg.norm(np.stack([discs[..., 0, :] - discs[..., 1, :], from_centre], axis=-2), axis=-1)


def _draw(path: np.ndarray, number: int, owners: np.ndarray, sizes: Sizes, is_chosen: np.ndarray | None = None) -> None:
    """Draw a path as dashes."""
    is_dash = np.arange(path.shape[-1]) / POINTS_PER_PIXEL % sizes.period <= sizes.dash
    _stamp(owners, path[..., is_dash], sizes.stroke_radius, number, is_chosen)


def _stamp(
    target: np.ndarray, pixels: np.ndarray, radius: float, value: object, is_chosen: np.ndarray | None = None
) -> None:
    """Write `value` into all pixels of `target` (N, S, S) that lie within `radius` of `pixels` (N, 2, points)."""
    images = np.arange(len(target)) if is_chosen is None else np.flatnonzero(is_chosen)
    pixels, reach, last = pixels[images], int(radius), target.shape[-1] - 1
    for row in range(-reach, reach + 1):
        rows = (pixels[:, 0] + row).clip(0, last)  # the edge is nearer than a pixel beyond the edge
        reach_here = int((radius**2 - row**2) ** 0.5)
        for column in range(-reach_here, reach_here + 1):
            target[images[:, None], rows, (pixels[:, 1] + column).clip(0, last)] = value
