"""The local model: every user protects its own report; nobody is trusted, and noise grows with the users."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from shufflerl.arrays import FloatArray
from shufflerl.counts import CountQuery, Counts, Release
from shufflerl.errors import InvalidInputError
from shufflerl.noise import GaussianNoise, UnaryNoise
from shufflerl.privacy.accounting import calibrate_gaussian, calibrate_unary
from shufflerl.privacy.ledger import Charge
from shufflerl.privatizers.base import AdditivePrivatizer, BudgetedPrivatizer

_TRUST = ("unique users", "exact noise", "public parameters")


class Local(AdditivePrivatizer):
    """Every user adds Gaussian noise to each of its own counters."""

    noise_on: ClassVar[str] = (
        "on each counter of one user's report if all are asked; n users have sqrt(n) times as much"
    )
    name: ClassVar[str] = "local"
    model: ClassVar[str] = "local"
    mechanism: ClassVar[str] = "Gaussian noise added by every user to its own counters"
    assumptions: ClassVar[tuple[str, ...]] = _TRUST
    scales: ClassVar[bool] = True

    def _charge(self, query: CountQuery, users: int) -> Charge:
        noise = calibrate_gaussian(self.budget, query.changed_counters, self.participations)
        return Charge(noise, query.changed_counters * self.participations)

    def _noise(self, query: CountQuery, users: int) -> GaussianNoise:
        own = calibrate_gaussian(self.budget, query.changed_counters, self.participations)
        return GaussianNoise(own.sd * math.sqrt(users))


class LocalSampled(BudgetedPrivatizer):
    """Every user reports one family and step, chosen at random, in unary encoding with flipped bits.

    The bit of the counter it touched is sent as a fair coin, every other bit is a one with probability q: one report of
    low sensitivity instead of many small ones. Simulated from the counts: exact for one user, and for any number of
    them exact for each family and step; that a user who reports one step does not report another is then not carried
    over from step to step. The counters of one step share its number of reports, so their errors are uncorrelated but
    not independent.
    """

    noise_on: ClassVar[str] = "at most, on each counter of one user's report; n users have sqrt(n) times as much"
    name: ClassVar[str] = "local-sampled"
    model: ClassVar[str] = "local"
    mechanism: ClassVar[str] = "one family and step per user, unary encoding with flipped bits"
    assumptions: ClassVar[tuple[str, ...]] = (*_TRUST, "one report")
    scales: ClassVar[bool] = True

    def _noise(self, query: CountQuery, users: int) -> UnaryNoise:
        if self.participations > 1:
            raise InvalidInputError("local-sampled is calibrated for one participation; use the privatizer local.")
        return UnaryNoise(users, query.touched_counters, calibrate_unary(self.budget))

    def _charge(self, query: CountQuery, users: int) -> Charge:
        # One user's report shows one family and step: a replaced user changes two of its bits.
        return Charge(self._noise(query, 1), 2)

    def release(self, counts: Counts) -> Release:
        """Charge the budget, then draw the users' reports."""
        batch = counts.checked().batch
        noise, added = self._admit(batch.query, batch.users, range(batch.index, batch.index + 1))
        assert isinstance(noise, UnaryNoise)
        return Release(batch, self._estimate(counts, noise), noise, float(added[0]), self._spans(batch.users))

    def _estimate(self, counts: Counts, noise: UnaryNoise) -> FloatArray:
        group = counts.batch.query.groups
        touched = np.flatnonzero(counts.values)
        if counts.batch.users == 1:
            chosen = (group[touched] == self._rng.integers(noise.groups)).astype(np.int64)
        else:
            chosen = self._rng.binomial(counts.values[touched], 1 / noise.groups)
        sampled = np.zeros_like(counts.values)
        sampled[touched] = chosen
        reports = np.add.reduceat(sampled, counts.batch.query.group_starts)[group]
        ones = self._rng.binomial(reports - sampled, noise.flip)
        ones[touched] += self._rng.binomial(chosen, 0.5)
        return noise.weight * (ones - reports * noise.flip)
