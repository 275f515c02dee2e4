"""Laws of counted bits, as users can send their share of: Poisson and binomial."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy  # its parts are loaded when they are first used, which most processes never do
from numpy.typing import ArrayLike

from shufflerl.arrays import FloatArray
from shufflerl.checks import real, whole
from shufflerl.noise.law import MAX_COUNT, Spread

#: From this variance on the tails come from an expansion of our own: SciPy 1.17 cuts the series of the incomplete gamma
#: function short, so that the upper tail, and every error bound with it, is too small (by 28% at six deviations of
#: Poisson(1e8)), and its incomplete beta function turns slow and, near 1e17 trials, undefined.
_WIDE = 1e5


@dataclass(frozen=True)
class PoissonNoise(Spread):
    """Poisson(mean) - mean: the one-bits all users of a batch add to one counter, less their expectation."""

    mean: float

    def __post_init__(self) -> None:
        """Refuse a mean that is no positive number."""
        object.__setattr__(self, "mean", real("mean of the noise", self.mean, above=0, below=MAX_COUNT))

    @property
    def variance(self) -> float:
        """A Poisson variable has its mean as variance."""
        return self.mean

    def bound(self, failure: float) -> float:
        """The smallest t with P(|noise| > t) <= failure; always a distance the noise can take."""
        return _lattice_bound(self.mean, self.variance, self.tails, real("failure", failure, above=0, below=1))

    def cdf(self, values: ArrayLike) -> FloatArray:
        """P(noise <= value), for every value."""
        return self.tails(_counts(self.mean, values))[0]

    def repeated(self, times: int) -> PoissonNoise:
        """Poisson means add."""
        return PoissonNoise(self.mean * whole("times", times, least=1))

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        """Independent draws for simulation."""
        return np.asarray(rng.poisson(self.mean, size) - self.mean, dtype=np.float64)

    def tails(self, counts: FloatArray) -> tuple[FloatArray, FloatArray]:
        """P(count <= c) and P(count > c) of each c, both with all their digits."""
        shape = np.maximum(counts, 0.0) + 1
        if self.variance > _WIDE:
            below, above = _wide_tails(counts, self.mean - shape, None)
        else:
            below, above = scipy.special.gammaincc(shape, self.mean), scipy.special.gammainc(shape, self.mean)
        return _outside(counts, math.inf, below, above)


@dataclass(frozen=True)
class BinomialNoise(Spread):
    """Binomial(trials, probability) less its mean: the random bits of the paper's protocol on one counter."""

    trials: int
    probability: float

    def __post_init__(self) -> None:
        """Refuse what is no binomial law with a positive variance."""
        object.__setattr__(self, "trials", whole("trials", self.trials, least=1, most=MAX_COUNT))
        object.__setattr__(self, "probability", real("probability", self.probability, above=0, below=1))

    @property
    def mean(self) -> float:
        """Expected number of noise bits per counter, which the analyzer subtracts."""
        return self.trials * self.probability

    @property
    def variance(self) -> float:
        """trials * probability * (1 - probability)."""
        return self.mean * (1 - self.probability)

    def bound(self, failure: float) -> float:
        """The smallest t with P(|noise| > t) <= failure; always a distance the noise can take."""
        return _lattice_bound(self.mean, self.variance, self.tails, real("failure", failure, above=0, below=1))

    def cdf(self, values: ArrayLike) -> FloatArray:
        """P(noise <= value), for every value."""
        return self.tails(_counts(self.mean, values))[0]

    def repeated(self, times: int) -> BinomialNoise:
        """Trials add."""
        return BinomialNoise(self.trials * whole("times", times, least=1), self.probability)

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        """Independent draws for simulation."""
        return np.asarray(rng.binomial(self.trials, self.probability, size) - self.mean, dtype=np.float64)

    def tails(self, counts: FloatArray) -> tuple[FloatArray, FloatArray]:
        """P(count <= c) and P(count > c) of each c, both with all their digits."""
        inside = np.clip(counts, 0.0, self.trials - 1)
        shape, others = inside + 1, self.trials - inside
        if self.variance > _WIDE:
            below, above = _wide_tails(inside, self.mean + self.probability - shape, others)
        else:
            below = scipy.special.betaincc(shape, others, self.probability)
            above = scipy.special.betainc(shape, others, self.probability)
        return _outside(counts, self.trials, below, above)


def reach(variance: float, failure: float) -> float:
    """How far a sum of independent centred bits, or a centred Poisson count, strays: P(|noise| >= reach) <= failure.

    Bernstein's inequality, P(noise >= t) <= exp(-t^2 / (2 (variance + t/3))) on either side, solved for t. Looser than
    `bound`, but it holds without evaluating any distribution function.
    """
    exponent = math.log(2 / failure)
    return exponent / 3 + math.sqrt((exponent / 3) ** 2 + 2 * exponent * variance)


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
