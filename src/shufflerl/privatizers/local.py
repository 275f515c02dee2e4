"""The local model: every user protects its own report; nobody is trusted, and noise grows with the users."""

from __future__ import annotations

import numpy as np

from shufflerl.arrays import FloatArray
from shufflerl.counts import Counts, Release
from shufflerl.noise import UnaryNoise
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.mechanism import LocalGaussian, LocalUnary
from shufflerl.privatizers.base import AdditivePrivatizer, BudgetedPrivatizer, Workload


def local(budget: Budget, workload: Workload, *, participations: int = 1) -> AdditivePrivatizer:
    """Every user adds Gaussian noise to each of its own counters."""
    return AdditivePrivatizer(LocalGaussian(budget, participations), workload)


class LocalSampled(BudgetedPrivatizer):
    """Every user reports one family and step, chosen at random, in unary encoding with flipped bits.

    The bit of the counter it touched is sent as a fair coin, every other bit is a one with probability q: one report of
    low sensitivity instead of many small ones. Simulated from the counts: exact for one user, and for any number of
    them exact for each family and step; that a user who reports one step does not report another is then not carried
    over from step to step. The counters of one step share its number of reports, so their errors are uncorrelated but
    not independent.
    """

    def __init__(self, budget: Budget, workload: Workload, *, participations: int = 1) -> None:
        super().__init__(LocalUnary(budget, participations), workload)

    def release(self, counts: Counts) -> Release:
        """Charge the budget, then draw the users' reports."""
        batch = counts.checked().batch
        noise, added = self._admit(batch.query, batch.users, range(batch.index, batch.index + 1))
        assert isinstance(noise, UnaryNoise)
        return self._released(batch, self._estimate(counts, noise), noise, added)

    def _estimate(self, counts: Counts, noise: UnaryNoise) -> FloatArray:
        group = counts.batch.query.groups
        touched = np.flatnonzero(counts.values)
        if counts.batch.users == 1:
            chosen = (group[touched] == self.rng.integers(noise.groups)).astype(np.int64)
        else:
            chosen = self.rng.binomial(counts.values[touched], 1 / noise.groups)
        sampled = np.zeros_like(counts.values)
        sampled[touched] = chosen
        reports = np.add.reduceat(sampled, counts.batch.query.group_starts)[group]
        ones = self.rng.binomial(reports - sampled, noise.flip)
        ones[touched] += self.rng.binomial(chosen, 0.5)
        estimate: FloatArray = noise.weight * (ones - reports * noise.flip)
        return estimate
