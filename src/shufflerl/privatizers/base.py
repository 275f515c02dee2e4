"""The contract of a privatizer: true counts in, a release out, the budget charged before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from shufflerl import checks
from shufflerl.arrays import FloatArray
from shufflerl.counts import CountQuery, Counts, Release
from shufflerl.errors import ContractError
from shufflerl.learners.base import Learner
from shufflerl.noise import Noise
from shufflerl.privacy.accounting import Budget, privacy_loss, warn_if_weak
from shufflerl.privacy.certificate import Certificate
from shufflerl.privacy.ledger import Charge, Ledger
from shufflerl.seeding import Seed, stream


class Privatizer(ABC):
    """Turns the true counts of a batch into what a learner may see."""

    name: ClassVar[str]

    @abstractmethod
    def release(self, counts: Counts) -> Release:
        """Answer the batch that the counts belong to."""

    @abstractmethod
    def certificate(self, query: CountQuery) -> Certificate | None:
        """What is guaranteed to a user who answers such a query; None without privacy."""

    #: Whether noise does not depend on the counts, so that `noise_of_episodes` can draw it before them.
    draws_ahead: ClassVar[bool] = False

    def noise_of_episodes(self, query: CountQuery, batches: range) -> tuple[FloatArray, FloatArray]:
        """What is added to these batches of one user each: values[t, tag], and the `added_variance` of each.

        No rows at all mean that nothing is added.
        """
        raise NotImplementedError


class BudgetedPrivatizer(Privatizer):
    """Charges a ledger for every batch before anything of it is drawn, each batch once and in order.

    It serves a learner from the batch on that comes next when it is made: after a restart, restore the learner first.
    Subclasses say which law their noise has (`_noise`), what of it the accountant may count on (`_charge`) and whom
    they trust.
    """

    model: ClassVar[str]
    mechanism: ClassVar[str]
    assumptions: ClassVar[tuple[str, ...]]
    #: Whether a query that touches fewer counters has less noise.
    scales: ClassVar[bool] = False
    #: What the noise that the certificate states is on.
    noise_on: ClassVar[str] = "on each counter of a batch that asks for all of them"

    def __init__(
        self,
        learner: Learner,
        budget: Budget,
        seed: Seed,
        ledger: Ledger | None = None,
        *,
        participations: int = 1,
    ) -> None:
        warn_if_weak(budget, learner.problem.episodes)
        self.budget = budget
        self.participations = checks.whole("participations", participations, least=1)
        self.ledger = ledger or Ledger("simulation", budget)
        self._next_batch = learner.batches_observed
        # After a restart another stream: the same noise on two batches would cancel in their difference.
        self._rng = stream(seed, "noise", self._next_batch)
        self._prepare(learner)
        everything = CountQuery.everything(learner.problem)
        self._extremes = CountQuery(learner.problem, [], [0]), everything
        self._charge(everything, 1)  # a budget that cannot be met is refused here

    def _prepare(self, learner: Learner) -> None:
        """What a subclass must know of the learner it serves; here nothing."""

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

    def _of_its_kind(self, query: CountQuery) -> CountQuery:
        """What noise and cost go by: the query of users who take part once; of those who come back, everything.

        Two batches that each keep to the budget with another of their kind need not keep to it with each other. With
        the noise of everything, one that asks for a part of it tells no more than one that asks for all.
        """
        _, everything = self._extremes
        return query if self.participations == 1 else everything

    def _added_variances(self, noise: Noise, batches: range) -> FloatArray:
        """By how much each of the batches raises the variance of the running sum of noise."""
        return np.full(len(batches), noise.variance)

    def _admit(self, query: CountQuery, users: int, batches: range) -> tuple[Noise, FloatArray]:
        """Charge the next batches; only then is there a law to draw from, and what each adds to the variance."""
        if batches.start != self._next_batch:
            raise ContractError(
                f"Batch {batches.start} was asked to be released, but batch {self._next_batch} comes next: batches are "
                "released in order, once each. A second release of the same users would spend their budget twice. "
                "After a restart, restore the learner first and make the privatizer for it then."
            )
        query = self._of_its_kind(query)
        self.ledger.record_all([f"batch {number}" for number in batches], self._charge(query, users))
        noise = self._noise(query, users)
        added = self._added_variances(noise, batches)
        self._next_batch = batches.stop
        return noise, added

    def _spans(self, users: int) -> tuple[float, float] | None:
        """The variance of noise in a batch whose users touch one counter alone, and all of them; see `Release`."""
        if not self.scales:
            return None
        alone, together = (self._noise(self._of_its_kind(query), users).variance for query in self._extremes)
        return alone, together

    def _worst_users(self, query: CountQuery) -> int:
        """The size of batch that costs its users most; here all cost the same."""
        return 1

    def _stated_noise(self, query: CountQuery) -> float:
        """The deviation that the certificate states."""
        return self._noise(query, 1).sd

    def certificate(self, query: CountQuery) -> Certificate:
        """What a user who answers such a query, or part of it, is guaranteed, whatever the size of its batch.

        Noise that goes with the query is calibrated to within a hair of the budget, which may be thinner for a part.
        """
        query = self._of_its_kind(query)
        charge = self._charge(query, self._worst_users(query))
        epsilon = privacy_loss(charge.noise, charge.changed).epsilon(self.budget.delta)
        return Certificate(
            epsilon=max(self.budget.epsilon, epsilon) if self.scales else epsilon,
            delta=self.budget.delta,
            budget_epsilon=self.budget.epsilon,
            model=self.model,
            mechanism=self.mechanism,
            noise_sd=self._stated_noise(query),
            noise_on=self.noise_on,
            changed_counters=charge.changed,
            participations=self.participations,
            honest_fraction=self.honest_fraction,
            assumptions=self.assumptions,
        )


class AdditivePrivatizer(BudgetedPrivatizer):
    """Adds noise that does not depend on the data to every counter."""

    draws_ahead: ClassVar[bool] = True

    def _draw(self, noise: Noise, batches: range, size: int) -> FloatArray:
        """Noise[b, tag] of admitted batches."""
        return noise.sample(self._rng, (len(batches), size))

    def release(self, counts: Counts) -> Release:
        """Charge the budget, then add noise."""
        batch = counts.checked().batch
        alone = range(batch.index, batch.index + 1)
        noise, added = self._admit(batch.query, batch.users, alone)
        values = counts.values + self._draw(noise, alone, batch.query.size)[0]
        return Release(batch, values, noise, float(added[0]), self._spans(batch.users))

    def noise_of_episodes(self, query: CountQuery, batches: range) -> tuple[FloatArray, FloatArray]:
        """Noise of the next episodes, charged and drawn as if each had been released by itself."""
        noise, added = self._admit(query, 1, batches)
        return self._draw(noise, batches, query.size), added
