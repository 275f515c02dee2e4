"""The contract of a privatizer: true counts in, a release out, the budget charged before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from shufflerl.arrays import FloatArray
from shufflerl.counts import Batch, Counts, Query, Release
from shufflerl.errors import ContractError
from shufflerl.mdp import Problem
from shufflerl.noise import Noise
from shufflerl.privacy.accounting import warn_if_weak
from shufflerl.privacy.certificate import Certificate
from shufflerl.privacy.ledger import Ledger
from shufflerl.privacy.mechanism import Mechanism
from shufflerl.returns import ReturnProblem
from shufflerl.seeding import Seed, stream


class Privatizer(ABC):
    """Turns the true counts of a batch into what a learner may see."""

    @abstractmethod
    def release(self, counts: Counts) -> Release:
        """Answer the batch that the counts belong to."""

    @abstractmethod
    def certificate(self, query: Query) -> Certificate | None:
        """What is guaranteed to a user who answers such a query; None without privacy."""

    def expected_noise(self, query: Query) -> Noise | None:
        """The law of the noise on a counter of such a query; None if it is not known before a release."""
        return None

    #: Whether noise does not depend on the counts, so that `noise_of_episodes` can draw it before them.
    draws_ahead: ClassVar[bool] = False

    def noise_of_episodes(self, query: Query, batches: range) -> tuple[FloatArray, FloatArray]:
        """What is added to these batches of one user each: values[t, tag], and the `added_variance` of each.

        No rows at all mean that nothing is added.
        """
        raise NotImplementedError


class Analyst(Protocol):
    """What a privatizer must know of whoever asks for batches, such as a learner."""

    batches_observed: int

    @property
    def problem(self) -> Problem | ReturnProblem:
        """What is public, such as how many users there are in all."""

    @property
    def widest_query(self) -> Query:
        """All that a batch may ask for."""

    @property
    def max_batches(self) -> int:
        """How many batches there will be at most."""

    @property
    def reads_running_sums(self) -> bool:
        """Whether only the sum of all releases is read."""


@dataclass(frozen=True)
class Workload:
    """What a privatizer is made for: batches that ask for no more than `query`, with noise drawn from a seed.

    There are `episodes` users in all. A ledger of its own is made unless one is given. A trusted server must also know
    how many batches there will be at most (unless given, as many as episodes), and counts continually for who reads
    only `running_sums` of all releases.
    """

    query: Query
    episodes: int
    seed: Seed
    ledger: Ledger | None = None
    first_batch: int = 0
    batches: int | None = None
    running_sums: bool = False

    @classmethod
    def of(cls, learner: Analyst, seed: Seed, ledger: Ledger | None = None) -> Workload:
        """The workload of a learner from the batch on that comes next."""
        batches = (learner.batches_observed, learner.max_batches, learner.reads_running_sums)
        return cls(learner.widest_query, learner.problem.episodes, seed, ledger, *batches)


class BudgetedPrivatizer(Privatizer):
    """Charges a ledger for every batch before anything of it is drawn, each batch once and in order.

    What the noise is, what it costs and what is guaranteed is the mechanism's; how it is drawn, the subclass's.
    """

    def __init__(self, mechanism: Mechanism[Noise], workload: Workload) -> None:
        warn_if_weak(mechanism.budget, workload.episodes)
        self.mechanism = mechanism
        self.ledger = workload.ledger or Ledger("simulation", mechanism.budget)
        self._next_batch = workload.first_batch
        # After a restart another stream: the same noise on two batches would cancel in their difference.
        self.rng = stream(workload.seed, "noise", self._next_batch)
        mechanism.charge(workload.query)  # a budget that cannot be met is refused here

    def certificate(self, query: Query) -> Certificate:
        """What a user who answers such a query, or part of it, is guaranteed, whatever the size of its batch."""
        return self.mechanism.certificate(query)

    def expected_noise(self, query: Query) -> Noise:
        """The mechanism's."""
        return self.mechanism.noise(query)

    def _added_variances(self, noise: Noise, batches: range) -> FloatArray:
        """By how much each of the batches raises the variance of the running sum of noise."""
        return np.full(len(batches), noise.variance)

    def _admit(self, query: Query, users: int, batches: range) -> tuple[Noise, FloatArray]:
        """Charge the next batches; only then is there a law to draw from, and what each adds to the variance."""
        if batches.start != self._next_batch:
            raise ContractError(
                f"Batch {batches.start} was asked to be released, but batch {self._next_batch} comes next: batches are "
                "released in order, once each. A second release of the same users would spend their budget twice. "
                "After a restart, restore the learner first and make the privatizer for it then."
            )
        self.ledger.record_all([f"batch {number}" for number in batches], self.mechanism.charge(query, users))
        noise = self.mechanism.noise(query, users)
        added = self._added_variances(noise, batches)
        self._next_batch = batches.stop
        return noise, added

    def _released(self, batch: Batch, values: FloatArray, noise: Noise, added: FloatArray) -> Release:
        return Release(batch, values, noise, float(added[0]), self.mechanism.variance_range(batch.query, batch.users))


class AdditivePrivatizer(BudgetedPrivatizer):
    """Adds noise that does not depend on the data to every counter."""

    draws_ahead: ClassVar[bool] = True

    def _draw(self, noise: Noise, batches: range, size: int) -> FloatArray:
        """Noise[b, tag] of admitted batches."""
        return noise.sample(self.rng, (len(batches), size))

    def release(self, counts: Counts) -> Release:
        """Charge the budget, then add noise."""
        batch = counts.checked().batch
        alone = range(batch.index, batch.index + 1)
        noise, added = self._admit(batch.query, batch.users, alone)
        values = counts.values + self._draw(noise, alone, batch.query.size)[0]
        return self._released(batch, values, noise, added)

    def noise_of_episodes(self, query: Query, batches: range) -> tuple[FloatArray, FloatArray]:
        """Noise of the next episodes, charged and drawn as if each had been released by itself."""
        noise, added = self._admit(query, 1, batches)
        return self._draw(noise, batches, query.size), added
