"""Who adds the noise of a batch, its users or both servers: all that differs between the two, as one value each.

Where users add it (the paper's way) a report has the user's own tags and noise, filled up with padding, and all tags of
a batch are mixed together. Where the servers add it a report has exactly one tag in each group of counters, of which a
user touches one, and tags are mixed within their group: whatever a user sends, it moves no counter by more than one,
and nobody's privacy rests on other users.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from shufflerl.arrays import FloatArray, IntArray
from shufflerl.counts import Query, Trajectories
from shufflerl.errors import InvalidInputError
from shufflerl.network.protocol import masking, wire
from shufflerl.noise import BinomialNoise, DiscreteLaplace, NoiseSum, PoissonNoise, TruncatedLaplace
from shufflerl.privacy.protocol import Protocol, draw, unbiased
from shufflerl.returns import Returns

if TYPE_CHECKING:  # the accountant is large; those who only read announcements do without
    from shufflerl.privacy.accounting import Budget
    from shufflerl.privacy.mechanism import Mechanism

#: The law of what a server adds to a counter.
Law = PoissonNoise | DiscreteLaplace | TruncatedLaplace
# Noise tags that one user draws; more would take gigabytes, whether they are sent one by one or only counted.
_MAX_NOISE = 20_000_000


class Source(ABC):
    """Where the noise of a batch comes from, and what reports, release and charge follow from that."""

    query: Query
    users: int
    #: Users who may be left out of a sum, and their noise with them.
    excludable: int

    #: As the settings say it.
    name: ClassVar[Literal["users", "servers"]]
    #: What the shuffler and the coordinator add to every counter; None: nothing.
    dummies: PoissonNoise | TruncatedLaplace | None
    own: PoissonNoise | DiscreteLaplace | None

    @property
    @abstractmethod
    def group_starts(self) -> IntArray:
        """The first tag of each group that is mixed by itself."""

    @property
    @abstractmethod
    def tags_per_group(self) -> int:
        """Tags in every report and group, padding among them."""

    @property
    @abstractmethod
    def padding(self) -> int | None:
        """The tag that reports are filled up with; None if they are not."""

    @abstractmethod
    def of(self, users: int) -> Source:
        """The same among so many users."""

    @property
    def groups(self) -> list[range]:
        """The tags of each group."""
        starts = [int(start) for start in self.group_starts]
        return [range(*ends) for ends in zip(starts, [*starts[1:], self.query.size], strict=True)]

    @property
    def tags_per_report(self) -> int:
        """Tags in every report."""
        return len(self.group_starts) * self.tags_per_group

    @property
    def expected_dummies(self) -> float:
        """How many dummies the shuffler adds to a batch, about."""
        return 0.0 if self.dummies is None else self.dummies.mean * self.query.size

    @abstractmethod
    def tags(self, episode: Trajectories | Returns) -> IntArray:
        """What a user says of its episode, from the operating system's random source where noise is among it."""

    @abstractmethod
    def noise(self, reports: int) -> PoissonNoise | NoiseSum:
        """The law of the noise on each counter of a release of so many reports."""

    @abstractmethod
    def values(self, counts: IntArray, reports: int) -> FloatArray:
        """Unbiased counts: all that was counted, the servers' noise included, less the noise that is expected."""

    @property
    @abstractmethod
    def count_range(self) -> tuple[int, int]:
        """Between what each counter of an honest batch is with all noise on it, but with probability exp(-35)."""

    @abstractmethod
    def stated(self, budget: Budget, honest_fraction: float, excluded: int) -> Mechanism[PoissonNoise | NoiseSum]:
        """The mechanism that was announced, if only the honest fraction add their noise and so many are excluded."""

    @abstractmethod
    def relied_on(self, honest_fraction: float) -> str:
        """What a node relies on, for people; goes on with what it suffices for."""

    @abstractmethod
    def as_wire(self) -> wire.NoiseByUsers | wire.NoiseByServers:
        """As it is announced."""


@dataclass(frozen=True)
class Users(Source):
    """Every user adds its share of Poisson noise; `law` is that of all shares on a counter together.

    Each share is so large that those of all but `excludable` users suffice.
    """

    query: Query
    users: int
    law: PoissonNoise
    excludable: int = 0

    name = "users"
    dummies = None
    own = None
    padding = wire.PADDING

    def __post_init__(self) -> None:
        """Refuse noise that no device could draw."""
        if (tags := self.protocol.rate * self.query.size) > _MAX_NOISE:
            raise InvalidInputError(
                f"Each of its {self.users:,} users would draw about {float(tags):,.0f} noise tags; expected at most "
                f"{_MAX_NOISE:,}. Ask more users at once, or allow a larger epsilon."
            )

    def of(self, users: int) -> Users:
        """See `Source`."""
        return replace(self, users=users)

    @functools.cached_property
    def protocol(self) -> Protocol:
        """What all users agree on."""
        return Protocol(self.query, self.users, self.law, 1 - self.excludable / self.users)

    @property
    def group_starts(self) -> IntArray:
        """Noise is on all counters alike, so that all tags are mixed together."""
        return np.zeros(1, dtype=np.int64)

    @functools.cached_property
    def tags_per_group(self) -> int:
        """As many as any user of the batch may need.

        A user who draws more noise than fits leaves some of it out. In a whole batch that happens with probability
        below exp(-35), which is charged with the noise: every batch has delta to spare for it.
        """
        mean = float(self.protocol.rate) * self.query.size
        return self.query.touched_counters + masking.max_poisson(mean, self.users)

    def tags(self, episode: Trajectories | Returns) -> IntArray:
        """Its own tags and its share of the noise, in an order that does tell."""
        return draw(self.protocol, episode)

    def noise(self, reports: int) -> PoissonNoise:
        """The shares of those who are left."""
        return PoissonNoise(self.law.mean * reports / self.users)

    def values(self, counts: IntArray, reports: int) -> FloatArray:
        """Less every reporting user's expected noise."""
        return unbiased(self.protocol, counts, reports)

    @property
    def count_range(self) -> tuple[int, int]:
        """Each user raises a counter once at most, the rest is noise."""
        return 0, self.users + masking.max_poisson(self.law.mean, self.query.size)

    def stated(self, budget: Budget, honest_fraction: float, excluded: int) -> Mechanism[PoissonNoise | NoiseSum]:
        """Excluded reports are taken to be honest ones, whose noise goes with them."""
        from shufflerl.privacy.mechanism import StatedPoisson

        return StatedPoisson(
            budget,
            honest_fraction=honest_fraction,
            excludable=excluded / self.users,
            failure=masking.OVERFLOW,
            mean=self.law.mean,
        )

    def relied_on(self, honest_fraction: float) -> str:
        """See `Source`."""
        less = f" less {self.excludable} excluded" if self.excludable else ""
        return f"{in_words(self.law)} on each counter, of which the honest {honest_fraction:g}{less} suffice"

    def as_wire(self) -> wire.NoiseByUsers:
        """See `Source`."""
        return wire.NoiseByUsers(mean=self.law.mean)


@dataclass(frozen=True)
class Servers(Source):
    """The shuffler adds dummies and the coordinator noise of its own, each enough for the whole budget."""

    query: Query
    users: int
    dummies: PoissonNoise | TruncatedLaplace
    own: PoissonNoise | DiscreteLaplace
    excludable: int = 0

    name = "servers"
    tags_per_group = 1
    padding = None

    def of(self, users: int) -> Servers:
        """See `Source`."""
        return replace(self, users=users)

    @property
    def group_starts(self) -> IntArray:
        """A user touches one counter of each of the query's groups."""
        return self.query.group_starts

    def tags(self, episode: Trajectories | Returns) -> IntArray:
        """One tag per group, in order of groups, and no noise."""
        (tags,) = self.query.tags(episode)
        return np.asarray(tags)

    def noise(self, reports: int) -> NoiseSum:
        """Of both servers, whoever reports."""
        return NoiseSum((self.dummies, self.own))

    def values(self, counts: IntArray, reports: int) -> FloatArray:
        """Less the expected noise of both servers."""
        return counts.astype(np.float64) - self.noise(reports).mean

    @property
    def count_range(self) -> tuple[int, int]:
        """Each user raises a counter once at most, the rest is the noise of both."""
        ranges = [_range(law, self.query.size) for law in (self.dummies, self.own)]
        return sum(low for low, _ in ranges), self.users + sum(high for _, high in ranges)

    def stated(self, budget: Budget, honest_fraction: float, excluded: int) -> Mechanism[PoissonNoise | NoiseSum]:
        """Nothing rests on users, whoever is honest or excluded."""
        from shufflerl.privacy.mechanism import StatedServers

        return StatedServers(budget, law=self.dummies, own_law=self.own)

    def relied_on(self, honest_fraction: float) -> str:
        """See `Source`."""
        return (
            f"{in_words(self.dummies)} by the shuffler and {in_words(self.own)} by the coordinator on each counter, "
            "of which the former suffices"
        )

    def as_wire(self) -> wire.NoiseByServers:
        """See `Source`."""
        dummies, own = self.dummies, self.own
        return wire.NoiseByServers(
            dummies=wire.Poisson(mean=dummies.mean)
            if isinstance(dummies, PoissonNoise)
            else wire.TruncatedLaplace(scale=dummies.scale, shift=dummies.shift),
            own=wire.Poisson(mean=own.mean) if isinstance(own, PoissonNoise) else wire.Laplace(scale=own.scale),
        )


def source(query: Query, users: int, noise: PoissonNoise | NoiseSum, excludable: int = 0) -> Source:
    """Who adds noise of this law: of a mechanism of users' noise, or of the servers', dummies first."""
    if isinstance(noise, PoissonNoise):
        return Users(query, users, noise, excludable)
    dummies, own = noise.parts
    if not isinstance(dummies, PoissonNoise | TruncatedLaplace) or not isinstance(own, PoissonNoise | DiscreteLaplace):
        raise InvalidInputError(f"{noise!r} is not the noise of a shuffler and a coordinator.")
    return Servers(query, users, dummies, own, excludable)


def from_wire(query: Query, users: int, noise: wire.NoiseByUsers | wire.NoiseByServers, excludable: int) -> Source:
    """What was announced."""
    if isinstance(noise, wire.NoiseByUsers):
        return Users(query, users, PoissonNoise(noise.mean), excludable)
    dummies, own = noise.dummies, noise.own
    return Servers(
        query,
        users,
        PoissonNoise(dummies.mean)
        if isinstance(dummies, wire.Poisson)
        else TruncatedLaplace(dummies.scale, dummies.shift),
        PoissonNoise(own.mean) if isinstance(own, wire.Poisson) else DiscreteLaplace(own.scale),
        excludable,
    )


def in_words(law: Law | NoiseSum) -> str:
    """A law for people."""
    if isinstance(law, NoiseSum):
        return " and ".join(in_words(part) for part in law.parts if not isinstance(part, BinomialNoise))
    if isinstance(law, PoissonNoise):
        return f"Poisson noise of mean {law.mean:.6g}"
    cut = f", cut at {law.shift} either way" if isinstance(law, TruncatedLaplace) else ""
    return f"Laplace noise of scale {law.scale:.6g}{cut}"


def _range(law: Law, cases: int) -> tuple[int, int]:
    """Between what none of so many draws is, but with probability exp(-35)."""
    if isinstance(law, PoissonNoise):
        return 0, masking.max_poisson(law.mean, cases)
    if isinstance(law, TruncatedLaplace):
        return 0, 2 * law.shift
    far = math.ceil(law.scale * (masking.EXPONENT + math.log(2 * cases)))
    return -far, far
