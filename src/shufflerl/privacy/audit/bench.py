"""What is audited, and how it is played: systems, their transcripts of neighbouring batches, what observers see.

Whatever an observer knows, it sees the true counts with noise of one declared law. Where users add the noise there
is one observer, the coordinator; where both servers do there are two, and from each of them the other server's noise
alone must protect.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import numpy as np

from shufflerl.arrays import FloatArray, IntArray
from shufflerl.counts import CountQuery, Trajectories
from shufflerl.errors import ShuffleRLError
from shufflerl.mdp import Problem
from shufflerl.noise import BinomialNoise, DiscreteLaplace, PoissonNoise, TruncatedLaplace
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.audit.report import Finding, judged
from shufflerl.privacy.audit.statistics import bonferroni, chi_square
from shufflerl.privacy.loss import privacy_loss

#: Users of a batch unless told otherwise, and the fewest: one is replaced, the others stand by.
USERS = 4
#: What is played in memory.
SMALL_PROBLEM = Problem(horizon=2, n_states=2, n_actions=2, episodes=1)

#: The law of the noise that protects from one observer.
Law: TypeAlias = PoissonNoise | BinomialNoise | DiscreteLaplace | TruncatedLaplace


def _none() -> IntArray:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Transcript:
    """One batch as an auditor sees it who has all keys, and both servers' books.

    `reports`: the tags of every user, in the order in which they were sent; `released`: the tags the coordinator was
    given, in its order; `order`: which of all that were sent each of them is, reports first, then dummies; `estimates`:
    what a learner was given. Where the servers add noise, `dummies`: the tags that the shuffler added; `own`: what the
    coordinator added to each counter. On a wire also `sizes`, the bytes of every report, and `once`, keys and seeds
    that must not be used again.
    """

    reports: Sequence[IntArray]
    released: IntArray
    order: IntArray
    estimates: FloatArray
    dummies: IntArray = field(default_factory=_none)
    own: IntArray = field(default_factory=_none)
    sizes: Sequence[int] = ()
    once: Sequence[bytes] = ()


@dataclass(frozen=True, eq=False)
class Session(ABC):
    """What was declared for batches of so many users, and how one of them is played.

    `lie` sends what no honest user does and says what came of it; None where there is nothing to lie to.
    """

    query: CountQuery
    users: int
    play: Callable[[Sequence[Trajectories]], Transcript]
    lie: Callable[[], Finding] | None = None

    #: The rules of a report, for people.
    rules: ClassVar[str]

    @property
    @abstractmethod
    def laws(self) -> Mapping[str, Law]:
        """The noise that was declared, by the observer from whom it protects."""

    @abstractmethod
    def claimed(self, budget: Budget, changed: int) -> Mapping[str, Law]:
        """The noise that this budget asks for, by the same."""

    @abstractmethod
    def seen(self, batch: Transcript) -> Mapping[str, FloatArray]:
        """What each of them makes of the true counts, knowing all it can."""

    def counted(self, batch: Transcript) -> list[tuple[Law, FloatArray]]:
        """Every count of this batch that has noise of a declared law, less its mean."""
        return [(self.laws[observer], counts) for observer, counts in self.seen(batch).items()]

    @abstractmethod
    def malformed(self, batch: Transcript) -> str | None:
        """How a batch breaks the rules."""

    @abstractmethod
    def tests(self, played: Played, level: float) -> Finding:
        """A test that no other kind of system has."""

    def shortfall(self, samples: int, level: float) -> float:
        """The share of users' noise that is found missing, nine times in ten; infinite where they add none."""
        return math.inf

    def followed(self, batch: Transcript) -> tuple[list[int], int]:
        """Four messages, by their place among all that were sent, and how many they are mixed with."""
        return [0, 1, -2, -1], len(batch.order)

    def repeats(self, played: Played) -> float:
        """The p-value that no report comes twice, if that tells anything."""
        return 1.0


class System(ABC):
    """What is audited. `path` names it, `attacked` says what is played.

    An audit that is told nothing else takes its `epsilon` and `samples`: what fits into half a minute of a core. Most
    is played on its `problem`, whose every counter is asked for.
    """

    path: str
    attacked: str
    epsilon: float
    samples: int
    problem: Problem

    @abstractmethod
    def begin(self, budget: Budget, users: int, query: CountQuery) -> AbstractContextManager[Session]:
        """Batches of so many users who are asked for these counters, with noise for this budget."""


class Bench:
    """A problem so small that all trajectories can be listed: the first is all zeros, in the last nothing is."""

    def __init__(self, query: CountQuery) -> None:
        self.query = query
        choices = [range(query.n_states), range(query.n_actions), range(2)]
        rows = itertools.product(*(itertools.product(some, repeat=query.horizon) for some in choices))
        self.trajectories = [Trajectories(*([part] for part in row)) for row in rows]
        #: counts[m, c]: what trajectory m adds to counter c.
        self.counts = np.stack(
            [np.bincount(self.query.tags(one)[0], minlength=self.query.size) for one in self.trajectories]
        )
        moves = self.counts[:, None] - self.counts
        #: The most counters that differ between any two users, by looking at all pairs.
        self.changed = int(np.abs(moves).sum(axis=-1).max())
        #: direction[c]: how counter c moves when the user of the first trajectory is replaced by that of the last.
        self.direction = self.counts[-1] - self.counts[0]

    def batch(self, sample: int, neighbour: int, users: int) -> IntArray:
        """Trajectories of the replaced user, first or last, and of the others, who go through all, each in its turn."""
        others = (sample + 7 * np.arange(1, users)) % len(self.trajectories)
        return np.concatenate([[neighbour * (len(self.trajectories) - 1)], others])

    def sensitivity(self) -> Finding:
        """Whether as many counters change as is claimed."""
        stated, pairs = self.query.changed_counters, len(self.trajectories) ** 2
        return Finding(
            "sensitivity",
            self.changed == stated == int(np.abs(self.direction).sum()),
            None,
            f"Of {pairs} pairs of trajectories none differ in more than {self.changed} counters; claimed is {stated}.",
        )

    def calibration(self, session: Session, budget: Budget) -> list[Finding]:
        """Whether each declared law is enough alone: by the accountant, and, where a law ends, by what an end tells."""
        findings = []
        for observer, law in session.laws.items():
            delta = privacy_loss(law, self.changed).delta(budget.epsilon)
            # The neighbour cannot produce the least count on a counter that moves down, nor the greatest on one that
            # moves up.
            given_away = 1 - math.prod((1 - end) ** (self.changed // 2) for end in _ends(law))
            findings.append(
                Finding(
                    named("calibration", observer),
                    max(delta, given_away) <= budget.delta,
                    None,
                    f"{law} on {self.changed} changed counters has delta {max(delta, given_away):.3g} at epsilon "
                    f"{budget.epsilon:g}; claimed is {budget.delta:g}.",
                )
            )
        return findings

    def one(self, session: Session, kinds: IntArray) -> Transcript | str:
        """Play one batch of these trajectories; if it breaks the rules, how."""
        try:
            batch = session.play([self.trajectories[kind] for kind in kinds])
        except ShuffleRLError as reason:
            return f"A batch could not be played: {reason}"
        if len(set(batch.once)) < len(batch.once):
            return "A key or seed is used twice in one batch."
        return session.malformed(batch) or self._unexplained(batch) or batch

    def _unexplained(self, batch: Transcript) -> str | None:
        """How what comes out is not what went in and the noise of the servers' books."""
        size = self.query.size
        sent = np.bincount(np.concatenate([*batch.reports, batch.dummies]), minlength=size)
        released = np.bincount(batch.released, minlength=size)
        permuted = (np.sort(batch.order) == np.arange(len(batch.order))).all()
        if len(sent) != size or len(released) != size or (released != sent).any() or not permuted:
            return "A release is not the reports' tags and the dummies that were drawn for it in another order."
        if np.shape(batch.estimates) != (size,) or not np.isfinite(batch.estimates).all():
            return f"What a learner is given is not one number for each of {size} counters."
        return None

    def play(self, session: Session, samples: int) -> Played | str:
        """Play so many transcripts of either neighbour; where one breaks the rules, say how."""
        kinds = np.array([[self.batch(sample, side, session.users) for side in (0, 1)] for sample in range(samples)])
        lengths = np.empty(kinds.shape, dtype=np.int64)
        seen = {observer: np.empty((samples, 2, self.query.size)) for observer in session.laws}
        places, within = np.empty((samples, 2, 4)), np.random.default_rng()
        reports, sizes, once, keys = set(), set[int](), set[bytes](), 0
        for sample, side in itertools.product(range(samples), (0, 1)):
            batch = self.one(session, kinds[sample, side])
            if isinstance(batch, str):
                return batch
            sizes.update(batch.sizes)
            if different := unequal(sizes):
                return different
            once.update(batch.once)
            keys += len(batch.once)
            lengths[sample, side] = [len(report) for report in batch.reports]
            for observer, counts in session.seen(batch).items():
                seen[observer][sample, side] = counts
            followed, among = session.followed(batch)
            # A place is a random point of its interval.
            places[sample, side] = (np.argsort(batch.order)[followed] + within.random(4)) / among
            reports.add((side, hashlib.blake2b(batch.reports[0].tobytes(), digest_size=16).digest()))
        return Played(
            bench=self,
            session=session,
            kinds=kinds,
            lengths=lengths,
            seen=seen,
            places=places,
            repeated=len(reports) < 2 * samples,
            reused=len(once) < keys,
            on_a_wire=bool(sizes),
        )


def named(test: str, observer: str) -> str:
    """What a test is called that is made for every observer."""
    return f"{test}, {observer}" if observer else test


def unequal(sizes: Sequence[int] | set[int]) -> str | None:
    """What is wrong with reports of different lengths."""
    if len(set(sizes)) <= 1:
        return None
    return f"Reports have {min(sizes)} and {max(sizes)} bytes: their length may tell what is in them."


def _ends(law: Law) -> Iterator[float]:
    """The probabilities of the least and of the greatest count, of a law that has them."""
    if not isinstance(law, DiscreteLaplace):
        yield float(law.cdf(-law.mean))
    if isinstance(law, TruncatedLaplace):
        yield float(1 - law.cdf(law.shift - 1))
    if isinstance(law, BinomialNoise):
        yield float(1 - law.cdf(law.trials - 1 - law.mean))


@dataclass(frozen=True, eq=False)
class Played:
    """What the transcripts of both batches gave, axes [sample, neighbour, ...]."""

    bench: Bench
    session: Session
    kinds: IntArray  # trajectories, [sample, neighbour, user]
    lengths: IntArray  # tags of each report, [sample, neighbour, user]
    seen: Mapping[str, FloatArray]  # what each observer makes of the true counts, [sample, neighbour, counter]
    places: FloatArray  # where four messages went, between 0 and 1, [sample, neighbour, message]
    repeated: bool  # whether the replaced user sent the very same tags twice
    reused: bool  # whether a key or seed was
    on_a_wire: bool  # whether reports have sizes

    @property
    def true(self) -> IntArray:
        """What the users did, [sample, neighbour, counter]."""
        return np.asarray(self.bench.counts[self.kinds].sum(axis=2))

    def noise(self, observer: str) -> FloatArray:
        """What an observer sees less true counts, in the order in which the batches were played: [batch, counter]."""
        residues: FloatArray = (self.seen[observer] - self.true).reshape(-1, self.bench.query.size)
        return residues

    def permutation(self, level: float) -> Finding:
        """Follow four messages: their order among themselves, and where the first one goes."""
        places = self.places.reshape(-1, 4)
        orders = np.unique(np.argsort(places, axis=1) @ [64, 16, 4, 1], return_counts=True)[1]
        orders = np.pad(orders, (0, math.factorial(4) - len(orders)))
        where = np.bincount((16 * places[:, 0]).astype(np.int64), minlength=16)
        p_value = bonferroni(*(chi_square(found, len(places) / len(found)) for found in (orders, where)))
        return judged("permutation", p_value, level, "All orders of a batch's messages are equally likely")
