"""Mechanisms: how releases are made private, each as one value.

A mechanism holds its function and its map together, as in OpenDP: the law of the noise that is drawn, and what of it
the accountant may count on. What a release costs, what is certified and how noise grows with the query follow from
these two, here and nowhere else: privatizers draw what a mechanism says, coordinators announce it, `sizing` tells it.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import numpy as np

from shufflerl import checks
from shufflerl.counts import Query
from shufflerl.errors import InvalidInputError
from shufflerl.noise import (
    MAX_COUNT,
    BinomialNoise,
    DiscreteLaplace,
    GaussianNoise,
    Noise,
    NoiseSum,
    PoissonNoise,
    TruncatedLaplace,
    UnaryNoise,
)
from shufflerl.privacy import accounting
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.certificate import Certificate
from shufflerl.privacy.ledger import Charge
from shufflerl.privacy.loss import failure_delta

Law_co = TypeVar("Law_co", bound=Noise, covariant=True)


@dataclass(frozen=True)
class Mechanism(ABC, Generic[Law_co]):
    """How the batches of a run are made private at a budget, for users who take part `participations` times.

    Subclasses say which law the noise has (`_noise`), what of it the accountant may count on (`_charge`) and whom
    users trust. `honest_fraction` is the least fraction of users that must add their noise.
    """

    budget: Budget
    participations: int = 1
    honest_fraction: float = 1.0

    model: ClassVar[str]
    description: ClassVar[str]
    #: From whom users are protected, and by what.
    against: ClassVar[str] = "Everybody who sees releases or deployed policies."
    assumptions: ClassVar[tuple[str, ...]]
    #: Whether a query that touches fewer counters has less noise.
    scales: ClassVar[bool] = False
    #: Whether the noise on a counter grows with the users of a batch.
    grows: ClassVar[bool] = False
    #: What the noise that the certificate states is on.
    noise_on: ClassVar[str] = "on each counter of a batch that asks for all of them"

    def __post_init__(self) -> None:
        """Refuse what is no number of times, or no fraction."""
        object.__setattr__(self, "participations", checks.whole("participations", self.participations, least=1))
        object.__setattr__(self, "honest_fraction", checks.fraction("honest_fraction", self.honest_fraction))

    @abstractmethod
    def _noise(self, query: Query, users: int) -> Law_co:
        """The law of the noise on each counter of a batch of so many users."""

    @abstractmethod
    def _charge(self, query: Query, users: int) -> Charge:
        """What a batch costs each of its users, all participations together."""

    def _accounted(self, query: Query) -> Query:
        """What noise and cost go by: the query of users who take part once; of those who come back, everything.

        Two batches that each keep to the budget with another of their kind need not keep to it with each other. With
        the noise of everything, one that asks for a part of it tells no more than one that asks for all.
        """
        return query if self.participations == 1 else query.widest

    def _costliest(self, query: Query) -> list[tuple[Query, int]]:
        """Batches, by query and users, of which one costs its users most of all that ask so much or less."""
        return [(query, 1)]

    def noise(self, query: Query, users: int = 1) -> Law_co:
        """The law of the noise on each counter of a batch of so many users."""
        return self._noise(self._accounted(query), users)

    def charge(self, query: Query, users: int = 1) -> Charge:
        """What a batch costs each of its users, all participations together."""
        return self._charge(self._accounted(query), users)

    def variance_range(self, query: Query, users: int = 1) -> tuple[float, ...] | None:
        """The variance of noise in a batch whose users touch one counter alone, two, up to all; see `Release`."""
        return _variance_range(self, query.widest, users if self.grows else 1) if self.scales else None

    def certificate(self, query: Query) -> Certificate:
        """What a user who answers such a query, or part of it, is guaranteed, whatever the size of its batch.

        Noise that goes with the query is calibrated to within a hair of the budget, which may be thinner for a part.
        """
        charges = [self.charge(part, users) for part, users in self._costliest(query)]
        epsilon = max(own.epsilon(self.budget) for own in charges)
        return Certificate(
            epsilon=max(self.budget.epsilon, epsilon) if self.scales else epsilon,
            delta=self.budget.delta,
            budget_epsilon=self.budget.epsilon,
            model=self.model,
            mechanism=self.description,
            against=self.against,
            noise_sd=self.noise(query).sd,
            noise_on=self.noise_on,
            changed_counters=charges[0].changed,
            participations=self.participations,
            honest_fraction=self.honest_fraction,
            assumptions=self.assumptions,
        )


@functools.lru_cache(maxsize=1024)
def _variance_range(mechanism: Mechanism[Noise], widest: Query, users: int) -> tuple[float, ...]:
    """Calibrated for some numbers of counters, and linear between: the law of the noise may change with them."""
    most = widest.touched_counters
    some = {1, 2, 3, 4, *(step << k for k in range(1, most.bit_length()) for step in (3, 4)), most}
    known = sorted(touched for touched in some if touched <= most)
    variances = [mechanism.noise(widest.touching(touched), users).variance for touched in known]
    return tuple(np.interp(range(1, most + 1), known, variances).tolist())


_SHUFFLER = (
    "unique users",
    "honest shuffler",
    "honest enrolment",
    "honest users",
    "sound cryptography",
    "exact noise",
    "public parameters",
)
_SERVERS = ("unique users", "separate servers", "sound cryptography", "exact noise", "public parameters")
_SERVER = ("unique users", "trusted server", "exact noise", "public parameters")
_NOBODY = ("unique users", "exact noise", "public parameters")


_AGAINST_READERS = (
    "The coordinator, and everybody who sees releases or deployed policies, the shuffler among them: the noise of all "
    "users together."
)
_AGAINST_ALL_OTHERS = "Everybody who sees releases or deployed policies; not the server itself."
_AGAINST_EVERYBODY = "Everybody but the user itself."


@dataclass(frozen=True)
class ShuffledPoisson(Mechanism[PoissonNoise]):
    """Poisson one-bits: all users' noise tags on a counter together are Poisson, whatever their number.

    Each user adds so much of its share that those of the honest fraction suffice, even if `excludable`, a share of all
    users, are left out who are all honest. `margin` is relative: who multiplies elsewhere what is divided here must
    not round below what was certified. `failure` is the probability that the noise of a batch is not all there, for
    which delta has room.
    """

    excludable: float = 0.0
    margin: float = 0.0
    failure: float = 0.0

    model: ClassVar[str] = "shuffle"
    description: ClassVar[str] = "one-bit messages with Poisson noise tags, shuffled per batch"
    against: ClassVar[str] = _AGAINST_READERS
    assumptions: ClassVar[tuple[str, ...]] = _SHUFFLER
    scales: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse a share that leaves nobody's noise, and what would draw less than is charged."""
        super().__post_init__()
        if self.excludable < 0 or self.margin < 0:
            raise InvalidInputError(
                f"The excludable share is {self.excludable:g} and the margin {self.margin:g}; expected 0 or more."
            )
        if not self.excludable < self.honest_fraction:
            raise InvalidInputError(
                f"The honest fraction is {self.honest_fraction:g} and {self.excludable:g} of the users may be "
                "excluded: nobody's noise is left to rely on. Let fewer be excluded."
            )

    def _relied_on(self, query: Query) -> PoissonNoise:
        fails = failure_delta(self.failure * self.participations, self.budget.epsilon)
        budget = Budget(self.budget.epsilon, self.budget.delta - fails)
        return accounting.calibrate(budget, query.changed_counters, self.participations)

    def _noise(self, query: Query, users: int) -> PoissonNoise:
        mean = self._relied_on(query).mean / (self.honest_fraction - self.excludable) * (1 + self.margin)
        return accounting.drawable(mean, self.budget)

    def _charge(self, query: Query, users: int) -> Charge:
        changed = query.changed_counters * self.participations
        return Charge(self._relied_on(query), changed, self.failure * self.participations)


@dataclass(frozen=True)
class StatedPoisson(ShuffledPoisson):
    """Poisson one-bits of a mean that was chosen, not calibrated: of the budget only delta counts."""

    mean: float = math.nan

    scales: ClassVar[bool] = False

    def _relied_on(self, query: Query) -> PoissonNoise:
        return PoissonNoise(self.mean * (self.honest_fraction - self.excludable))

    def _noise(self, query: Query, users: int) -> PoissonNoise:
        return PoissonNoise(self.mean)


class ShuffledBinomial(Mechanism[BinomialNoise]):
    """The paper's binomial noise bits with the paper's constants: far more noise than the budget needs.

    Bits are sent one by one: the integers that the paper sends would not be private.
    """

    model: ClassVar[str] = "shuffle"
    description: ClassVar[str] = "one-bit messages with the paper's binomial noise bits, shuffled per batch"
    against: ClassVar[str] = _AGAINST_READERS
    assumptions: ClassVar[tuple[str, ...]] = _SHUFFLER
    noise_on: ClassVar[str] = "on each counter of a batch of few users; of many, up to sqrt(2) times as much"

    def tau(self, query: Query) -> float:
        """The paper's, of batches that ask this."""
        return accounting.paper_tau(self.budget, *query.dimensions)

    def _costliest(self, query: Query) -> list[tuple[Query, int]]:
        # Just above tau users the bits are almost fair and hardly more than tau; fewer or more users have more noise.
        # Up to tau users it is so little more that the bound of its cost may be the larger of the two. Where tau is
        # small, no bit at all, whose loss is infinite, is likeliest of very many users: e^(-tau/2), not 2^-tau.
        # Tau grows with the number of counters, so a query for fewer may cost more.
        parts = (query, query.touching(1))
        return [(part, users) for part in parts for users in (1, math.ceil(self.tau(part)), MAX_COUNT)]

    def _noise(self, query: Query, users: int) -> BinomialNoise:
        return accounting.paper_noise(users, self.tau(query))

    def _charge(self, query: Query, users: int) -> Charge:
        tau = self.tau(query)
        # Up to tau users, rounding only adds fair bits to ceil(tau) of them, and more noise never costs more.
        noise = accounting.paper_noise(users, tau) if users > tau else BinomialNoise(math.ceil(tau), 0.5)
        return Charge(noise, query.changed_counters * self.participations)


class ServersNoise(Mechanism[NoiseSum]):
    """Users send one tag per family and step and no noise; shuffler and coordinator each add enough for the budget.

    The coordinator knows its own noise, so that from it the shuffler's dummies must protect; the shuffler knows its
    dummies, so that from it the coordinator's noise must. Whoever knows neither faces both. Nothing rests on other
    users: not on their number, nor their noise. One charge holds for both views: the dummies', which cost no less.
    """

    model: ClassVar[str] = "shuffle"
    description: ClassVar[str] = (
        "one sealed tag per family and step; dummies by the shuffler and noise by the coordinator, each enough alone"
    )
    against: ClassVar[str] = (
        "The coordinator: the shuffler's dummies. The shuffler: the coordinator's noise. Users who collude with "
        "either: the same, as nothing rests on other users. Everybody else who sees releases or deployed policies: "
        "either noise."
    )
    assumptions: ClassVar[tuple[str, ...]] = _SERVERS
    scales: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse to rely on users."""
        super().__post_init__()
        if self.honest_fraction != 1:
            raise InvalidInputError(
                f"The honest fraction is {self.honest_fraction:g}, but with noise by the servers nothing rests on "
                "users; leave it at 1."
            )

    def dummies(self, query: Query) -> PoissonNoise | TruncatedLaplace:
        """The law of what the shuffler adds to each counter: dummies, less their mean."""
        changed = self._accounted(query).changed_counters
        return accounting.calibrate_dummies(self.budget, changed, self.participations)

    def own(self, query: Query) -> PoissonNoise | DiscreteLaplace:
        """The law of what the coordinator adds to each counter: that of the dummies, uncut, which costs no more."""
        return accounting.uncut(self.dummies(query))

    def _noise(self, query: Query, users: int) -> NoiseSum:
        return NoiseSum((self.dummies(query), self.own(query)))

    def _charge(self, query: Query, users: int) -> Charge:
        return Charge(self.dummies(query), query.changed_counters * self.participations)


@dataclass(frozen=True)
class StatedServers(ServersNoise):
    """Noise by the servers of laws that were stated, not calibrated: of the budget only delta counts.

    `law` is that of the dummies, which is what is charged; `own_law` the coordinator's: the same uncut, unless it says
    otherwise, and nothing that may protect less.
    """

    law: PoissonNoise | TruncatedLaplace | None = None
    own_law: PoissonNoise | DiscreteLaplace | None = None

    scales: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse what one charge does not hold for."""
        super().__post_init__()
        if self.law is not None and self.own_law is not None and not accounting.covers(self.own_law, self.law):
            raise InvalidInputError(
                f"The shuffler's noise is {self.law}, the coordinator's {self.own_law}; expected of the coordinator "
                "the same law uncut, or a wider one, so that one charge holds for both."
            )

    def dummies(self, query: Query) -> PoissonNoise | TruncatedLaplace:
        """The stated law."""
        assert self.law is not None
        return self.law

    def own(self, query: Query) -> PoissonNoise | DiscreteLaplace:
        """The stated law."""
        return super().own(query) if self.own_law is None else self.own_law


class CentralNoise(Mechanism[GaussianNoise | DiscreteLaplace]):
    """A trusted server adds independent noise to every counter of every batch, of whichever law needs less."""

    model: ClassVar[str] = "central"
    description: ClassVar[str] = "Gaussian or discrete Laplace noise added by a trusted server, per batch"
    against: ClassVar[str] = _AGAINST_ALL_OTHERS
    assumptions: ClassVar[tuple[str, ...]] = _SERVER
    scales: ClassVar[bool] = True

    def _noise(self, query: Query, users: int) -> GaussianNoise | DiscreteLaplace:
        return accounting.calibrate_central(self.budget, query.changed_counters, self.participations)

    def _charge(self, query: Query, users: int) -> Charge:
        noise = accounting.calibrate_central(self.budget, query.changed_counters, self.participations)
        return Charge(noise, query.changed_counters * self.participations)


class ContinualGaussian(Mechanism[GaussianNoise]):
    """A trusted server counts continually (`privatizers.central.Continual`); noise is that of one batch alone."""

    model: ClassVar[str] = "central"
    against: ClassVar[str] = _AGAINST_ALL_OTHERS
    assumptions: ClassVar[tuple[str, ...]] = _SERVER
    noise_on: ClassVar[str] = (
        "on each counter if one batch were all; released continually, batches and their sums carry a few times as much"
    )

    def _accounted(self, query: Query) -> Query:
        """All batches ask the same, so users who come back need no other noise."""
        return query

    def _noise(self, query: Query, users: int) -> GaussianNoise:
        # A user in m batches shifts the sum of m columns of R, which may all point the same way: its norm is up to m
        # times one column's, as that of m^2 orthogonal changes, not of m.
        return accounting.calibrate_gaussian(self.budget, query.changed_counters, self.participations**2)

    def _charge(self, query: Query, users: int) -> Charge:
        noise = accounting.calibrate_gaussian(self.budget, query.changed_counters, self.participations**2)
        return Charge(noise, query.changed_counters * self.participations**2)


class ToeplitzGaussian(ContinualGaussian):
    """Continual counting by the square root of the matrix of running sums."""

    description: ClassVar[str] = "continual counting by a trusted server (square-root Toeplitz factorisation, Gaussian)"


class TreeGaussian(ContinualGaussian):
    """Continual counting by a binary tree."""

    description: ClassVar[str] = "continual counting by a trusted server (binary tree, Gaussian)"


class LocalGaussian(Mechanism[GaussianNoise]):
    """Every user adds Gaussian noise to each of its own counters, as much as a server would for all."""

    model: ClassVar[str] = "local"
    description: ClassVar[str] = "Gaussian noise added by every user to its own counters"
    against: ClassVar[str] = _AGAINST_EVERYBODY
    assumptions: ClassVar[tuple[str, ...]] = _NOBODY
    scales: ClassVar[bool] = True
    grows: ClassVar[bool] = True
    noise_on: ClassVar[str] = (
        "on each counter of one user's report if all are asked; n users have sqrt(n) times as much"
    )

    def _noise(self, query: Query, users: int) -> GaussianNoise:
        one = accounting.calibrate_gaussian(self.budget, query.changed_counters, self.participations)
        return GaussianNoise(one.sd * math.sqrt(users))

    def _charge(self, query: Query, users: int) -> Charge:
        noise = accounting.calibrate_gaussian(self.budget, query.changed_counters, self.participations)
        return Charge(noise, query.changed_counters * self.participations)


class LocalUnary(Mechanism[UnaryNoise]):
    """Every user reports one family and step, chosen at random, in unary encoding with flipped bits."""

    model: ClassVar[str] = "local"
    description: ClassVar[str] = "one family and step per user, unary encoding with flipped bits"
    against: ClassVar[str] = _AGAINST_EVERYBODY
    assumptions: ClassVar[tuple[str, ...]] = (*_NOBODY, "one report")
    scales: ClassVar[bool] = True
    grows: ClassVar[bool] = True
    noise_on: ClassVar[str] = "at most, on each counter of one user's report; n users have sqrt(n) times as much"

    def _noise(self, query: Query, users: int) -> UnaryNoise:
        if self.participations > 1:
            raise InvalidInputError("local-sampled is calibrated for one participation; use the privatizer local.")
        return UnaryNoise(users, query.touched_counters, accounting.calibrate_unary(self.budget))

    def _charge(self, query: Query, users: int) -> Charge:
        # One user's report shows one family and step: a replaced user changes two of its bits.
        return Charge(self._noise(query, 1), 2)
