"""Discrete Laplace laws, whole and cut, as servers draw them; and sums of independent whole counts."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from shufflerl.arrays import FloatArray
from shufflerl.checks import real, whole
from shufflerl.errors import InvalidInputError
from shufflerl.noise.bits import BinomialNoise, PoissonNoise
from shufflerl.noise.law import MAX_COUNT, Noise, Spread

#: Scales of Laplace laws. Below, noise hardly ever comes; above, a scale is no fraction of 53-bit whole numbers.
MIN_SCALE, MAX_SCALE = 2.0**-6, 2.0**53

#: Outcomes of a part of a sum that are left out are together about this probable.
_LEFT_OUT = 1e-18
#: Outcomes closer than this part of a sum's deviation are not told apart.
_CELLS_PER_DEVIATION = 500


class _Laplace(Spread, Protocol):
    """What whole and cut laws share."""

    scale: float

    def _centred_tails(self, noise: FloatArray) -> tuple[FloatArray, FloatArray]:
        """P(Z <= z) and P(Z > z) of noise that is symmetric around zero."""

    def bound(self, failure: float) -> float:
        """The smallest t with P(|noise| > t) <= failure; always a distance the noise can take."""
        failure = real("failure", failure, above=0, below=1)
        least, most = 0, math.ceil(self.scale * math.log(2 / failure)) + 1
        while least < most:
            middle = (least + most) // 2
            passes = 2 * float(self._centred_tails(np.array([middle], dtype=np.float64))[1][0]) <= failure
            least, most = (least, middle) if passes else (middle + 1, most)
        return float(least)

    def cdf(self, values: ArrayLike) -> FloatArray:
        """P(noise <= value), for every value."""
        return self._centred_tails(np.floor(np.asarray(values, dtype=np.float64)))[0]

    def repeated(self, times: int) -> Self | NoiseSum:
        """The sum of copies is no Laplace law."""
        assert isinstance(self, DiscreteLaplace | TruncatedLaplace)
        return self if whole("times", times, least=1) == 1 else NoiseSum((self,) * times)


@dataclass(frozen=True)
class DiscreteLaplace(_Laplace):
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

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        """Independent draws for simulation: the difference of two geometric counts."""
        shape = (size,) if isinstance(size, int) else size
        pairs = rng.geometric(-math.expm1(-1 / self.scale), (*shape, 2))
        return np.asarray(pairs[..., 0] - pairs[..., 1], dtype=np.float64)

    def tails(self, counts: FloatArray) -> tuple[FloatArray, FloatArray]:
        """P(count <= c) and P(count > c) of each c, both with all their digits."""
        return self._centred_tails(counts)

    def _centred_tails(self, counts: FloatArray) -> tuple[FloatArray, FloatArray]:
        # P(Z > t) = p^(t+1)/(1+p) for t >= 0, and Z is symmetric.
        above = np.exp(-(np.maximum(counts, 0.0) + 1) / self.scale) / (1 + math.exp(-1 / self.scale))
        below = np.exp(np.minimum(counts, -1.0) / self.scale) / (1 + math.exp(-1 / self.scale))
        return np.where(counts < 0, below, 1 - above), np.where(counts < 0, 1 - below, above)


@dataclass(frozen=True)
class TruncatedLaplace(_Laplace):
    """Discrete Laplace noise given that it lies in [-shift, shift]: with `shift` added, from 0 to 2*shift dummies."""

    scale: float
    shift: int

    def __post_init__(self) -> None:
        """Refuse a cut that leaves little of the law."""
        object.__setattr__(self, "scale", _scale(self.scale))
        object.__setattr__(self, "shift", whole("shift", self.shift, least=1, most=MAX_COUNT))
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

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        """Independent draws for simulation: what falls outside is drawn again."""
        if not isinstance(size, int):
            return _by_rows(self, rng, size)
        drawn = DiscreteLaplace(self.scale).sample(rng, size)
        while (outside := np.abs(drawn) > self.shift).any():
            drawn[outside] = DiscreteLaplace(self.scale).sample(rng, int(outside.sum()))
        return drawn

    def tails(self, counts: FloatArray) -> tuple[FloatArray, FloatArray]:
        """P(count <= c) and P(count > c) of each c, both with all their digits."""
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
class NoiseSum(Spread):
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
        below, above = part.tails(lowest - 1 + width * np.arange(count + 1, dtype=np.float64))
        # From whichever tail is the smaller: there the difference keeps its digits.
        each = np.where(below[1:] < 0.5, np.diff(below), -np.diff(above))
        masses = np.convolve(masses, each)
        first += lowest
    middle = (width - 1) / 2 * len(parts)
    noise = first + middle - math.fsum(part.mean for part in parts) + width * np.arange(len(masses))
    return _Cells(noise.astype(np.float64), masses, width, middle)


def _scale(scale: float) -> float:
    return real("scale of the noise", scale, above=MIN_SCALE, below=MAX_SCALE, closed=True)


def _by_rows(law: Noise, rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
    """A table of draws, row by row."""
    rows = [law.sample(rng, shape[-1]) for _ in range(math.prod(shape[:-1]))]
    return np.array(rows, dtype=np.float64).reshape(shape)
