"""Arithmetic of ranges: the part of a tensor that lies at [start, stop) in every dimension; and ranges in words."""

from __future__ import annotations

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]


def shape_of(ranges: Ranges) -> tuple[int, ...]:
    """The shape of the part."""
    return tuple(stop - start for start, stop in ranges)


def index_of(ranges: Ranges) -> tuple[slice, ...]:
    """The index that selects the part."""
    return tuple(slice(start, stop) for start, stop in ranges)


def intersection(left: Ranges, right: Ranges) -> Ranges | None:
    """The elements that both parts have, None when there is none."""
    if left == right:
        return left  # most parts of a large model are whole experts
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return common if all(start < stop for start, stop in common) else None


def relative(inner: Ranges, outer: Ranges) -> tuple[slice, ...]:
    """The index of ``inner`` in a tensor that holds ``outer``."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(inner, outer, strict=True))


def runs_text(numbers: Iterable[int]) -> str:
    """Whole numbers as a person writes them: ``0-3, 8`` for 0, 1, 2, 3 and 8, in any order."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
