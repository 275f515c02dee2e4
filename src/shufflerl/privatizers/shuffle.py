"""The shuffle model: every user adds a little noise, a shuffler mixes the batch, the coordinator sees the sum."""

from __future__ import annotations

import math
from typing import ClassVar

from shufflerl import checks
from shufflerl.counts import CountQuery
from shufflerl.learners.base import Learner
from shufflerl.noise import BinomialNoise, PoissonNoise
from shufflerl.privacy.accounting import Budget, calibrate, paper_noise, paper_tau
from shufflerl.privacy.ledger import Charge, Ledger
from shufflerl.privatizers.base import AdditivePrivatizer
from shufflerl.seeding import Seed

_TRUST = (
    "unique users",
    "honest shuffler",
    "honest enrolment",
    "honest users",
    "sound cryptography",
    "exact noise",
    "public parameters",
)


class Shuffle(AdditivePrivatizer):
    """Poisson one-bits: all users' noise tags on a counter together are Poisson, whatever their number.

    `gamma` is the fraction of users assumed to add their noise: each adds 1/gamma of its share, so that theirs alone
    suffices.
    """

    name: ClassVar[str] = "shuffle"
    model: ClassVar[str] = "shuffle"
    mechanism: ClassVar[str] = "one-bit messages with Poisson noise tags, shuffled per batch"
    assumptions: ClassVar[tuple[str, ...]] = _TRUST
    scales: ClassVar[bool] = True

    def __init__(
        self,
        learner: Learner,
        budget: Budget,
        seed: Seed,
        ledger: Ledger | None = None,
        *,
        gamma: float = 1.0,
        participations: int = 1,
    ) -> None:
        super().__init__(learner, budget, seed, ledger, participations=participations)
        self.gamma = checks.fraction("gamma", gamma)

    @property
    def honest_fraction(self) -> float:
        """gamma."""
        return self.gamma

    def _charge(self, query: CountQuery, users: int) -> Charge:
        noise = calibrate(self.budget, query.changed_counters, self.participations)
        return Charge(noise, query.changed_counters * self.participations)

    def _noise(self, query: CountQuery, users: int) -> PoissonNoise:
        honest = calibrate(self.budget, query.changed_counters, self.participations)
        return PoissonNoise(honest.mean / self.gamma)


class ShufflePaper(AdditivePrivatizer):
    """The paper's binomial noise bits with the paper's constants: far more noise than the budget needs.

    Bits are sent one by one: the integers that the paper sends would not be private.
    """

    name: ClassVar[str] = "shuffle-paper"
    model: ClassVar[str] = "shuffle"
    mechanism: ClassVar[str] = "one-bit messages with the paper's binomial noise bits, shuffled per batch"
    assumptions: ClassVar[tuple[str, ...]] = _TRUST

    noise_on: ClassVar[str] = "on each counter of a batch of few users; of many, up to sqrt(2) times as much"

    def _worst_users(self, query: CountQuery) -> int:
        # Just above tau users the bits are almost fair and hardly more than tau; fewer or more users have more noise.
        return math.ceil(self._tau(query))

    def _tau(self, query: CountQuery) -> float:
        return paper_tau(self.budget, query.horizon, query.n_states, query.n_actions)

    def _noise(self, query: CountQuery, users: int) -> BinomialNoise:
        return paper_noise(users, self._tau(query))

    def _charge(self, query: CountQuery, users: int) -> Charge:
        tau = self._tau(query)
        # Up to tau users, rounding only adds fair bits to ceil(tau) of them, and more noise never costs more.
        noise = paper_noise(users, tau) if users > tau else BinomialNoise(math.ceil(tau), 0.5)
        return Charge(noise, query.changed_counters * self.participations)
