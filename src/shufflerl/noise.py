"""Noise laws: what is added to every counter of a release, how far it reaches, and how it is drawn.

All laws are centred: `PoissonNoise(mean)` is the law of Poisson(mean) - mean. A learner reads `variance` and `bound`;
the simulator draws with `sample`; what a law costs in privacy is the accountant's business (`accounting`). Laws of
whole counts (`Whole`) have a `mean`: the expected count, which whoever reads the counters subtracts.

>>> PoissonNoise(100.0).sd
10.0
>>> PoissonNoise(100.0).bound(0.05)
20.0
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import scipy  # its parts are loaded when they are first used, which most processes never do
from numpy.typing import ArrayLike

from shufflerl.arrays import FloatArray
from shufflerl.checks import real, whole
from shufflerl.errors import InvalidInputError

#: Counts are drawn as 64-bit integers, so no law may reach further.
LARGEST_COUNT = 10**18

#: From this variance on the tails come from an expansion of our own: SciPy 1.17 cuts the series of the incomplete gamma
#: function short, so that the upper tail, and every error bound with it, is too small (by 28% at six deviations of
#: Poisson(1e8)), and its incomplete beta function turns slow and, near 1e17 trials, undefined.
_WIDE = 1e5

#: Scales of Laplace laws. Below, noise hardly ever comes; above, a scale is no fraction of 53-bit whole numbers.
LEAST_SCALE, LARGEST_SCALE = 2.0**-6, 2.0**53

#: Outcomes of a part of a sum that are left out are together about this probable.
_LEFT_OUT = 1e-18
#: Outcomes closer than this part of a sum's deviation are not told apart.
_CELLS_PER_DEVIATION = 500


class Noise(Protocol):
    """A centred noise law, the same and independent for every counter of a release."""

    @property
    def variance(self) -> float:
        """Mean squared error per counter."""
        ...

    @property
    def sd(self) -> float:
        """Standard deviation per counter."""
        ...

    def bound(self, failure: float) -> float:
        """The smallest t with P(|noise| > t) <= failure."""
        ...

    def cdf(self, values: ArrayLike) -> FloatArray:
        """P(noise <= value), for every value."""
        ...

    def repeated(self, times: int) -> Noise:
        """The law of the sum of `times` independent copies."""
        ...

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        """Independent draws for simulation. Deployed nodes draw their messages themselves, never from a seed.

        Those of a table are those of its rows, one after the other.
        """
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class NoNoise:
    """No noise at all: exact counts, no privacy."""

    @property
    def variance(self) -> float:
        """Zero."""
        return 0.0

    @property
    def sd(self) -> float:
        """Zero."""
        return 0.0

    def bound(self, failure: float) -> float:
        """Zero: exact counts are never wrong."""
        real("failure", failure, above=0, below=1)
        return 0.0

    def cdf(self, values: ArrayLike) -> FloatArray:
        """A step at zero."""
        return (np.asarray(values, dtype=np.float64) >= 0).astype(np.float64)

    def repeated(self, times: int) -> NoNoise:
        """Nothing adds up to nothing."""
        whole("times", times, least=1)
        return self

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        """Zeros; the generator is not advanced."""
        return np.zeros(size)


@dataclass(frozen=True)
class PoissonNoise:
    """Poisson(mean) - mean: the one-bits all users of a batch add to one counter, less their expectation."""

    mean: float

    def __post_init__(self) -> None:
        """Refuse a mean that is no positive number."""
        object.__setattr__(self, "mean", real("mean of the noise", self.mean, above=0, below=LARGEST_COUNT))

    @property
    def variance(self) -> float:
        """A Poisson variable has its mean as variance."""
        return self.mean

    @property
    def sd(self) -> float:
        """Square root of the mean."""
        return math.sqrt(self.mean)

    def bound(self, failure: float) -> float:
        """The smallest t with P(|noise| > t) <= failure; always a distance the noise can take."""
        return _lattice_bound(self.mean, self.variance, self._tails, real("failure", failure, above=0, below=1))

    def cdf(self, values: ArrayLike) -> FloatArray:
        """P(noise <= value), for every value."""
        return self._tails(_counts(self.mean, values))[0]

    def repeated(self, times: int) -> PoissonNoise:
        """Poisson means add."""
        return PoissonNoise(self.mean * whole("times", times, least=1))

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        """Independent draws for simulation."""
        return np.asarray(rng.poisson(self.mean, size) - self.mean, dtype=np.float64)

    def _tails(self, counts: FloatArray) -> tuple[FloatArray, FloatArray]:
        shape = np.maximum(counts, 0.0) + 1
        if self.variance > _WIDE:
            below, above = _wide_tails(counts, self.mean - shape, None)
        else:
            below, above = scipy.special.gammaincc(shape, self.mean), scipy.special.gammainc(shape, self.mean)
        return _outside(counts, math.inf, below, above)


@dataclass(frozen=True)
class BinomialNoise:
    """Binomial(trials, probability) less its mean: the random bits of the paper's protocol on one counter."""

    trials: int
    probability: float

    def __post_init__(self) -> None:
        """Refuse what is no binomial law with a positive variance."""
        object.__setattr__(self, "trials", whole("trials", self.trials, least=1, most=LARGEST_COUNT))
        object.__setattr__(self, "probability", real("probability", self.probability, above=0, below=1))

    @property
    def mean(self) -> float:
        """Expected number of noise bits per counter, which the analyzer subtracts."""
        return self.trials * self.probability

    @property
    def variance(self) -> float:
        """trials * probability * (1 - probability)."""
        return self.mean * (1 - self.probability)

    @property
    def sd(self) -> float:
        """Square root of the variance."""
        return math.sqrt(self.variance)

    def bound(self, failure: float) -> float:
        """The smallest t with P(|noise| > t) <= failure; always a distance the noise can take."""
        return _lattice_bound(self.mean, self.variance, self._tails, real("failure", failure, above=0, below=1))

    def cdf(self, values: ArrayLike) -> FloatArray:
        """P(noise <= value), for every value."""
        return self._tails(_counts(self.mean, values))[0]

    def repeated(self, times: int) -> BinomialNoise:
        """Trials add."""
        return BinomialNoise(self.trials * whole("times", times, least=1), self.probability)

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        """Independent draws for simulation."""
        return np.asarray(rng.binomial(self.trials, self.probability, size) - self.mean, dtype=np.float64)

    def _tails(self, counts: FloatArray) -> tuple[FloatArray, FloatArray]:
        inside = np.clip(counts, 0.0, self.trials - 1)
        shape, others = inside + 1, self.trials - inside
        if self.variance > _WIDE:
            below, above = _wide_tails(inside, self.mean + self.probability - shape, others)
        else:
            below = scipy.special.betaincc(shape, others, self.probability)
            above = scipy.special.betainc(shape, others, self.probability)
        return _outside(counts, self.trials, below, above)


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


@dataclass(frozen=True)
class DiscreteLaplace:
    """Whole numbers z with probability in proportion to exp(-|z|/scale): what a server adds to counts it has opened."""

    scale: float

    def __post_init__(self) -> None:
        """Refuse a scale at which nothing could be drawn exactly."""
        object.__setattr__(self, "scale", _scale(self.scale))

    @property
    def mean(self) -> float:
        """Zero: nothing is to be subtracted."""
        return 0.0

    @property
    def variance(self) -> float:
        """2p/(1-p)^2 with p = exp(-1/scale)."""
        return 0.5 / math.sinh(0.5 / self.scale) ** 2

    @property
    def sd(self) -> float:
        """Square root of the variance."""
        return math.sqrt(self.variance)

    def bound(self, failure: float) -> float:
        """The smallest t with P(|noise| > t) <= failure; always a distance the noise can take."""
        return _symmetric_bound(self._tails, self.scale, real("failure", failure, above=0, below=1))

    def cdf(self, values: ArrayLike) -> FloatArray:
        """P(noise <= value), for every value."""
        return self._tails(np.floor(np.asarray(values, dtype=np.float64)))[0]

    def repeated(self, times: int) -> DiscreteLaplace | NoiseSum:
        """The sum of copies is no Laplace law."""
        return self if whole("times", times, least=1) == 1 else NoiseSum((self,) * times)

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        """Independent draws for simulation: the difference of two geometric counts."""
        shape = (size,) if isinstance(size, int) else size
        pairs = rng.geometric(-math.expm1(-1 / self.scale), (*shape, 2))
        return np.asarray(pairs[..., 0] - pairs[..., 1], dtype=np.float64)

    def _tails(self, counts: FloatArray) -> tuple[FloatArray, FloatArray]:
        # P(Z > t) = p^(t+1)/(1+p) for t >= 0, and Z is symmetric.
        above = np.exp(-(np.maximum(counts, 0.0) + 1) / self.scale) / (1 + math.exp(-1 / self.scale))
        below = np.exp(np.minimum(counts, -1.0) / self.scale) / (1 + math.exp(-1 / self.scale))
        return np.where(counts < 0, below, 1 - above), np.where(counts < 0, 1 - below, above)


@dataclass(frozen=True)
class TruncatedLaplace:
    """Discrete Laplace noise given that it lies in [-shift, shift]: with `shift` added, from 0 to 2*shift dummies."""

    scale: float
    shift: int

    def __post_init__(self) -> None:
        """Refuse a cut that leaves little of the law."""
        object.__setattr__(self, "scale", _scale(self.scale))
        object.__setattr__(self, "shift", whole("shift", self.shift, least=1, most=LARGEST_COUNT))
        if self.shift < self.scale:
            raise InvalidInputError(
                f"shift is {self.shift} and scale {self.scale:g}; expected a shift of at least the scale."
            )

    @property
    def mean(self) -> float:
        """Expected number of dummies per counter, which whoever counts subtracts."""
        return float(self.shift)

    @property
    def variance(self) -> float:
        """That of the whole law, less what the cut takes away."""
        # Of sum z^2 p^z / sum p^z over 1..n; with u = 1 - p the numerator is p (1 + p - p^n ((n u + 1)^2 + p)) / u^3.
        n, p, u = self.shift, math.exp(-1 / self.scale), -math.expm1(-1 / self.scale)
        left = math.exp(-n / self.scale)
        return 2 * p * (1 + p - left * ((n * u + 1) ** 2 + p)) / (u**2 * (1 + p - 2 * p * left))

    @property
    def sd(self) -> float:
        """Square root of the variance."""
        return math.sqrt(self.variance)

    def bound(self, failure: float) -> float:
        """The smallest t with P(|noise| > t) <= failure; always a distance the noise can take."""
        return _symmetric_bound(self._centred_tails, self.scale, real("failure", failure, above=0, below=1))

    def cdf(self, values: ArrayLike) -> FloatArray:
        """P(noise <= value), for every value."""
        return self._centred_tails(np.floor(np.asarray(values, dtype=np.float64)))[0]

    def repeated(self, times: int) -> TruncatedLaplace | NoiseSum:
        """The sum of copies is no Laplace law."""
        return self if whole("times", times, least=1) == 1 else NoiseSum((self,) * times)

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        """Independent draws for simulation: what falls outside is drawn again."""
        if not isinstance(size, int):
            return _by_rows(self, rng, size)
        drawn = DiscreteLaplace(self.scale).sample(rng, size)
        while (outside := np.abs(drawn) > self.shift).any():
            drawn[outside] = DiscreteLaplace(self.scale).sample(rng, int(outside.sum()))
        return drawn

    def _tails(self, counts: FloatArray) -> tuple[FloatArray, FloatArray]:
        return self._centred_tails(counts - self.shift)

    def _centred_tails(self, noise: FloatArray) -> tuple[FloatArray, FloatArray]:
        # Up to a common factor, P(Z > t) is p^(t+1) - p^(n+1) for t >= 0, and all together 1 + p - 2 p^(n+1).
        end, p = self.shift + 1, math.exp(-1 / self.scale)

        def beyond(distance: FloatArray) -> FloatArray:
            inside = np.minimum(distance, end)
            rest = -np.expm1(-(end - inside) / self.scale)
            return np.asarray(np.exp(-inside / self.scale) * rest / (1 + p - 2 * math.exp(-end / self.scale)))

        below, above = beyond(np.maximum(-noise, 1.0)), beyond(np.maximum(noise, 0.0) + 1)
        return np.where(noise < 0, below, 1 - above), np.where(noise < 0, 1 - below, above)


@dataclass(frozen=True)
class NoiseSum:
    """The sum of independent noises of whole counts, such as the dummies of one server and the noise of another.

    Distribution function and bound come from the convolution of the parts: exact up to a deviation of about 500; where
    the sum is wider, neighbouring counts share a cell, and the bound is a cell larger so that it still holds.
    """

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        """Refuse an empty sum, and what is no noise of whole counts."""
        parts = tuple(self.parts)
        if not parts or not all(isinstance(part, Part) for part in parts):
            raise InvalidInputError(f"The parts of the noise are {parts!r}; expected one law of whole counts or more.")
        object.__setattr__(self, "parts", parts)

    @property
    def mean(self) -> float:
        """Expected sum of the counts, which whoever reads them subtracts."""
        return math.fsum(part.mean for part in self.parts)

    @property
    def variance(self) -> float:
        """Variances add."""
        return math.fsum(part.variance for part in self.parts)

    @property
    def sd(self) -> float:
        """Square root of the variance."""
        return math.sqrt(self.variance)

    def bound(self, failure: float) -> float:
        """The smallest t with P(|noise| > t) <= failure, up to the width of a cell."""
        cells = _cells(self.parts)
        allowed = real("failure", failure, above=0, below=1) - len(self.parts) * _LEFT_OUT
        distances = np.abs(cells.noise)
        order = np.argsort(-distances, kind="stable")
        taken = np.cumsum(cells.masses[order]) <= allowed
        # All at one distance lie beyond a bound or none does: go in until a distance is not wholly taken.
        kept = distances[order][~taken]
        return float(kept[0] + cells.slack) if kept.size else 0.0

    def cdf(self, values: ArrayLike) -> FloatArray:
        """P(noise <= value), for every value."""
        cells = _cells(self.parts)
        sums = np.append(0.0, np.minimum(np.cumsum(cells.masses), 1.0))
        places = (np.asarray(values, dtype=np.float64) - cells.noise[0]) / cells.width
        return np.asarray(sums[np.clip(np.floor(places + 1e-9).astype(np.int64) + 1, 0, len(sums) - 1)])

    def repeated(self, times: int) -> NoiseSum:
        """Every part as often."""
        return NoiseSum(self.parts * whole("times", times, least=1))

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        """Independent draws for simulation."""
        if not isinstance(size, int):
            return _by_rows(self, rng, size)
        counts = np.rint(sum(part.sample(rng, size) + part.mean for part in self.parts))
        return np.asarray(counts - self.mean)


#: What `NoiseSum` adds up.
Part: TypeAlias = PoissonNoise | BinomialNoise | DiscreteLaplace | TruncatedLaplace
#: Laws of whole counts less their mean.
Whole: TypeAlias = Part | NoiseSum


@dataclass(frozen=True, eq=False)
class _Cells:
    """A law on evenly spaced values of noise, `width` apart; true values are at most `slack` away from theirs."""

    noise: FloatArray
    masses: FloatArray
    width: int
    slack: float


@functools.lru_cache(maxsize=64)
def _cells(parts: tuple[Part, ...]) -> _Cells:
    """The law of a sum by convolution, which loses no digits: all numbers are positive."""
    width = max(1, int(math.sqrt(math.fsum(part.variance for part in parts)) / _CELLS_PER_DEVIATION))
    masses, first = np.ones(1), 0
    for part in parts:
        furthest = part.bound(_LEFT_OUT)
        lowest = math.floor(part.mean - furthest)
        count = -(-(math.ceil(part.mean + furthest) - lowest + 1) // width)
        below, above = part._tails(lowest - 1 + width * np.arange(count + 1, dtype=np.float64))
        # From whichever tail is the smaller: there the difference keeps its digits.
        each = np.where(below[1:] < 0.5, np.diff(below), -np.diff(above))
        masses = np.convolve(masses, each)
        first += lowest
    middle = (width - 1) / 2 * len(parts)
    noise = first + middle - math.fsum(part.mean for part in parts) + width * np.arange(len(masses))
    return _Cells(noise.astype(np.float64), masses, width, middle)


def on_lattice(values: FloatArray, sd: float) -> FloatArray:
    """Round noise to multiples of a power of two that divides one and is tiny beside the deviation.

    Added to a whole count it then stays a multiple: the sum is exact, and its last bits tell nothing of the count, as
    those of an unrounded sum do (near zero floating point is finer than near one). Counts are whole, so this is the
    same as rounding the sum: post-processing.
    """
    fineness = 2.0 ** max(0, 24 - math.frexp(sd)[1])
    return np.asarray(np.rint(values * fineness) / fineness)


@dataclass(frozen=True)
class UnaryNoise:
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
        object.__setattr__(self, "users", whole("users", self.users, least=1, most=LARGEST_COUNT))
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

    @property
    def sd(self) -> float:
        """Square root of the largest variance."""
        return math.sqrt(self.variance)

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


def reach(variance: float, failure: float) -> float:
    """How far a sum of independent centred bits, or a centred Poisson count, strays: P(|noise| >= reach) <= failure.

    Bernstein's inequality, P(noise >= t) <= exp(-t^2 / (2 (variance + t/3))) on either side, solved for t. Looser than
    `bound`, but it holds without evaluating any distribution function.
    """
    exponent = math.log(2 / failure)
    return exponent / 3 + math.sqrt((exponent / 3) ** 2 + 2 * exponent * variance)


def _scale(scale: float) -> float:
    return real("scale of the noise", scale, above=LEAST_SCALE, below=LARGEST_SCALE, closed=True)


def _by_rows(law: Noise, rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
    """A table of draws, row by row."""
    rows = [law.sample(rng, shape[-1]) for _ in range(math.prod(shape[:-1]))]
    return np.array(rows, dtype=np.float64).reshape(shape)


def _symmetric_bound(
    tails: Callable[[FloatArray], tuple[FloatArray, FloatArray]], scale: float, failure: float
) -> float:
    """The smallest t with P(|Z| > t) <= failure, for a Laplace law or a part of one."""
    least, most = 0, math.ceil(scale * math.log(2 / failure)) + 1
    while least < most:
        middle = (least + most) // 2
        passes = 2 * float(tails(np.array([middle], dtype=np.float64))[1][0]) <= failure
        least, most = (least, middle) if passes else (middle + 1, most)
    return float(least)


def _counts(mean: float, values: ArrayLike) -> FloatArray:
    """The largest count whose noise, count - mean, is at most the value, forgiving the rounding of that difference."""
    noise = np.asarray(values, dtype=np.float64)
    sums = mean + noise
    nearest = np.rint(sums)
    rounding = 4 * np.spacing(np.maximum(np.abs(noise), max(mean, 1.0)))
    return np.where(np.abs(sums - nearest) <= rounding, nearest, np.floor(sums))


def _outside(counts: FloatArray, largest: float, below: FloatArray, above: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Distribution and survival function, right also where the count lies outside [0, largest)."""
    below = np.where(counts < 0, 0.0, np.where(counts >= largest, 1.0, below))
    above = np.where(counts < 0, 1.0, np.where(counts >= largest, 0.0, above))
    return below, above


def _wide_tails(counts: FloatArray, distances: FloatArray, others: FloatArray | None) -> tuple[FloatArray, FloatArray]:
    """P(Q <= count) and P(Q > count) of a law of large variance, by the uniform expansion of its incomplete function.

    P(Q <= q) is Gamma(q+1, mean)/Gamma(q+1) for Poisson and I_{1-p}(n-q, q+1) for the binomial law. With a = q+1, b =
    n-q (`others`; None: infinite, Poisson) and d = (n+1) p - a (`distances`), Temme's expansion (first term; DLMF 8.12
    and 8.18(ii)) reads Phi(-w) + phi(w) (1/u - 1/w), where w^2/2 = a g(d/a) + b g(-d/b), g(y) = y - ln(1+y), and u = d
    / sqrt(ab/(a+b)). Its relative error is below 1e-9 from a variance of 1e5 on, in both tails.
    """
    shape = np.maximum(counts, 0.0) + 1
    deviance, scale, skew = shape * _log_gap(distances / shape), np.sqrt(shape), np.ones_like(shape)
    if others is not None:
        deviance = deviance + others * _log_gap(-distances / others)
        scale = np.sqrt(shape * (others / (shape + others)))
        skew = (others - shape) / (others + shape)
    root = np.sign(distances) * np.sqrt(2 * deviance)
    flat = np.abs(root) < 1e-4  # there the difference below is 0/0; its limit serves
    safe = np.where(flat, 1.0, root)
    difference = np.where(flat, -skew / (3 * scale), scale / np.where(flat, 1.0, distances) - 1 / safe)
    correction = np.exp(-deviance) / math.sqrt(2 * math.pi) * difference
    below = np.clip(scipy.special.ndtr(-root) + correction, 0.0, 1.0)
    above = np.clip(scipy.special.ndtr(root) - correction, 0.0, 1.0)
    return below, above


def _log_gap(y: FloatArray) -> FloatArray:
    """y - ln(1+y), by its series where the two nearly cancel."""
    near = np.abs(y) < 0.01
    small = np.where(near, y, 0.0)
    series = small**2 * np.polynomial.polynomial.polyval(small, [(-1) ** n / n for n in range(2, 10)])
    return np.where(near, series, y - np.log1p(np.where(near, 0.0, y)))


def _lattice_bound(
    mean: float, variance: float, tails: Callable[[FloatArray], tuple[FloatArray, FloatArray]], failure: float
) -> float:
    """The smallest t with P(|Q - mean| > t) <= failure, for a whole-numbered Q.

    Take in the whole numbers around the mean one by one, nearest first; the first that leaves no more than `failure`
    outside tells t. The mass outside only falls, so bisection finds it.
    """
    floor = math.floor(mean)
    low_first = mean - floor <= 0.5

    def taken(steps: int) -> tuple[int, int]:
        nearer, farther = steps // 2 + 1, (steps + 1) // 2
        lows, highs = (nearer, farther) if low_first else (farther, nearer)
        return floor - lows + 1, floor + highs

    def passes(steps: int) -> bool:
        lowest, highest = taken(steps)
        below, above = tails(np.array([lowest - 1, highest], dtype=np.float64))
        return bool(below[0] + above[1] <= failure)

    least, most = 0, 2 * math.ceil(reach(variance, failure)) + 2
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if passes(middle) else (middle + 1, most)
    lowest, highest = taken(least)
    # The very subtraction `sample` makes, so that a draw on the bound is not beyond it by rounding.
    return max(mean - lowest, highest - mean)
