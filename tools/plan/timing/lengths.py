"""How long responses are: a distribution from a mean and a limit, and what the longest of several is expected to be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import exp, sqrt
from statistics import NormalDist

DEFAULT_SPREAD = 0.6
# Shares of responses below which the intervals of a distribution end: even ones, then ever finer towards the longest.
_EDGES = (*(index / 32 for index in range(31)), *(1 - 2.0**-power for power in range(5, 16)), 1.0)


@dataclass(frozen=True)
class LengthDistribution:
    """``points``: lengths in tokens, ascending; ``below``: the share of responses that is no longer, 1 at last."""

    points: tuple[float, ...]
    below: tuple[float, ...]

    @cached_property
    def mean(self) -> float:
        """Expected length."""
        return sum((high - low) * point for point, (low, high) in self._intervals)

    @cached_property
    def mean_square(self) -> float:
        """Expected square of the length, which attention pays for."""
        return sum((high - low) * point * point for point, (low, high) in self._intervals)

    @property
    def _intervals(self) -> Iterable[tuple[float, tuple[float, float]]]:
        return zip(self.points, pairwise((0.0, *self.below)), strict=True)

    @property
    def longest(self) -> float:
        """The length that no response exceeds."""
        return self.points[-1]

    def max_of(self, count: float) -> float:
        """Expected longest of ``count`` responses: sum over x of x P(max = x)."""
        return _max_of(self, count)

    def max_of_sums(self, count: float, size: float) -> float:
        """Expected largest of ``count`` sums of ``size`` responses.

        The excess over the mean grows as the root of ``size``, as a sum's standard deviation does.
        """
        return min(size * self.mean + sqrt(size) * (self.max_of(count) - self.mean), size * self.longest)


@lru_cache(maxsize=256)
def length_distribution(mean: float, limit: float, spread: float = DEFAULT_SPREAD) -> LengthDistribution:
    """Log-normal lengths with standard deviation ``spread`` of the logarithm, cut at ``limit``, whose mean is ``mean``.

    ``spread`` 0, or a mean at the limit: every response has the mean length. ValueError for a mean outside (0, limit].
    """
    if not 0 < mean <= limit:
        raise ValueError(f"mean response length {mean} is outside (0, {limit}], the limit on response lengths")
    if spread <= 0 or mean > 0.985 * limit:
        return LengthDistribution((mean,), (1.0,))
    normal = NormalDist()
    shape = [exp(spread * normal.inv_cdf((low + high) / 2)) for low, high in pairwise(_EDGES)]
    shares = [high - low for low, high in pairwise(_EDGES)]
    low, high = 0.0, limit / shape[0]
    for _ in range(48):  # the mean grows with the median
        median = (low + high) / 2
        if sum(share * min(limit, median * point) for share, point in zip(shares, shape, strict=True)) < mean:
            low = median
        else:
            high = median
    points = [min(limit, low * point) for point in shape]
    # The intervals that the limit has cut are one.
    first = next((index for index, point in enumerate(points) if point == points[-1]), len(points) - 1)
    return LengthDistribution(tuple(points[: first + 1]), (*_EDGES[1 : first + 1], 1.0))


@lru_cache(maxsize=256)
def scattered(lengths: LengthDistribution, variance: float) -> LengthDistribution:
    """``lengths``, each with a normal deviation whose variance is ``variance`` times the length."""
    normal, edges = NormalDist(), list(pairwise(_EDGES))
    deviations = [(normal.inv_cdf((low + high) / 2), high - low) for low, high in edges]
    pairs = sorted(
        (max(1.0, point + sqrt(variance * point) * deviation), (high - low) * share)
        for point, (low, high) in lengths._intervals
        for deviation, share in deviations
    )
    points, below, so_far = [], [], 0.0
    ends = iter(_EDGES[1:])
    end, total, weight = next(ends), 0.0, 0.0
    for point, share in pairs:
        so_far, total, weight = so_far + share, total + point * share, weight + share
        if so_far >= end - 1e-9:
            points.append(total / weight)
            below.append(min(so_far, 1.0))
            end, total, weight = next((edge for edge in ends if edge > so_far), 2.0), 0.0, 0.0
    return LengthDistribution(tuple(points), (*below[:-1], 1.0))


@lru_cache(maxsize=4096)
def _max_of(lengths: LengthDistribution, count: float) -> float:
    powers = [below**count for below in (0.0, *lengths.below)]
    return sum(point * (high - low) for point, (low, high) in zip(lengths.points, pairwise(powers), strict=True))
