"""Systems in which every user adds its share of the noise to its report, and the protocol in memory as one of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from scipy import special, stats

from shufflerl.arrays import FloatArray, IntArray
from shufflerl.counts import CountQuery, Trajectories
from shufflerl.mdp import Problem
from shufflerl.noise import PoissonNoise
from shufflerl.privacy import accounting, protocol
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.audit.bench import SMALL_PROBLEM, Law, Played, Session, System, Transcript
from shufflerl.privacy.audit.report import Finding, judged
from shufflerl.privacy.audit.statistics import bonferroni, cells, fit, mean_fit, two_sided, visible_shortfall
from shufflerl.privacy.protocol import Protocol


@dataclass(frozen=True, eq=False, kw_only=True)
class UsersSession(Session):
    """What users agree on, with the noise as it was declared: it protects from everybody."""

    protocol: Protocol

    rules: ClassVar[str] = "Every message is one tag, reports are sorted"

    @property
    def laws(self) -> Mapping[str, Law]:
        """See `Session`."""
        return {"": self.protocol.noise}

    def claimed(self, budget: Budget, changed: int) -> Mapping[str, Law]:
        """See `Session`."""
        return {"": accounting.calibrate(budget, changed)}

    def seen(self, batch: Transcript) -> Mapping[str, FloatArray]:
        """See `Session`."""
        return {"": batch.estimates}

    def counted(self, batch: Transcript) -> list[tuple[Law, FloatArray]]:
        """See `Session`; who subtracts less than was declared may hide that less was sent, so this is counted too."""
        sent = np.bincount(batch.released, minlength=self.query.size).astype(np.float64)
        return [*super().counted(batch), (self.protocol.noise, sent - self.protocol.noise.mean)]

    def malformed(self, batch: Transcript) -> str | None:
        """See `Session`."""
        for name, messages in (*(("report", report) for report in batch.reports), ("batch", batch.released)):
            if problem := _no_tags(messages, self.query.size):
                return f"A {name} {problem}"
        if any((report[1:] < report[:-1]).any() for report in batch.reports):
            return "A report is not sorted: its order may tell true tags from noise."
        return None

    def shortfall(self, samples: int, level: float) -> float:
        """See `Session`."""
        return visible_shortfall(2 * samples * self.query.size * self.protocol.noise.mean, level)

    @property
    def _share(self) -> float:
        """Noise tags of a user on a counter, by what was declared, not by what users make of it."""
        return self.protocol.noise.mean / self.users

    def tests(self, played: Played, level: float) -> Finding:
        """Noise tags of a report: law, mean overall, by user and trajectory, and whether opposite trajectories differ.

        `visible_shortfall` knows that these are five.
        """
        law = PoissonNoise(self.query.size * self._share)
        extra = played.lengths.astype(np.float64) - self.query.touched_counters - law.mean
        overall = two_sided(extra.sum() / (math.sqrt(extra.size) * law.sd))
        users = np.broadcast_to(np.arange(self.users), extra.shape)
        by_user, by_trajectory = (mean_fit(extra, law.variance, groups) for groups in (users, played.kinds))
        replaced = np.stack([cells(extra[:, side, 0], law)[0] for side in (0, 1)])
        filled = replaced.sum(axis=0) > 0
        opposite = stats.chi2_contingency(replaced[:, filled])[1] if filled.sum() > 1 else 1.0
        p_value = bonferroni(fit(extra, law), overall, by_user, by_trajectory, opposite)
        sends = f"A user sends {self.query.touched_counters} + Poisson({law.mean:.5g}) tags, whatever its trajectory"
        return judged("message counts", p_value, level, sends)

    def repeats(self, played: Played) -> float:
        """Two Poisson(r) counts agree with probability exp(-2r) I_0(2r), two reports with its C-th power."""
        agree = float(special.i0e(2 * self._share)) ** self.query.size
        return min(1.0, len(played.kinds) ** 2 * agree) if played.repeated else 1.0


def _no_tags(messages: Any, size: int) -> str | None:
    if not isinstance(messages, np.ndarray) or messages.ndim != 1 or not np.issubdtype(messages.dtype, np.integer):
        return "is not a row of tags: some message is more than the number of one counter."
    if messages.dtype != np.int64:
        return f"has type {messages.dtype}, not int64: how tags are written may tell what they are."
    if messages.size and not 0 <= messages.min() <= messages.max() < size:
        return "holds a message that is not the tag of a counter."
    return None


@dataclass(frozen=True)
class InMemory(System):
    """The protocol's three functions and the calibration of their noise. Give others to audit those."""

    randomize: Callable[[Protocol, Trajectories], IntArray] = protocol.randomize
    shuffle: Callable[[Sequence[IntArray]], IntArray] = protocol.shuffle
    analyze: Callable[[Protocol, IntArray, int], FloatArray] = protocol.analyze
    calibrate: Callable[[Budget, int], PoissonNoise] = accounting.calibrate

    path: str = "protocol"
    attacked: str = "the protocol's randomizer, shuffler and analyzer in memory"
    epsilon: float = 1.0
    samples: int = 4000
    problem: Problem = SMALL_PROBLEM

    @contextmanager
    def begin(self, budget: Budget, users: int, query: CountQuery) -> Iterator[UsersSession]:
        """See `System`."""
        agreed = Protocol(query, users, self.calibrate(budget, query.changed_counters))

        def play(trajectories: Sequence[Trajectories]) -> Transcript:
            reports = [self.randomize(agreed, one) for one in trajectories]
            released = self.shuffle(reports)
            # Tags of one counter cannot be told apart, so it is numbers in their place that are followed.
            ends = np.cumsum([len(report) for report in reports])
            order = self.shuffle(np.split(np.arange(ends[-1]), ends[:-1]))
            return Transcript(reports, released, order, self.analyze(agreed, released, users))

        yield UsersSession(query, users, play, protocol=agreed)
