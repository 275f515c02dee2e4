"""Laws of real-valued noise and of randomized responses: Gaussian, and unary encoding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy  # its parts are loaded when they are first used, which most processes never do
from numpy.typing import ArrayLike

from shufflerl.arrays import FloatArray
from shufflerl.checks import real, whole
from shufflerl.noise.law import MAX_COUNT, Spread


@dataclass(frozen=True)
class GaussianNoise:
    """Normal noise, as a trusted server or a user of the local model adds it."""

    sd: float

    def __post_init__(self) -> None:
        """Refuse a standard deviation that is no positive number."""
        object.__setattr__(self, "sd", real("sd of the noise", self.sd, above=0))

    @property
    def variance(self) -> float:
        """Square of the standard deviation."""
        return self.sd**2

    def bound(self, failure: float) -> float:
        """The t with P(|noise| > t) = failure."""
        return float(-self.sd * scipy.special.ndtri(real("failure", failure, above=0, below=1) / 2))

    def cdf(self, values: ArrayLike) -> FloatArray:
        """P(noise <= value), for every value."""
        return np.asarray(scipy.special.ndtr(np.asarray(values, dtype=np.float64) / self.sd))

    def repeated(self, times: int) -> GaussianNoise:
        """Variances add."""
        return GaussianNoise(self.sd * math.sqrt(whole("times", times, least=1)))

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        """Independent draws for simulation."""
        return on_lattice(rng.normal(0.0, self.sd, size), self.sd)


def on_lattice(values: FloatArray, sd: float) -> FloatArray:
    """Round noise to multiples of a power of two that divides one and is tiny beside the deviation.

    Added to a whole count it then stays a multiple: the sum is exact, and its last bits tell nothing of the count, as
    those of an unrounded sum do (near zero floating point is finer than near one). Counts are whole, so this is the
    same as rounding the sum: post-processing.
    """
    fineness = 2.0 ** max(0, 24 - math.frexp(sd)[1])
    return np.asarray(np.rint(values * fineness) / fineness)


@dataclass(frozen=True)
class UnaryNoise(Spread):
    """The error of counts estimated from unary encoding when each user reports one of `groups` families and steps.

    Of the reported bits the user's own is a fair coin, every other one a one with probability `flip`. The law depends
    on the count: a user who touched the counter may report another step. `variance` and `bound` hold for every count
    from 0 to `users`; `cdf` and `sample` are exact for a counter that nobody touched.
    """

    users: int
    groups: int
    flip: float

    def __post_init__(self) -> None:
        """Refuse what is no such encoding."""
        object.__setattr__(self, "users", whole("users", self.users, least=1, most=MAX_COUNT))
        object.__setattr__(self, "groups", whole("groups", self.groups, least=1))
        object.__setattr__(self, "flip", real("flip", self.flip, above=0, below=0.5))

    @property
    def weight(self) -> float:
        """What one more one-bit adds to the estimate."""
        return self.groups / (0.5 - self.flip)

    @property
    def variance(self) -> float:
        """The largest over all counts; it is linear in the count, so one of the ends has it."""
        signal = (0.5 - self.flip) ** 2
        untouched = self.groups * self.flip * (1 - self.flip) / signal
        touched = self.groups * (0.25 / signal + 1) - 1
        return self.users * max(untouched, touched)

    def bound(self, failure: float) -> float:
        """A t with P(|noise| > t) <= failure for every count (Bernstein: independent users, each within `weight`)."""
        depth = math.log(2 / real("failure", failure, above=0, below=1))
        return math.sqrt(2 * self.variance * depth + (self.weight * depth / 3) ** 2) + self.weight * depth / 3

    def cdf(self, values: ArrayLike) -> FloatArray:
        """P(noise <= value) where nobody touched the counter: binomial ones among a binomial number of reports."""
        from scipy import stats

        low, high = stats.binom.ppf([1e-16, 1 - 1e-16], self.users, 1 / self.groups)
        reports = np.arange(low, high + 1)
        ones = np.asarray(values, dtype=np.float64)[..., None] / self.weight + reports * self.flip
        chances = stats.binom.pmf(reports, self.users, 1 / self.groups)
        return np.asarray(stats.binom.cdf(np.floor(ones + 1e-9), reports, self.flip) @ chances)

    def repeated(self, times: int) -> UnaryNoise:
        """More users of the same kind."""
        return UnaryNoise(self.users * whole("times", times, least=1), self.groups, self.flip)

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        """Independent draws for counters that nobody touched."""
        reports = rng.binomial(self.users, 1 / self.groups, size)
        return np.asarray(self.weight * (rng.binomial(reports, self.flip) - reports * self.flip), dtype=np.float64)
