"""What a noise law is, and the law of no noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from shufflerl.arrays import FloatArray
from shufflerl.checks import real, whole

#: Counts are drawn as 64-bit integers, so no law may reach further.
MAX_COUNT = 10**18


class Spread(Protocol):
    """What has a variance."""

    @property
    def variance(self) -> float:
        """Mean squared error per counter."""
        ...

    @property
    def sd(self) -> float:
        """Standard deviation per counter, the square root of the variance."""
        return math.sqrt(self.variance)


class Noise(Spread, Protocol):
    """A centred noise law, the same and independent for every counter of a release."""

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
class NoNoise(Spread):
    """No noise at all: exact counts, no privacy."""

    @property
    def variance(self) -> float:
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
