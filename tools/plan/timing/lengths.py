"""How long responses are: a distribution from a mean and a limit, and what the longest of several is expected to be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import exp, sqrt
from statistics import NormalDist

POINTS = 64  # equally likely lengths that stand for the distribution
DEFAULT_SPREAD = 0.6


@dataclass(frozen=True)
class LengthDistribution:
    """``points``: lengths in tokens, ascending, each as likely as another."""

    points: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Expected length."""
        return sum(self.points) / len(self.points)

    @property
    def mean_square(self) -> float:
        """Expected square of the length, which attention pays for."""
        return sum(point * point for point in self.points) / len(self.points)

    @property
    def longest(self) -> float:
        """No response is longer."""
        return self.points[-1]

    def max_of(self, count: float) -> float:
        """Expected longest of ``count`` responses: sum over x of x P(max = x)."""
        return _max_of(self.points, count)

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
        return LengthDistribution((mean,) * POINTS)
    normal = NormalDist()
    shape = [exp(spread * normal.inv_cdf((place + 0.5) / POINTS)) for place in range(POINTS)]
    low, high = 0.0, limit / shape[0]
    for _ in range(48):  # the mean grows with the median
        median = (low + high) / 2
        if sum(min(limit, median * point) for point in shape) < mean * POINTS:
            low = median
        else:
            high = median
    return LengthDistribution(tuple(min(limit, low * point) for point in shape))


@lru_cache(maxsize=4096)
def _max_of(points: tuple[float, ...], count: float) -> float:
    below = 0.0
    expected = 0.0
    for place, point in enumerate(points, start=1):
        up_to = (place / len(points)) ** count
        expected += point * (up_to - below)
        below = up_to
    return expected
