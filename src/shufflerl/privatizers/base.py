"""The contract of a privatizer: true counts in, a release out, the budget charged before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from shufflerl import checks
from shufflerl.checks import FloatArray
from shufflerl.counts import Batch, CountQuery, Counts, Release
from shufflerl.errors import ContractError
from shufflerl.learners.base import Learner
from shufflerl.privacy.accounting import Budget, privacy_loss, warn_if_weak
from shufflerl.privacy.certificate import Certificate
from shufflerl.privacy.ledger import Charge, Ledger
from shufflerl.privacy.noise import Noise

Seed = int | np.random.SeedSequence


class Privatizer(ABC):
    """Turns the true counts of a batch into what a learner may see, each batch once."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self._batches_released = 0

    @abstractmethod
    def release(self, counts: Counts) -> Release:
        """Answer the batch that the counts belong to."""

    @abstractmethod
    def certificate(self, query: CountQuery) -> Certificate | None:
        """What is guaranteed to a user who answers such a query; None without privacy."""

    #: Whether noise does not depend on the counts, so that `noise_of_episodes` can draw it before them.
    draws_ahead: ClassVar[bool] = False

    def noise_of_episodes(self, query: CountQuery, episodes: int) -> tuple[FloatArray, FloatArray]:
        """What is added to the next batches of one user each: values[t, tag], and the total variance after each."""
        raise NotImplementedError

    def _once(self, batch: Batch) -> None:
        if batch.index != self._batches_released:
            raise ContractError(
                f"Batch {batch.index} was asked to be released, but batch {self._batches_released} comes next: batches "
                "are released in order, once each. A second release of the same users would spend their budget twice."
            )


class BudgetedPrivatizer(Privatizer):
    """Charges a ledger for every batch before anything of it is drawn.

    Subclasses say which law their noise has (`_noise`), what of it the accountant may count on (`_charge`) and whom
    they trust.
    """

    model: ClassVar[str]
    mechanism: ClassVar[str]
    assumptions: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        learner: Learner,
        budget: Budget,
        seed: Seed,
        *,
        participations: int = 1,
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__()
        warn_if_weak(budget, learner.problem.episodes)
        self.budget = budget
        self.participations = checks.whole("participations", participations, least=1)
        self.ledger = ledger or Ledger("simulation", budget)
        self._rng = np.random.default_rng(seed)
        self._total_variance = 0.0

    @property
    def honest_fraction(self) -> float:
        """The least fraction of users that must add their noise."""
        return 1.0

    @abstractmethod
    def _noise(self, query: CountQuery, users: int) -> Noise:
        """The law of the noise on each counter of a batch of so many users."""

    @abstractmethod
    def _charge(self, query: CountQuery, users: int) -> Charge:
        """What a batch costs each of its users, all participations together."""

    def _variances(self, noise: Noise, batches: int) -> FloatArray:
        """The variance of the running sum of noise after each of the next batches."""
        return self._total_variance + noise.variance * np.arange(1.0, batches + 1)

    def _admit(self, query: CountQuery, users: int, batches: int) -> tuple[Noise, FloatArray]:
        """Charge the next batches; only then is there a law to draw from, and the total variance after each."""
        numbers = range(self._batches_released, self._batches_released + batches)
        self.ledger.record_all([f"batch {number}" for number in numbers], self._charge(query, users))
        noise = self._noise(query, users)
        variances = self._variances(noise, batches)
        self._batches_released += batches
        self._total_variance = float(variances[-1])
        return noise, variances

    def certificate(self, query: CountQuery) -> Certificate:
        """What a user who answers such a query is guaranteed."""
        charge = self._charge(query, 1)
        return Certificate(
            epsilon=privacy_loss(charge.noise, charge.changed).epsilon(self.budget.delta),
            delta=self.budget.delta,
            budget_epsilon=self.budget.epsilon,
            model=self.model,
            mechanism=self.mechanism,
            noise_sd=self._noise(query, 1).sd,
            changed_counters=charge.changed,
            participations=self.participations,
            honest_fraction=self.honest_fraction,
            assumptions=self.assumptions,
        )


class AdditivePrivatizer(BudgetedPrivatizer):
    """Adds noise that does not depend on the data to every counter."""

    draws_ahead: ClassVar[bool] = True

    def _draw(self, noise: Noise, batches: int, size: int) -> FloatArray:
        """Noise of the last admitted batches[b, tag]."""
        return noise.sample(self._rng, (batches, size))

    def release(self, counts: Counts) -> Release:
        """Charge the budget, then add noise."""
        batch = counts.batch
        self._once(batch)
        noise, variances = self._admit(batch.query, batch.users, 1)
        values = counts.values + self._draw(noise, 1, batch.query.size)[0]
        return Release(batch, values, noise, float(variances[0]))

    def noise_of_episodes(self, query: CountQuery, episodes: int) -> tuple[FloatArray, FloatArray]:
        """Noise of the next episodes, charged and drawn as if each had been released by itself."""
        noise, variances = self._admit(query, 1, episodes)
        return self._draw(noise, episodes, query.size), variances
