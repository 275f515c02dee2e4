"""The central model: a trusted server sees all trajectories and adds the noise itself.

A learner that reads each release by itself gets independent Gaussian noise per batch. A learner that reads only the
running sum of all releases gets continual counting: noise correlated over time, so that the noise of the sum hardly
grows. Both protect a user who is in one batch by the same Gaussian charge.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import numpy as np
from scipy import fft, special

from shufflerl.arrays import FloatArray
from shufflerl.counts import CountQuery
from shufflerl.errors import ContractError, InvalidInputError
from shufflerl.learners.base import Learner
from shufflerl.noise import GaussianNoise, Noise, on_lattice
from shufflerl.privacy.accounting import Budget, calibrate_gaussian
from shufflerl.privacy.ledger import Charge, Ledger
from shufflerl.privatizers.base import AdditivePrivatizer, Privatizer
from shufflerl.seeding import Seed

_TRUST = ("unique users", "trusted server", "exact noise", "public parameters")

#: Noise of a whole run that is drawn at once may take this much memory.
MOST_BYTES = 4 * 2**30

#: Noise is correlated over time for so many counters at once: what fits a processor's cache goes fastest.
_TAGS_AT_A_TIME = 32


class CentralBatch(AdditivePrivatizer):
    """Independent Gaussian noise on every counter of every batch."""

    name: ClassVar[str] = "central"
    model: ClassVar[str] = "central"
    mechanism: ClassVar[str] = "Gaussian noise added by a trusted server, per batch"
    assumptions: ClassVar[tuple[str, ...]] = _TRUST
    scales: ClassVar[bool] = True

    def _noise(self, query: CountQuery, users: int) -> GaussianNoise:
        return calibrate_gaussian(self.budget, query.changed_counters, self.participations)

    def _charge(self, query: CountQuery, users: int) -> Charge:
        return Charge(self._noise(query, users), query.changed_counters * self.participations)


class Continual(AdditivePrivatizer):
    """Continual counting: what is released are the increments of noisy running sums.

    Write the running sums of T batches as A x with A the lower triangular matrix of ones, and A = L R. Releasing
    R x + z with Gaussian z protects one batch's users if sd(z) is the Gaussian answer times the largest column norm of
    R; the running sums L (R x + z) then carry noise L z. Subclasses choose the factors. It makes no difference that
    batches depend on earlier releases: none needs a later batch, and noise is Gaussian (Denisov et al. 2022).
    """

    model: ClassVar[str] = "central"
    assumptions: ClassVar[tuple[str, ...]] = _TRUST

    def _prepare(self, learner: Learner) -> None:
        if learner.batches_observed:
            raise ContractError(
                f"{self.name} counts continually: its noise is correlated with that of the {learner.batches_observed} "
                "batches already released, and that noise is gone. Keep the privatizer that served the learner, or "
                "start the learner anew."
            )
        self.batches = learner.most_batches
        self._query: CountQuery | None = None
        self._last: FloatArray | None = None  # noise of the running sum after the last release

    def _charge(self, query: CountQuery, users: int) -> Charge:
        # A user in m batches shifts the sum of m columns of R, which may all point the same way: its norm is up to m
        # times one column's, as that of m^2 orthogonal changes, not of m.
        times = self.participations**2
        noise = calibrate_gaussian(self.budget, query.changed_counters, times)
        return Charge(noise, query.changed_counters * times)

    def _of_its_kind(self, query: CountQuery) -> CountQuery:
        """All batches ask the same (see `_admit`), so users who come back need no other noise."""
        return query

    noise_on: ClassVar[str] = (
        "on each counter of one release by itself; sums over all batches carry a few times as much"
    )

    def _stated_noise(self, query: CountQuery) -> float:
        return self._sd(query)

    def _sd(self, query: CountQuery) -> float:
        return self._charge(query, 1).noise.sd

    @abstractmethod
    def _factors(self, first: int, count: int) -> FloatArray:
        """Variance of the running sum after batches first.. in units of one release's."""

    @abstractmethod
    def _running_noise(self, first: int, count: int, size: int) -> FloatArray:
        """Noise[t, tag] of the running sums after batches first.., in units of one release's deviation."""

    @abstractmethod
    def _step_factor(self, batch: int) -> float:
        """Variance of the increment at a batch, in units of one release's."""

    def _noise(self, query: CountQuery, users: int) -> Noise:
        return GaussianNoise(self._sd(query) * math.sqrt(self._step_factor(self._next_batch)))

    def _added_variances(self, noise: Noise, batches: range) -> FloatArray:
        assert self._query is not None
        before = self._factors(batches.start - 1, 1) if batches.start else np.zeros(1)
        return self._sd(self._query) ** 2 * np.diff(self._factors(batches.start, len(batches)), prepend=before)

    def _draw(self, noise: Noise, batches: range, size: int) -> FloatArray:
        assert self._query is not None
        sd = self._sd(self._query)
        running = on_lattice(sd * self._running_noise(batches.start, len(batches), size), sd)
        before = np.zeros(size) if self._last is None else self._last
        self._last = running[-1]
        return np.diff(running, axis=0, prepend=before[None])

    def _admit(self, query: CountQuery, users: int, batches: range) -> tuple[Noise, FloatArray]:
        if self._query is None:
            self._query = query
        if self._query != query:
            raise ContractError(f"{self.name} keeps running sums of one query; every batch must ask the same counters.")
        if batches.stop > self.batches:
            raise ContractError(f"{self.name} was set up for {self.batches} batches and cannot release another.")
        return super()._admit(query, users, batches)


class CentralToeplitz(Continual):
    """A = C C with C the square root of A: a Toeplitz matrix of coefficients binom(2j, j) / 4^j.

    Both norms are sums of their squares, about 1.07 + ln(T)/pi: within a whisker of the best possible factorisation.
    """

    name: ClassVar[str] = "central"
    mechanism: ClassVar[str] = "continual counting by a trusted server (square-root Toeplitz factorisation, Gaussian)"

    def _prepare(self, learner: Learner) -> None:
        super()._prepare(learner)
        j = np.arange(self.batches, dtype=np.float64)
        # binom(2j, j) / 4^j = Gamma(j + 1/2) / (sqrt(pi) Gamma(j + 1))
        self._coefficients = np.exp(special.gammaln(j + 0.5) - special.gammaln(j + 1)) / math.sqrt(math.pi)
        self._norms = np.cumsum(self._coefficients**2)
        self._all: FloatArray | None = None

    def _factors(self, first: int, count: int) -> FloatArray:
        factors: FloatArray = self._norms[-1] * self._norms[first : first + count]
        return factors

    def _step_factor(self, batch: int) -> float:
        steps = np.diff(self._coefficients[: batch + 1], prepend=0.0)
        return float(self._norms[-1] * (steps**2).sum())

    def _running_noise(self, first: int, count: int, size: int) -> FloatArray:
        if self._all is None:
            needed = 8 * self.batches * size
            if needed > MOST_BYTES:
                raise InvalidInputError(
                    f"Continual counting of {size:,} counters over {self.batches:,} batches would take "
                    f"{needed / 2**30:.1f} GiB; use the privatizer central-tree, which keeps a few rows."
                )
            self._all = self._rng.standard_normal((self.batches, size))
            length = fft.next_fast_len(2 * self.batches - 1, real=True)
            response = fft.rfft(math.sqrt(self._norms[-1]) * self._coefficients, length)
            for first_tag in range(0, size, _TAGS_AT_A_TIME):
                some = self._all[:, first_tag : first_tag + _TAGS_AT_A_TIME]
                some[:] = fft.irfft(fft.rfft(some.T, length) * response, length)[:, : self.batches].T
        return self._all[first : first + count]


class CentralTree(Continual):
    """Binary tree: every running sum is the sum of at most log2(T) + 1 nodes, every batch is in so many nodes."""

    name: ClassVar[str] = "central-tree"
    mechanism: ClassVar[str] = "continual counting by a trusted server (binary tree, Gaussian)"

    @property
    def _levels(self) -> int:
        return self.batches.bit_length()

    def _factors(self, first: int, count: int) -> FloatArray:
        nodes = [number.bit_count() for number in range(first + 1, first + count + 1)]
        return self._levels * np.array(nodes, dtype=np.float64)

    def _step_factor(self, batch: int) -> float:
        # From t to t+1 the nodes of t's trailing ones are replaced by one new node.
        closed = (batch ^ (batch + 1)).bit_count() - 1
        return float(self._levels * (closed + 1))

    def _running_noise(self, first: int, count: int, size: int) -> FloatArray:
        if first == 0:
            self._open = np.zeros((self._levels, size))  # noise of the node of each level in the current sum, or zero
        running = np.empty((count, size))
        for row, number in enumerate(range(first + 1, first + count + 1)):
            level = (number & -number).bit_length() - 1
            self._open[:level] = 0.0
            self._open[level] = self._rng.standard_normal(size)
            running[row] = self._open.sum(axis=0)
        return math.sqrt(self._levels) * running


def central(
    learner: Learner,
    budget: Budget,
    seed: Seed,
    ledger: Ledger | None = None,
    *,
    participations: int = 1,
) -> Privatizer:
    """The best trusted server for a learner: continual counting if it reads running sums, else noise per batch."""
    kind = CentralToeplitz if learner.reads_running_sums and learner.most_batches > 1 else CentralBatch
    return kind(learner, budget, seed, ledger, participations=participations)
