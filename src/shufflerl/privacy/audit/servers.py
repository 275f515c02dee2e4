"""Systems in which both servers add the noise, and the protocol in memory as one of them.

There are two observers. The coordinator has the released tags, dummies among them, and its own noise: what protects
from it are the shuffler's dummies. The shuffler has its dummies and, by the policies that follow from them, the noisy
counts: what protects from it is the coordinator's noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np

from shufflerl.arrays import FloatArray, IntArray
from shufflerl.counts import CountQuery, Trajectories
from shufflerl.mdp import Problem
from shufflerl.noise import DiscreteLaplace, PoissonNoise, TruncatedLaplace
from shufflerl.privacy import accounting, protocol
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.audit.bench import SMALL_PROBLEM, Law, Played, Session, System, Transcript
from shufflerl.privacy.audit.report import Finding, judged
from shufflerl.privacy.audit.statistics import two_sided
from shufflerl.privacy.mechanism import ServersNoise

DummiesLaw: TypeAlias = PoissonNoise | TruncatedLaplace
OwnLaw: TypeAlias = PoissonNoise | DiscreteLaplace


@dataclass(frozen=True, eq=False, kw_only=True)
class ServersSession(Session):
    """The noise that each server was declared to add."""

    dummies: DummiesLaw
    own: OwnLaw

    rules: ClassVar[str] = "A report is one tag of each family and step, which are mixed by themselves"

    @property
    def laws(self) -> Mapping[str, Law]:
        """See `Session`."""
        return {"coordinator": self.dummies, "shuffler": self.own}

    def claimed(self, budget: Budget, changed: int) -> Mapping[str, Law]:
        """See `Session`."""
        dummies = accounting.calibrate_dummies(budget, changed)
        return {"coordinator": dummies, "shuffler": accounting.uncut(dummies)}

    def seen(self, batch: Transcript) -> Mapping[str, FloatArray]:
        """See `Session`."""
        opened, added = (np.bincount(tags, minlength=self.query.size) for tags in (batch.released, batch.dummies))
        return {
            "coordinator": opened - self.dummies.mean,
            "shuffler": batch.estimates - (added - self.dummies.mean),
        }

    def malformed(self, batch: Transcript) -> str | None:
        """See `Session`."""
        groups, touched = self.query.groups, self.query.touched_counters
        for report in batch.reports:
            if report.shape != (touched,) or (groups[report] != np.arange(touched)).any():
                return "A report is not exactly one tag of each family and step, in their order."
        if (np.diff(groups[batch.released]) < 0).any():
            return "Tags of different families or steps are mixed with each other."
        opened = np.bincount(batch.released, minlength=self.query.size)
        if (np.abs(batch.estimates + self.dummies.mean + self.own.mean - opened - batch.own) > 1e-6).any():
            return "What a learner is given is not what was opened with the noise that the coordinator drew for it."
        return None

    def followed(self, batch: Transcript) -> tuple[list[int], int]:
        """Four users' first tags, mixed with their group; where sums are released, their vectors."""
        if len(batch.order) == len(batch.reports):
            return super().followed(batch)
        users = (0, 1, self.users - 2, self.users - 1)
        touched = self.query.touched_counters
        return [user * touched for user in users], int((self.query.groups[batch.released] == 0).sum())

    def tests(self, played: Played, level: float) -> Finding:
        """The noise of one server tells nothing of the other's."""
        (one, other), laws = (played.noise(observer) for observer in self.laws), list(self.laws.values())
        score = float((one * other).sum() / (laws[0].sd * laws[1].sd * math.sqrt(one.size)))
        statement = "The servers' noises have nothing to do with each other"
        return judged("two servers", two_sided(score), level, statement)


def _laws(budget: Budget, query: CountQuery) -> tuple[DummiesLaw, OwnLaw]:
    mechanism = ServersNoise(budget)
    return mechanism.dummies(query), mechanism.own(query)


@dataclass(frozen=True)
class ServersInMemory(System):
    """The protocol's functions and the calibration of their noise. Give others to audit those."""

    calibrate: Callable[[Budget, CountQuery], tuple[DummiesLaw, OwnLaw]] = _laws
    draw_dummies: Callable[[DummiesLaw, int], IntArray] = protocol.noise_counts
    draw_own: Callable[[OwnLaw, int], IntArray] = protocol.noise_counts
    mix: Callable[[CountQuery, IntArray], IntArray] = protocol.mix

    path: str = "servers"
    attacked: str = "the protocol with noise by both servers, in memory"
    epsilon: float = 1.0
    samples: int = 1500
    problem: Problem = SMALL_PROBLEM

    @contextmanager
    def begin(self, budget: Budget, users: int, query: CountQuery) -> Iterator[ServersSession]:
        """See `System`."""
        dummies_law, own_law = self.calibrate(budget, query)

        def play(trajectories: Sequence[Trajectories]) -> Transcript:
            reports = [query.tags(one)[0] for one in trajectories]
            dummies = np.repeat(np.arange(query.size), self.draw_dummies(dummies_law, query.size))
            sent = np.concatenate([*reports, dummies])
            order, own = self.mix(query, sent), self.draw_own(own_law, query.size)
            counts = np.bincount(sent[order], minlength=query.size) + own
            estimates = counts.astype(np.float64) - dummies_law.mean - own_law.mean
            return Transcript(
                reports=reports,
                released=sent[order],
                order=order,
                estimates=estimates,
                dummies=dummies,
                own=own,
            )

        yield ServersSession(query, users, play, dummies=dummies_law, own=own_law)
