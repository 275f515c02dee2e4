"""The central model: a trusted server sees all trajectories and adds the noise itself.

A learner that reads each release by itself gets independent noise per batch, of the law that needs least. A learner
that reads only the running sum of all releases gets continual counting: Gaussian noise correlated over time, so that
the noise of the sum hardly grows.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import numpy as np
from scipy import fft, special

from shufflerl.arrays import FloatArray
from shufflerl.counts import Query
from shufflerl.errors import ContractError, InvalidInputError
from shufflerl.noise import GaussianNoise, Noise, on_lattice
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.mechanism import CentralNoise, ContinualGaussian, ToeplitzGaussian, TreeGaussian
from shufflerl.privatizers.base import AdditivePrivatizer, Workload

#: Noise of a whole run that is drawn at once may take this much memory.
MAX_BYTES = 4 * 2**30

#: Noise is correlated over time for so many counters at once: what fits a processor's cache goes fastest.
_TAGS_AT_A_TIME = 32


class Continual(AdditivePrivatizer):
    """Continual counting: what is released are the increments of noisy running sums.

    Write the running sums of T batches as A x with A the lower triangular matrix of ones, and A = L R. Releasing
    R x + z with Gaussian z protects one batch's users if sd(z) is the Gaussian answer times the largest column norm of
    R; the running sums L (R x + z) then carry noise L z. Subclasses choose the factors. It makes no difference that
    batches depend on earlier releases: none needs a later batch, and noise is Gaussian (Denisov et al. 2022).
    """

    name: ClassVar[str]
    kind: ClassVar[type[ContinualGaussian]]

    def __init__(self, budget: Budget, workload: Workload, *, participations: int = 1) -> None:
        if workload.first_batch:
            raise ContractError(
                f"{self.name} counts continually: its noise is correlated with that of the {workload.first_batch} "
                "batches already released, and that noise is gone. Keep the privatizer that served the learner, or "
                "start the learner anew."
            )
        super().__init__(self.kind(budget, participations), workload)
        self.batches = workload.batches or workload.episodes
        self._query: Query | None = None
        self._last: FloatArray | None = None  # noise of the running sum after the last release

    @property
    def _sd(self) -> float:
        """Of the noise of one release by itself."""
        assert self._query is not None
        return self.mechanism.noise(self._query).sd

    @abstractmethod
    def factors(self, first: int, count: int) -> FloatArray:
        """Variance of the running sum after batches first.. in units of one release's."""

    @abstractmethod
    def _running_noise(self, first: int, count: int, size: int) -> FloatArray:
        """Noise[t, tag] of the running sums after batches first.., in units of one release's deviation."""

    @abstractmethod
    def _step_factor(self, batch: int) -> float:
        """Variance of the increment at a batch, in units of one release's."""

    def _added_variances(self, noise: Noise, batches: range) -> FloatArray:
        before = self.factors(batches.start - 1, 1) if batches.start else np.zeros(1)
        return self._sd**2 * np.diff(self.factors(batches.start, len(batches)), prepend=before)

    def _draw(self, noise: Noise, batches: range, size: int) -> FloatArray:
        running = on_lattice(self._sd * self._running_noise(batches.start, len(batches), size), self._sd)
        before = np.zeros(size) if self._last is None else self._last
        self._last = running[-1]
        return np.diff(running, axis=0, prepend=before[None])

    def _admit(self, query: Query, users: int, batches: range) -> tuple[Noise, FloatArray]:
        if self._query is None:
            self._query = query
        if self._query != query:
            raise ContractError(f"{self.name} keeps running sums of one query; every batch must ask the same counters.")
        if batches.stop > self.batches:
            raise ContractError(f"{self.name} was set up for {self.batches} batches and cannot release another.")
        _, added = super()._admit(query, users, batches)
        return GaussianNoise(self._sd * math.sqrt(self._step_factor(batches.start))), added


class CentralToeplitz(Continual):
    """A = C C with C the square root of A: a Toeplitz matrix of coefficients binom(2j, j) / 4^j.

    Both norms are sums of their squares, about 1.07 + ln(T)/pi: within a whisker of the best possible factorisation.
    """

    name: ClassVar[str] = "central"
    kind: ClassVar[type[ContinualGaussian]] = ToeplitzGaussian

    def __init__(self, budget: Budget, workload: Workload, *, participations: int = 1) -> None:
        super().__init__(budget, workload, participations=participations)
        j = np.arange(self.batches, dtype=np.float64)
        # binom(2j, j) / 4^j = Gamma(j + 1/2) / (sqrt(pi) Gamma(j + 1))
        self._coefficients = np.exp(special.gammaln(j + 0.5) - special.gammaln(j + 1)) / math.sqrt(math.pi)
        self._norms = np.cumsum(self._coefficients**2)
        self._all: FloatArray | None = None

    def factors(self, first: int, count: int) -> FloatArray:
        """See `Continual`."""
        factors: FloatArray = self._norms[-1] * self._norms[first : first + count]
        return factors

    def _step_factor(self, batch: int) -> float:
        steps = np.diff(self._coefficients[: batch + 1], prepend=0.0)
        return float(self._norms[-1] * (steps**2).sum())

    def _running_noise(self, first: int, count: int, size: int) -> FloatArray:
        if self._all is None:
            needed = 8 * self.batches * size
            if needed > MAX_BYTES:
                raise InvalidInputError(
                    f"Continual counting of {size:,} counters over {self.batches:,} batches would take "
                    f"{needed / 2**30:.1f} GiB; use the privatizer central-tree, which keeps a few rows."
                )
            self._all = self.rng.standard_normal((self.batches, size))
            length = fft.next_fast_len(2 * self.batches - 1, real=True)
            response = fft.rfft(math.sqrt(self._norms[-1]) * self._coefficients, length)
            for first_tag in range(0, size, _TAGS_AT_A_TIME):
                some = self._all[:, first_tag : first_tag + _TAGS_AT_A_TIME]
                some[:] = fft.irfft(fft.rfft(some.T, length) * response, length)[:, : self.batches].T
        return self._all[first : first + count]


class CentralTree(Continual):
    """Binary tree: every running sum is the sum of at most log2(T) + 1 nodes, every batch is in so many nodes."""

    name: ClassVar[str] = "central-tree"
    kind: ClassVar[type[ContinualGaussian]] = TreeGaussian

    def __init__(self, budget: Budget, workload: Workload, *, participations: int = 1) -> None:
        super().__init__(budget, workload, participations=participations)
        self._open = np.zeros((self.levels, 0))  # noise of the node of each level in the current sum, or zero

    @property
    def levels(self) -> int:
        """Of the tree: how many nodes a batch is in."""
        return self.batches.bit_length()

    def factors(self, first: int, count: int) -> FloatArray:
        """See `Continual`."""
        nodes = [number.bit_count() for number in range(first + 1, first + count + 1)]
        return self.levels * np.array(nodes, dtype=np.float64)

    def _step_factor(self, batch: int) -> float:
        # From t to t+1 the nodes of t's trailing ones are replaced by one new node.
        closed = (batch ^ (batch + 1)).bit_count() - 1
        return float(self.levels * (closed + 1))

    def _running_noise(self, first: int, count: int, size: int) -> FloatArray:
        if first == 0:
            self._open = np.zeros((self.levels, size))
        running = np.empty((count, size))
        for row, number in enumerate(range(first + 1, first + count + 1)):
            level = (number & -number).bit_length() - 1
            self._open[:level] = 0.0
            self._open[level] = self.rng.standard_normal(size)
            running[row] = self._open.sum(axis=0)
        return math.sqrt(self.levels) * running


def central(budget: Budget, workload: Workload, *, participations: int = 1) -> AdditivePrivatizer:
    """The best trusted server: continual counting where running sums are read, else noise per batch."""
    if workload.running_sums and (workload.batches or workload.episodes) > 1:
        return CentralToeplitz(budget, workload, participations=participations)
    return AdditivePrivatizer(CentralNoise(budget, participations), workload)
