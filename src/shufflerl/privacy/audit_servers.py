"""The test bench for noise by the servers: what the coordinator sees, what the shuffler sees, and what neither may.

As `audit` does for users' noise, it plays neighbouring batches through a system with its own randomness and holds what
an observer can tell about the replaced user against the claim. There are two seats. The coordinator has the released
tags, dummies among them, and its own noise; the shuffler has its own dummies and, by the policies that follow from it,
the noisy counts. From each the other's noise alone must protect, so every test of the noise is made twice.

>>> report = audit_servers(Budget(8.0, 1e-3), samples=150, level=1e-6)
>>> report.passed, report.epsilon_lower_bound < report.claimed_epsilon
(True, True)
"""

from __future__ import annotations

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats

from shufflerl import checks
from shufflerl.arrays import FloatArray, IntArray
from shufflerl.counts import CountQuery, Trajectories
from shufflerl.errors import ShuffleRLError
from shufflerl.mdp import Problem
from shufflerl.noise import DiscreteLaplace, PoissonNoise, TruncatedLaplace
from shufflerl.privacy import protocol
from shufflerl.privacy.accounting import Budget, privacy_loss
from shufflerl.privacy.audit import (
    CROWD,
    MIN_SAMPLES,
    PARTIAL_QUERIES,
    SMALL_PROBLEM,
    USERS,
    AuditReport,
    Bench,
    Finding,
    bonferroni,
    highest_rate,
    judged,
)
from shufflerl.privacy.mechanism import ServersNoise

Law = PoissonNoise | DiscreteLaplace | TruncatedLaplace

# Tests with a random outcome; each may raise a false alarm with this part of the level.
_RANDOM_TESTS = 14
_CELLS = 16
# Draws that are awaited of each partial query.
_PARTIAL_DRAWS = 400


@dataclass(frozen=True, eq=False)
class ServersTranscript:
    """One batch as an auditor sees it who has all keys.

    `reports`: the tags of every user; `dummies`: those that the shuffler added; `released`: the tags that the
    coordinator was given, in its order; `order`: which of all that were sent, reports first, each of them is;
    `estimates`: what a learner was given. On a wire also `sizes`, the bytes of every report.
    """

    reports: Sequence[IntArray]
    dummies: IntArray
    released: IntArray
    order: IntArray
    estimates: FloatArray
    sizes: Sequence[int] = ()


class ServersSession(NamedTuple):
    """The laws that were declared, dummies first, and how a batch is played."""

    laws: tuple[PoissonNoise | TruncatedLaplace, PoissonNoise | DiscreteLaplace]
    play: Callable[[Sequence[Trajectories]], ServersTranscript]


class ServersSystem(ABC):
    """What is audited; see `audit.System`."""

    path: str
    attacked: str
    epsilon: float
    samples: int
    problem: Problem

    @abstractmethod
    def begin(self, budget: Budget, users: int, query: CountQuery) -> AbstractContextManager[ServersSession]:
        """Batches of so many users who are asked for these counters, with noise for this budget."""

    def audit(
        self, budget: Budget, *, samples: int | None = None, users: int = USERS, level: float = 1e-3
    ) -> AuditReport:
        """Test from both seats that its releases are private."""
        return audit_servers(budget, samples=samples, users=users, level=level, system=self)


def _laws(budget: Budget, query: CountQuery) -> tuple[PoissonNoise | TruncatedLaplace, PoissonNoise | DiscreteLaplace]:
    mechanism = ServersNoise(budget)
    return mechanism.dummies(query), mechanism.own(query)


@dataclass(frozen=True)
class ServersInMemory(ServersSystem):
    """The protocol's functions and the calibration of their noise. Give others to audit those."""

    calibrate: Callable[
        [Budget, CountQuery], tuple[PoissonNoise | TruncatedLaplace, PoissonNoise | DiscreteLaplace]
    ] = _laws
    draw_dummies: Callable[[PoissonNoise | TruncatedLaplace, int], IntArray] = protocol.noise_counts
    draw_own: Callable[[PoissonNoise | DiscreteLaplace, int], IntArray] = protocol.noise_counts
    mix: Callable[[CountQuery, IntArray], IntArray] = protocol.mix

    path: str = "servers"
    attacked: str = "the protocol with noise by both servers, in memory"
    epsilon: float = 1.0
    samples: int = 1500
    problem: Problem = SMALL_PROBLEM

    @contextmanager
    def begin(self, budget: Budget, users: int, query: CountQuery) -> Iterator[ServersSession]:
        """See `ServersSystem`."""
        laws = self.calibrate(budget, query)

        def play(trajectories: Sequence[Trajectories]) -> ServersTranscript:
            reports = [query.tags(one)[0] for one in trajectories]
            dummies = np.repeat(np.arange(query.size), self.draw_dummies(laws[0], query.size))
            sent = np.concatenate([*reports, dummies])
            order = self.mix(query, sent)
            counts = np.bincount(sent[order], minlength=query.size) + self.draw_own(laws[1], query.size)
            estimates = counts.astype(np.float64) - laws[0].mean - laws[1].mean
            return ServersTranscript(reports, dummies, sent[order], order, estimates)

        yield ServersSession(laws, play)


def audit_servers(
    budget: Budget,
    *,
    samples: int | None = None,
    users: int = USERS,
    level: float = 1e-3,
    system: ServersSystem | None = None,
) -> AuditReport:
    """Test from both seats that a release is private; see `audit.audit`."""
    started = time.perf_counter()
    system = ServersInMemory() if system is None else system
    samples = checks.whole("samples", system.samples if samples is None else samples, least=MIN_SAMPLES)
    users = checks.whole("users", users, least=USERS)
    share = checks.real("level", level, above=0, below=1) / _RANDOM_TESTS
    bench = Bench(CountQuery.everything(system.problem))
    tests, bound = [bench.sensitivity()], 0.0
    with system.begin(budget, users, bench.query) as session:
        tests.append(_calibration(budget, session.laws, bench.changed))
        played = _play(bench, session, samples, users)
    if isinstance(played, str):
        tests.append(Finding("schema", False, None, f"{played} Nothing else was tested."))
    else:
        tests.append(
            Finding("schema", True, None, "A report is one tag of each family and step; none is lost or added.")
        )
        for seat, noise, law in played.seats:
            bound = max(bound, lower := _lowest_epsilon(played, noise, budget, share))
            tests += [
                Finding(
                    f"epsilon, {seat}",
                    lower <= budget.epsilon,
                    None,
                    f"The {seat}'s errors put epsilon above {lower:.3g} with confidence 1 - {share:.2g}; claimed is "
                    f"{budget.epsilon:g}.",
                ),
                _noise_law(seat, noise - played.true, law, share),
                _independence(seat, noise - played.true, law, share),
                _freshness(seat, noise - played.true, law, share),
            ]
        tests += [
            _apart(played, share),
            _permutation(played, share),
            _crowd(system, bench, budget, share),
            _partial_queries(system, budget, users, share),
        ]
    return AuditReport(
        path=system.path,
        attacked=system.attacked,
        users=users,
        claimed_epsilon=budget.epsilon,
        claimed_delta=budget.delta,
        epsilon_lower_bound=bound,
        refutable_epsilon=math.inf,
        visible_shortfall=math.inf,
        false_alarm_rate=level,
        samples=samples,
        seconds=time.perf_counter() - started,
        tests=tuple(tests),
    )


@dataclass(frozen=True, eq=False)
class _Played:
    """What the transcripts of both batches gave, axes [sample, neighbour, counter]."""

    bench: Bench
    laws: tuple[Law, Law]
    true: FloatArray
    opened: FloatArray  # what the coordinator counts, less the dummies that it expects
    estimates: FloatArray
    dummies: FloatArray
    places: FloatArray  # where two users' first family and step went, between 0 and 1

    @property
    def seats(self) -> tuple[tuple[str, FloatArray, Law], ...]:
        """Who looks, what each makes of the true counts, and the law of the noise on it."""
        known = self.dummies - self.laws[0].mean
        return ("coordinator", self.opened, self.laws[0]), ("shuffler", self.estimates - known, self.laws[1])


def _play(bench: Bench, session: ServersSession, samples: int, users: int) -> _Played | str:
    """Play all transcripts; where one breaks the rules, say how."""
    query, shape = bench.query, (samples, 2, bench.query.size)
    true, opened, estimates, dummies = (np.empty(shape) for _ in range(4))
    places = np.empty((samples, 2, 2))
    within, sizes = np.random.default_rng(), set[int]()
    for sample, side in itertools.product(range(samples), (0, 1)):
        kinds = bench.batch(sample, side, users)
        batch = _one(bench, session, kinds)
        if isinstance(batch, str):
            return batch
        sizes.update(batch.sizes)
        if len(sizes) > 1:
            return f"Reports have {min(sizes)} and {max(sizes)} bytes."
        true[sample, side] = bench.counts[kinds].sum(axis=0)
        opened[sample, side] = np.bincount(batch.released, minlength=query.size) - session.laws[0].mean
        dummies[sample, side] = np.bincount(batch.dummies, minlength=query.size)
        estimates[sample, side] = batch.estimates
        # Where the first family and step of two users went, the replaced one among them.
        where = np.argsort(batch.order)[[0, query.touched_counters]]
        places[sample, side] = (where + within.random(2)) / int((query.groups[batch.released] == 0).sum())
    return _Played(bench, session.laws, true, opened, estimates, dummies, places)


def _one(bench: Bench, session: ServersSession, kinds: IntArray) -> ServersTranscript | str:
    """One transcript; if it breaks the rules, how."""
    query = bench.query
    try:
        batch = session.play([bench.trajectories[kind] for kind in kinds])
    except ShuffleRLError as reason:
        return f"A batch could not be played: {reason}"
    return _malformed(batch, query) or batch


def _malformed(batch: ServersTranscript, query: CountQuery) -> str | None:
    for report in batch.reports:
        if report.shape != (query.touched_counters,) or (query.groups[report] != np.arange(len(report))).any():
            return "A report is not exactly one tag of each family and step, in their order."
    sent = np.bincount(np.concatenate([*batch.reports, batch.dummies]), minlength=query.size)
    whole = len(sent) == query.size and (np.bincount(batch.released, minlength=query.size) == sent).all()
    if not whole or (np.sort(batch.order) != np.arange(len(batch.released))).any():
        return "A batch is not its reports' tags and the dummies in another order."
    if (np.diff(query.groups[batch.released]) < 0).any():
        return "Tags of different families or steps are mixed with each other."
    if np.shape(batch.estimates) != (query.size,) or not np.isfinite(batch.estimates).all():
        return f"What a learner is given is not one number for each of {query.size} counters."
    return None


def _calibration(budget: Budget, laws: tuple[Law, Law], changed: int) -> Finding:
    """Each law alone within the budget: by the accountant, and, where a law ends, by what an end gives away."""
    deltas = [privacy_loss(law, changed).delta(budget.epsilon) for law in laws]
    # The neighbour cannot produce the least count on a counter that moves down, nor a greatest on one that moves up.
    given_away = [1 - math.prod((1 - end) ** (changed // 2) for end in _ends(law)) for law in laws]
    worst = max(*deltas, *given_away)
    return Finding(
        "calibration",
        worst <= budget.delta,
        None,
        f"Either server's noise alone has delta {worst:.3g} or less on {changed} changed counters at epsilon "
        f"{budget.epsilon:g}; claimed is {budget.delta:g}.",
    )


def _ends(law: Law) -> tuple[float, float]:
    """The probabilities of the least and of the greatest count there is; none of a law without end."""
    if isinstance(law, DiscreteLaplace):
        return 0.0, 0.0
    greatest = float(1 - law.cdf(law.shift - 1)) if isinstance(law, TruncatedLaplace) else 0.0
    return float(law.cdf(-law.mean)), greatest


def _lowest_epsilon(played: _Played, noise: FloatArray, budget: Budget, level: float) -> float:
    """The largest epsilon that an observer's errors refute, of several thresholds on the counters that moved.

    Privacy at (e, d) means 1 - misses <= exp(e) * false alarms + d for every test, and likewise with the two swapped.
    """
    direction, samples = played.bench.direction, len(noise)
    sums = (noise - played.true[:, :1]) @ direction
    changed = float(np.abs(direction).sum())
    thresholds = changed / 2 + float(sums.std()) * np.array([-1.5, -0.75, 0.0, 0.75, 1.5])
    found = 0.0
    for threshold in thresholds:
        errors = int((sums[:, 0] > threshold).sum()), int((sums[:, 1] <= threshold).sum())
        rates = [highest_rate(n, samples, level / 2 / len(thresholds)) for n in errors]
        for one, other in (rates, rates[::-1]):
            if 1 - one - budget.delta > other:
                found = max(found, math.log((1 - one - budget.delta) / other))
    return found


def _fit(residues: FloatArray, law: Law) -> float:
    """The p-value of a chi-square test, in cells of about equal probability, that these are of this law."""
    wanted = min(_CELLS, residues.size // 20)
    values = np.sort(np.rint(residues + law.mean).ravel()) - law.mean
    furthest = math.ceil(law.bound(0.1 / wanted)) + 1
    possible = np.arange(-furthest, furthest + 1) + round(law.mean) - law.mean
    cells = np.searchsorted(law.cdf(possible), np.arange(1, wanted) / wanted)
    ends = np.unique(possible[cells])
    if law.cdf(ends[-1]) > 1 - 0.5 / wanted:
        ends = ends[:-1]
    expected = np.diff(law.cdf(ends), prepend=0.0, append=1.0) * values.size
    observed = np.diff(np.searchsorted(values, ends, side="right"), prepend=0, append=values.size)
    return float(stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), max(1, len(ends))))


def _noise_law(seat: str, residues: FloatArray, law: Law, level: float) -> Finding:
    """On all counters together, and on every one by itself: its law, its mean, its spread."""
    rows = residues.reshape(-1, residues.shape[-1])
    scores = rows.sum(axis=0) / (law.sd * math.sqrt(len(rows)))
    spread = float((rows**2).sum() / law.variance)
    kurtosis = 2.0 if isinstance(law, PoissonNoise) else 5.0
    deviations = (spread - rows.size) / math.sqrt((kurtosis + 1 / law.variance) * rows.size)
    p_values = [_fit(rows, law), *(_fit(column, law) for column in rows.T)]
    p_values += [2 * float(stats.norm.sf(abs(score))) for score in (*scores, deviations)]
    return judged(
        f"noise law, {seat}", bonferroni(*p_values), level, f"What protects from the {seat} is {law}, as declared"
    )


def _independence(seat: str, residues: FloatArray, law: Law, level: float) -> Finding:
    """Shared noise would widen the sum over counters, a fixed total narrow it; half of the counters as well."""
    rows = residues.reshape(-1, residues.shape[-1])
    p_values = []
    for some in (rows, rows[:, ::2]):
        spread = float((some.sum(axis=1) ** 2).sum() / (some.shape[1] * law.variance))
        excess = (2.0 if isinstance(law, PoissonNoise) else 2 + 3 / some.shape[1]) + 1 / law.variance
        p_values.append(2 * float(stats.norm.sf(abs(spread - len(some)) / math.sqrt(excess * len(some)))))
    return judged(f"independence, {seat}", bonferroni(*p_values), level, "Noise on different counters is independent")


def _freshness(seat: str, residues: FloatArray, law: Law, level: float) -> Finding:
    """Noise of successive transcripts is uncorrelated, and none comes twice on all counters."""
    rows = residues.reshape(-1, residues.shape[-1])
    score = float((rows[1:] * rows[:-1]).sum() / (law.variance * math.sqrt((len(rows) - 1) * rows.shape[1])))
    # Two draws agree with the chance of the most probable value at most, two rows with its power.
    middle = np.arange(-3, 4) + round(law.mean) - law.mean
    agree = float(np.diff(law.cdf(np.append(middle[0] - 1, middle))).max()) ** rows.shape[1]
    repeats = len(rows) - len(np.unique(np.rint(rows + law.mean), axis=0))
    p_value = 1.0 if repeats == 0 else min(1.0, len(rows) ** 2 / 2 * agree)
    return judged(
        f"freshness, {seat}", bonferroni(p_value, 2 * float(stats.norm.sf(abs(score)))), level, "No noise is used again"
    )


def _apart(played: _Played, level: float) -> Finding:
    """The noise of one server tells nothing of the other's."""
    (_, first, one), (_, second, other) = played.seats
    products = ((first - played.true) * (second - played.true)).sum() / (one.sd * other.sd)
    p_value = 2 * float(stats.norm.sf(abs(products) / math.sqrt(played.true.size)))
    return judged("two servers", p_value, level, "The servers' noises have nothing to do with each other")


def _permutation(played: _Played, level: float) -> Finding:
    """Follow the first and the last message: where they go, and which of them is before the other."""
    places = played.places.reshape(-1, 2)
    cells = [np.bincount((8 * places[:, i]).astype(np.int64), minlength=8) for i in (0, 1)]
    p_values = [float(stats.chisquare(found).pvalue) for found in cells]
    p_values.append(float(stats.binomtest(int((places[:, 0] < places[:, 1]).sum()), len(places)).pvalue))
    return judged(
        "permutation", bonferroni(*p_values), level, "All orders of the messages of a group are equally likely"
    )


def _crowd(system: ServersSystem, bench: Bench, budget: Budget, level: float) -> Finding:
    """A large batch has as much noise as a small one, on either seat."""
    with system.begin(budget, CROWD, bench.query) as session:
        p_value = _whole_noise(bench, session, [bench.batch(0, 0, CROWD)])
    if isinstance(p_value, str):
        return Finding("crowd", False, None, p_value)
    return judged("crowd", p_value, level, f"With {CROWD:,} users there is as much noise")


def _partial_queries(system: ServersSystem, budget: Budget, users: int, level: float) -> Finding:
    """The noise where some steps alone are asked for: calibrated to these, and on every counter as much as declared."""
    p_values = []
    for query in PARTIAL_QUERIES:
        bench = Bench(query)
        with system.begin(budget, users, query) as session:
            if not (fixed := _calibration(budget, session.laws, bench.changed)).passed:
                return Finding("partial queries", False, None, fixed.explanation)
            transcripts = math.ceil(_PARTIAL_DRAWS / query.size)
            p_value = _whole_noise(bench, session, [bench.batch(n, n % 2, users) for n in range(transcripts)])
        if isinstance(p_value, str):
            return Finding("partial queries", False, None, p_value)
        p_values.append(p_value)
    return judged(
        "partial queries",
        bonferroni(*p_values),
        level,
        f"All noise is there in {len(PARTIAL_QUERIES)} queries for some steps",
    )


def _whole_noise(bench: Bench, session: ServersSession, batches: list[IntArray]) -> float | str:
    """The p-value that the noise of these batches has its declared mean and spread, on both seats."""
    residues: tuple[list[FloatArray], list[FloatArray]] = ([], [])
    for kinds in batches:
        batch = _one(bench, session, kinds)
        if isinstance(batch, str):
            return batch
        true = bench.counts[kinds].sum(axis=0)
        size = bench.query.size
        residues[0].append(np.bincount(batch.released, minlength=size) - session.laws[0].mean - true)
        known = np.bincount(batch.dummies, minlength=size) - session.laws[0].mean
        residues[1].append(batch.estimates - known - true)
    p_values = []
    for law, rows in zip(session.laws, residues, strict=True):
        draws = np.concatenate(rows)
        p_values.append(2 * float(stats.norm.sf(abs(draws.sum()) / (law.sd * math.sqrt(draws.size)))))
        empirical = np.searchsorted(np.sort(draws), draws, side="right") / draws.size
        furthest = float(np.abs(empirical - law.cdf(draws)).max())
        p_values.append(min(1.0, 2 * math.exp(-2 * draws.size * furthest**2)))
    return bonferroni(*p_values)
