"""A test bench for the privacy claim: plays neighbouring batches through a system and looks for a leak.

Nothing here is simulated and nothing can be seeded: users' reports come from the system's own randomizer with the
operating system's randomness, are mixed by its shuffler and counted by its analyzer. Two batches differ in one user's
whole trajectory, so that every counter that can change does. What an observer who knows everybody else can tell about
that user is measured and held against the claim; the noise, the messages and their order are held against their
declared laws. Most batches ask for every counter; some ask for fewer, as learners do, and must have all their noise.

What is attacked is a `System`. `InMemory` is the protocol alone, its three functions; `shufflerl.network.audit` has the
networked system, from nodes to coordinator.

An audit finds faults; it proves no privacy. That is the accountant's part, and what it assumes is what is tested here.

>>> report = audit(Budget(8.0, 1e-3), samples=100, level=1e-6)
>>> report.passed, report.epsilon_lower_bound < report.claimed_epsilon
(True, True)
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy import special, stats

from shufflerl import checks
from shufflerl.arrays import FloatArray, IntArray
from shufflerl.counts import CountQuery, Trajectories
from shufflerl.errors import ShuffleRLError
from shufflerl.mdp import Problem
from shufflerl.noise import BinomialNoise, GaussianNoise, PoissonNoise
from shufflerl.privacy import accounting, protocol
from shufflerl.privacy.accounting import Budget, PrivacyLoss, calibrate_gaussian, privacy_loss
from shufflerl.privacy.protocol import Protocol

#: Fewer transcripts than this of either batch, and the laws of the test statistics would be too far from their limits.
MIN_SAMPLES = 100
#: Users of a batch unless told otherwise, and the fewest: one is replaced, the others stand by.
USERS = 4
#: Users of the one large batch that is played, as the noise on a counter must not depend on their number.
CROWD = 1000

# Tests with a random outcome; each may raise a false alarm with this part of the level.
_RANDOM_TESTS = 10
_CELLS = 32
SMALL_PROBLEM = Problem(horizon=2, n_states=2, n_actions=2, episodes=1)
# Queries for some steps alone: of transitions, of rewards, of both, and for one family alone.
_THREE_STEPS = Problem(horizon=3, n_states=2, n_actions=1, episodes=1)
PARTIAL_QUERIES = [
    CountQuery(_THREE_STEPS, transitions, rewards)
    for transitions, rewards in [((1,), (0, 1, 2)), ((0, 1), (0, 2)), ((0,), (2,)), ((0, 1), ()), ((), (0, 1, 2))]
]
# Noise tags that are awaited of each: where half of them is missing, that is ten deviations.
_PARTIAL_NOISE = 400


@dataclass(frozen=True, eq=False)
class Transcript:
    """One batch as an auditor sees it who has all keys.

    `reports`: the messages of every user, in the order in which they were sent; `released`: the messages the analyzer
    was given, in its order; `order`: which of all that were sent each of them is; `estimates`: what a learner was
    given. On a wire also `sizes`, the bytes of every report, and `once`, keys and seeds that must not be used again.
    """

    reports: Sequence[IntArray]
    released: IntArray
    order: IntArray
    estimates: FloatArray
    sizes: Sequence[int] = ()
    once: Sequence[bytes] = ()


class Session(NamedTuple):
    """What the users of every batch agree on, with the noise as it was declared, and how a batch of them is played."""

    protocol: Protocol
    play: Callable[[Sequence[Trajectories]], Transcript]


class System(ABC):
    """What is audited. `path` names it, `attacked` says what is played; `padding` is the message that names no counter.

    An audit that is told nothing else takes its `epsilon` and `samples`: what fits into a quarter of a minute. Most is
    played on its `problem`, whose every counter is asked for.
    """

    path: str
    attacked: str
    epsilon: float
    samples: int
    problem: Problem
    padding: int | None = None

    @abstractmethod
    def begin(self, budget: Budget, users: int, query: CountQuery) -> AbstractContextManager[Session]:
        """Batches of so many users who are asked for these counters, with noise for this budget."""

    def audit(
        self, budget: Budget, *, samples: int | None = None, users: int = USERS, level: float = 1e-3
    ) -> AuditReport:
        """Test the claim that its releases are private; see the function of this name."""
        return audit(budget, samples=samples, users=users, level=level, system=self)


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
    def begin(self, budget: Budget, users: int, query: CountQuery) -> Iterator[Session]:
        """See `System`."""
        agreed = Protocol(query, users, self.calibrate(budget, query.changed_counters))

        def play(trajectories: Sequence[Trajectories]) -> Transcript:
            reports = [self.randomize(agreed, one) for one in trajectories]
            released = self.shuffle(reports)
            # Tags of one counter cannot be told apart, so it is numbers in their place that are followed.
            ends = np.cumsum([len(report) for report in reports])
            order = self.shuffle(np.split(np.arange(ends[-1]), ends[:-1]))
            return Transcript(reports, released, order, self.analyze(agreed, released, users))

        yield Session(agreed, play)


@dataclass(frozen=True)
class Finding:
    """What one test found; `p_value` is None where no chance is involved or a confidence bound decides."""

    name: str
    passed: bool
    p_value: float | None
    explanation: str


@dataclass(frozen=True)
class AuditReport:
    """The claim, the largest epsilon the transcripts refute, and what each test found.

    `false_alarm_rate` bounds the probability that a sound system does not pass. `refutable_epsilon` says how much the
    audit could see: nine of ten audits of so many samples refute the claim where the true epsilon is above it. It is
    infinite if they are too few to refute anything. `visible_shortfall` is the share of the noise that as many find
    missing if users leave it out of their reports.
    """

    path: str
    attacked: str
    users: int
    claimed_epsilon: float
    claimed_delta: float
    epsilon_lower_bound: float
    refutable_epsilon: float
    visible_shortfall: float
    false_alarm_rate: float
    samples: int
    seconds: float
    tests: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether every test passed."""
        return all(finding.passed for finding in self.tests)

    @property
    def failures(self) -> tuple[str, ...]:
        """Names of the tests that failed."""
        return tuple(finding.name for finding in self.tests if not finding.passed)

    def as_dict(self) -> dict[str, Any]:
        """The report in a form that JSON can hold."""
        return {
            "path": self.path,
            "attacked": self.attacked,
            "users": self.users,
            "claimed_epsilon": self.claimed_epsilon,
            "delta": self.claimed_delta,
            "epsilon_lower_bound": self.epsilon_lower_bound,
            "refutable_epsilon": self.refutable_epsilon if math.isfinite(self.refutable_epsilon) else None,
            "visible_shortfall": self.visible_shortfall if math.isfinite(self.visible_shortfall) else None,
            "false_alarm_rate": self.false_alarm_rate,
            "passed": self.passed,
            "samples": self.samples,
            "seconds": self.seconds,
            "tests": [asdict(finding) for finding in self.tests],
        }

    def __str__(self) -> str:
        seen = [f"a true epsilon above about {self.refutable_epsilon:.3g}"] * math.isfinite(self.refutable_epsilon)
        seen += [f"noise that is {self.visible_shortfall:.1%} short"] * math.isfinite(self.visible_shortfall)
        power = (
            f"So many would have found {' and '.join(seen)}, nine times in ten."
            if seen
            else "They could not have found anything else."
        )
        width = max(len(finding.name) for finding in self.tests)
        return "\n".join(
            [
                f"Audit {'passed' if self.passed else 'FAILED: ' + ', '.join(self.failures)}",
                f"Attacked: path {self.path}, {self.attacked}.",
                f"Claimed: epsilon {self.claimed_epsilon:g} at delta {self.claimed_delta:g}. "
                f"Measured: epsilon at least {self.epsilon_lower_bound:.3g}.",
                *(
                    f"  {'pass' if finding.passed else 'FAIL'}  {finding.name:{width}}  {finding.explanation}"
                    for finding in self.tests
                ),
                f"{self.samples} transcripts of each of two neighbouring batches of {self.users} users in "
                f"{self.seconds:.1f} s; a sound system fails with probability at most {self.false_alarm_rate:g}.",
                power,
            ]
        )


def audit(
    budget: Budget,
    *,
    samples: int | None = None,
    users: int = USERS,
    level: float = 1e-3,
    system: System | None = None,
) -> AuditReport:
    """Test the claim that a release calibrated to the budget is private, on `samples` transcripts of either batch.

    `level` is the false-alarm rate of all tests together. Time grows with the samples and, like the number of noise
    messages, as 1/epsilon^2. To audit another implementation than ours, give it as `system`.
    """
    started = time.perf_counter()
    system = InMemory() if system is None else system
    samples = checks.whole("samples", system.samples if samples is None else samples, least=MIN_SAMPLES)
    users = checks.whole("users", users, least=USERS)
    level = checks.real("level", level, above=0, below=1)
    share = level / _RANDOM_TESTS

    bench = Bench(CountQuery.everything(system.problem))
    bound, refutable, shortfall = 0.0, math.inf, math.inf
    with system.begin(budget, users, bench.query) as session:
        tests = [bench.sensitivity(), _calibration(budget, session.protocol.noise, bench.changed)]
        played = _play(bench, session, system.padding, samples)
    if isinstance(played, str):
        tests.append(Finding("schema", False, None, f"{played} Nothing else was tested."))
    else:
        with system.begin(budget, CROWD, bench.query) as session:
            crowd = _crowd(bench, session, system.padding, share)
        claimed = privacy_loss(accounting.calibrate(budget, bench.changed), bench.changed)
        bound, finding = _epsilon(played, budget, share)
        refutable = refutable_epsilon(samples, budget, share)
        shortfall = visible_shortfall(2 * samples * bench.query.size * played.mean, share)
        tests += [
            Finding("schema", True, None, _SCHEMA + (" All reports are equally long." if played.on_a_wire else "")),
            _permutation(played, share),
            finding,
            _curve(played, claimed, budget, share),
            _noise_law(played, share),
            crowd,
            _partial_queries(system, budget, users, share),
            _independence(played, share),
            _message_counts(played, share),
            _unbiasedness(played, share),
            _freshness(played, share),
        ]
    return AuditReport(
        path=system.path,
        attacked=system.attacked,
        users=users,
        claimed_epsilon=budget.epsilon,
        claimed_delta=budget.delta,
        epsilon_lower_bound=bound,
        refutable_epsilon=refutable,
        visible_shortfall=shortfall,
        false_alarm_rate=level,
        samples=samples,
        seconds=time.perf_counter() - started,
        tests=tuple(tests),
    )


_SCHEMA = "Every message is one tag, reports are sorted, batches lose and add none."


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


@dataclass(frozen=True, eq=False)
class _Played:
    """What the transcripts of both batches gave, axes [sample, neighbour, ...]."""

    bench: Bench
    protocol: Protocol
    trajectories: IntArray  # [sample, neighbour, user]
    true: IntArray  # what the users did, [sample, neighbour, counter]
    lengths: IntArray  # tags of each report, [sample, neighbour, user]
    estimates: FloatArray  # what the analyzer gave, [sample, neighbour, counter]
    places: FloatArray  # where four messages went, between 0 and 1, [sample, neighbour, message]
    repeated: bool  # whether the replaced user sent the very same tags twice
    reused: bool  # whether a key or seed was
    on_a_wire: bool  # whether reports have sizes

    @property
    def noise(self) -> FloatArray:
        """Estimates less true counts, in the order in which the transcripts were played: [transcript, counter]."""
        residues: FloatArray = (self.estimates - self.true).reshape(-1, self.true.shape[-1])
        return residues

    @property
    def mean(self) -> float:
        """Mean and variance of the noise tags on a counter."""
        return self.protocol.noise.variance

    def error_rates(self, quantile: float) -> tuple[int, int]:
        """How often an observer errs who calls the replaced user by a fixed threshold, on either batch.

        The observer knows the others and adds up the counters in the direction of the change: this sum is about 0 on
        the first batch and the number of changed counters on the second. The threshold lies `quantile` deviations
        beyond the middle, between two values the sum can take.
        """
        sums = (self.estimates - self.true[:, :1]) @ self.bench.direction
        changed = int(np.abs(self.bench.direction).sum())
        threshold = math.floor(changed / 2 + quantile * math.sqrt(changed * self.mean)) + 0.5
        return int((sums[:, 0] > threshold).sum()), int((sums[:, 1] < threshold).sum())


def _play(bench: Bench, session: Session, padding: int | None, samples: int) -> _Played | str:
    """Play all transcripts; where one breaks the rules, say how."""
    users, size = session.protocol.users, bench.query.size
    batches = [[bench.batch(sample, side, users) for side in (0, 1)] for sample in range(samples)]
    trajectories = np.array(batches)
    lengths = np.empty((samples, 2, users), dtype=np.int64)
    true = np.empty((samples, 2, size), dtype=np.int64)
    estimates = np.empty((samples, 2, size))
    places = np.empty((samples, 2, 4))
    within = np.random.default_rng()
    seen, sizes, once, keys = set(), set[int](), set[bytes](), 0
    for sample, side in itertools.product(range(samples), (0, 1)):
        batch = _one(bench, session, padding, trajectories[sample, side])
        if isinstance(batch, str):
            return batch
        sizes.update(batch.sizes)
        if len(sizes) > 1:
            return f"Reports have {min(sizes)} and {max(sizes)} bytes: their length may tell how much noise is in them."
        once.update(batch.once)
        keys += len(batch.once)
        true[sample, side] = bench.counts[trajectories[sample, side]].sum(axis=0)
        lengths[sample, side] = [len(report) for report in batch.reports]
        estimates[sample, side] = batch.estimates
        # The first two messages that were sent, and the last two; a place is a random point of its interval.
        where = np.argsort(batch.order)[[0, 1, -2, -1]]
        places[sample, side] = (where + within.random(4)) / len(batch.order)
        seen.add((side, hashlib.blake2b(batch.reports[0].tobytes(), digest_size=16).digest()))
    repeated, reused = len(seen) < 2 * samples, len(once) < keys
    return _Played(
        bench, session.protocol, trajectories, true, lengths, estimates, places, repeated, reused, bool(sizes)
    )


def _one(bench: Bench, session: Session, padding: int | None, kinds: IntArray) -> Transcript | str:
    """One transcript without its padding; if it breaks the rules, how."""
    try:
        batch = session.play([bench.trajectories[kind] for kind in kinds])
    except ShuffleRLError as reason:
        return f"A batch could not be played: {reason}"
    if padding is not None:
        reports = [report[report != padding] for report in batch.reports]
        batch = replace(batch, reports=reports, released=batch.released[batch.released != padding])
    if len(set(batch.once)) < len(batch.once):
        return "A key or seed is used twice in one batch."
    return _malformed(batch, bench.query.size) or batch


def _malformed(batch: Transcript, size: int) -> str | None:
    reports, released, order = batch.reports, batch.released, batch.order
    for name, messages in (*(("report", report) for report in reports), ("batch", released)):
        if problem := _no_tags(messages, size):
            return f"A {name} {problem}"
    if any((report[1:] < report[:-1]).any() for report in reports):
        return "A report is not sorted: its order may tell true tags from noise."
    sent = np.bincount(np.concatenate(reports), minlength=size)
    if (np.bincount(released, minlength=size) != sent).any() or (np.sort(order) != np.arange(len(order))).any():
        return "A batch is not its reports' messages in another order."
    if np.shape(batch.estimates) != (size,) or not np.isfinite(batch.estimates).all():
        return f"The analyzer did not give one number for each of {size} counters."
    return None


def _no_tags(messages: Any, size: int) -> str | None:
    if not isinstance(messages, np.ndarray) or messages.ndim != 1 or not np.issubdtype(messages.dtype, np.integer):
        return "is not a row of tags: some message is more than the number of one counter."
    if messages.dtype != np.int64:
        return f"has type {messages.dtype}, not int64: how tags are written may tell what they are."
    if messages.size and not 0 <= messages.min() <= messages.max() < size:
        return "holds a message that is not the tag of a counter."
    return None


def _calibration(budget: Budget, noise: PoissonNoise | BinomialNoise, changed: int) -> Finding:
    delta = privacy_loss(noise, changed).delta(budget.epsilon)
    return Finding(
        "calibration",
        delta <= budget.delta,
        None,
        f"Noise of mean {noise.mean:.5g} on {changed} changed counters has delta {delta:.3g} at epsilon "
        f"{budget.epsilon:g}; claimed is {budget.delta:g}.",
    )


def _epsilon(played: _Played, budget: Budget, level: float) -> tuple[float, Finding]:
    """A lower bound on epsilon: what a Gaussian mechanism must spend to let an observer err so rarely."""
    samples = len(played.estimates)
    mu = _lowest_mu(*played.error_rates(0.0), samples, level)
    bound = _gaussian_epsilon(mu, budget.delta)
    return bound, Finding(
        "epsilon",
        bound <= budget.epsilon,
        None,
        f"An observer's errors put epsilon above {bound:.3g} with confidence 1 - {level:.2g}, mu above {mu:.3g} "
        f"(Clopper-Pearson, Gaussian DP); claimed is {budget.epsilon:g}.",
    )


def refutable_epsilon(samples: int, budget: Budget, level: float) -> float:
    """The least epsilon of a Gaussian mechanism that `_epsilon` finds above the budget in nine of ten audits."""
    claimed = math.sqrt(2) / calibrate_gaussian(budget, 2).sd
    # The most errors of either kind that still refute the claim: the bound falls in their number.
    most = bisect.bisect_left(range(samples), True, key=lambda n: _lowest_mu(n, n, samples, level) <= claimed) - 1
    if most < 0:
        return math.inf
    # At this rate either kind of error stays within that number with probability 0.95.
    return _gaussian_epsilon(-2 * float(special.ndtri(highest_rate(most, samples, 0.95))), budget.delta)


def visible_shortfall(noise_tags: float, level: float) -> float:
    """The share of so many noise tags, on average, that `_message_counts` misses in nine of ten audits."""
    found = stats.norm.isf(level / 2 / 5) + stats.norm.isf(0.1)  # the mean overall is one of five tests
    return float(found / math.sqrt(noise_tags))


def _lowest_mu(false_alarms: int, misses: int, samples: int, level: float) -> float:
    """The mu that so many errors show a Gaussian mechanism to have at least, with confidence 1 - level."""
    rates = (highest_rate(errors, samples, level / 2) for errors in (false_alarms, misses))
    return max(0.0, -sum(float(special.ndtri(rate)) for rate in rates))


def _gaussian_epsilon(mu: float, delta: float) -> float:
    return 0.0 if mu == 0 else privacy_loss(GaussianNoise(math.sqrt(2) / mu), 2).epsilon(delta)


def _curve(played: _Played, claimed: PrivacyLoss, budget: Budget, level: float) -> Finding:
    """Hold the error rates against every (epsilon, delta) the claimed noise has: true whatever the law of the noise.

    Privacy at (e, d) means 1 - misses <= exp(e) * false_alarms + d for every test, and likewise with the two swapped.
    """
    samples, quantiles = len(played.estimates), (-1.5, 0.0, 1.5)
    grid = np.linspace(0.0, 2 * budget.epsilon, 41)
    deltas = np.array([claimed.delta(epsilon) for epsilon in grid])
    excess = -math.inf
    for quantile in quantiles:
        rates = [highest_rate(n, samples, level / 2 / len(quantiles)) for n in played.error_rates(quantile)]
        for one, other in (rates, reversed(rates)):
            excess = max(excess, float((1 - one - np.exp(grid) * other - deltas).max()))
    return Finding(
        "privacy curve",
        excess <= 0,
        None,
        f"At three thresholds an observer's success is {abs(excess):.3g} "
        f"{'above what a' if excess > 0 else 'below what every'} claimed (epsilon, delta) allows, with confidence "
        f"1 - {level:.2g}.",
    )


def _permutation(played: _Played, level: float) -> Finding:
    """Follow the first two and the last two messages: their order among themselves, and where the first one goes."""
    places = played.places.reshape(-1, 4)
    orders = np.unique(np.argsort(places, axis=1) @ [64, 16, 4, 1], return_counts=True)[1]
    orders = np.pad(orders, (0, math.factorial(4) - len(orders)))
    where = np.bincount((16 * places[:, 0]).astype(np.int64), minlength=16)
    p_value = bonferroni(*(chi_square(found, len(places) / len(found)) for found in (orders, where)))
    return judged("permutation", p_value, level, "All orders of a batch's messages are equally likely")


def _noise_law(played: _Played, level: float) -> Finding:
    p_value = _poisson_fit(played.noise + played.mean, played.mean)
    return judged("noise law", p_value, level, f"Noise on a counter is Poisson of mean {played.mean:.5g}, as declared")


def _crowd(bench: Bench, session: Session, padding: int | None, level: float) -> Finding:
    """The noise tags of a large batch, all counters together: a Poisson count."""
    batch = _one(bench, session, padding, bench.batch(0, 0, CROWD))
    if isinstance(batch, str):
        return Finding("crowd", False, None, batch)
    found = len(batch.released) - CROWD * bench.query.touched_counters
    law = stats.poisson(bench.query.size * session.protocol.noise.mean)
    p_value = min(1.0, 2 * float(min(law.cdf(found), law.sf(found - 1))))
    return judged(
        "crowd", p_value, level, f"{CROWD:,} users add as much noise together ({found} tags, {law.mean():.0f} expected)"
    )


def _partial_queries(system: System, budget: Budget, users: int, level: float) -> Finding:
    """The noise where some steps alone are asked for: calibrated to these, and on every counter as much as declared."""
    p_values = []
    for query in PARTIAL_QUERIES:
        bench = Bench(query)
        with system.begin(budget, users, query) as session:
            for fixed in (bench.sensitivity(), _calibration(budget, session.protocol.noise, bench.changed)):
                if not fixed.passed:
                    return replace(fixed, name="partial queries")
            transcripts = math.ceil(_PARTIAL_NOISE / (query.size * session.protocol.noise.mean))
            batches = [bench.batch(sample, sample % 2, users) for sample in range(transcripts)]
            played = [_one(bench, session, system.padding, kinds) for kinds in batches]
        sent, errors = np.zeros(query.size), np.zeros(query.size)
        for one, kinds in zip(played, batches, strict=True):
            if isinstance(one, str):
                return Finding("partial queries", False, None, one)
            true = bench.counts[kinds].sum(axis=0)
            sent += np.bincount(one.released, minlength=query.size) - true
            errors += one.estimates - true
        mean = transcripts * session.protocol.noise.mean
        p_values += [float(stats.chi2.sf((excesses**2).sum() / mean, query.size)) for excesses in (sent - mean, errors)]
        p_values.append(2 * float(stats.norm.sf(abs(sent.sum() - query.size * mean) / math.sqrt(query.size * mean))))
    return judged(
        "partial queries",
        bonferroni(*p_values),
        level,
        f"All noise is there in {len(PARTIAL_QUERIES)} queries for some steps",
    )


def _independence(played: _Played, level: float) -> Finding:
    """Sums of independent Poisson counts are Poisson; shared noise would widen them, a fixed total narrow them."""
    tags = played.noise + played.mean
    groups = (tags, tags[:, ::2])
    p_value = bonferroni(*(_poisson_fit(group.sum(axis=1), group.shape[1] * played.mean) for group in groups))
    return judged("independence", p_value, level, "Noise on different counters is independent")


def _message_counts(played: _Played, level: float) -> Finding:
    """Noise tags of a report: law, mean overall, by user and trajectory, and whether opposite trajectories differ."""
    query = played.protocol.query
    mean = query.size * played.mean / played.protocol.users
    extra = played.lengths - query.touched_counters
    overall = 2 * stats.norm.sf(abs(extra.sum() - extra.size * mean) / math.sqrt(extra.size * mean))
    users = np.broadcast_to(np.arange(played.protocol.users), extra.shape)
    by_user, by_trajectory = (_mean_fit(extra, mean, groups) for groups in (users, played.trajectories))
    replaced = np.stack([_cells(extra[:, side, 0], mean)[0] for side in (0, 1)])
    filled = replaced.sum(axis=0) > 0
    opposite = stats.chi2_contingency(replaced[:, filled])[1] if filled.sum() > 1 else 1.0
    p_value = bonferroni(_poisson_fit(extra, mean), overall, by_user, by_trajectory, opposite)
    return judged(
        "message counts",
        p_value,
        level,
        f"A user sends {query.touched_counters} + Poisson({mean:.5g}) tags, whatever its trajectory",
    )


def _unbiasedness(played: _Played, level: float) -> Finding:
    """Mean error of every counter, and of the counters each user touched: one counted twice would raise those."""
    noise, query = played.noise, played.protocol.query
    by_counter = stats.chi2.sf((noise.sum(axis=0) ** 2).sum() / (len(noise) * played.mean), query.size)
    users = played.trajectories.reshape(len(noise), -1).T
    scores = np.array([(noise * played.bench.counts[kinds]).sum() for kinds in users])
    scores /= math.sqrt(len(noise) * query.touched_counters * played.mean)
    by_user = 2 * stats.norm.sf(np.abs(scores))
    return judged(
        "unbiasedness", bonferroni(by_counter, *by_user), level, "Estimates are right on average, users counted once"
    )


def _freshness(played: _Played, level: float) -> Finding:
    """No report comes twice, nor a key or seed, and noise of successive transcripts is uncorrelated."""
    noise, size = played.noise, played.protocol.query.size
    score = (noise[1:] * noise[:-1]).sum() / (played.mean * math.sqrt((len(noise) - 1) * size))
    # Two Poisson(r) counts agree with probability exp(-2r) I_0(2r), two reports with its C-th power.
    agree = float(special.i0e(2 * played.mean / played.protocol.users)) ** size
    repeats = min(1.0, len(noise) ** 2 / 4 * agree) if played.repeated else 1.0
    return judged(
        "freshness",
        0.0 if played.reused else bonferroni(repeats, 2 * stats.norm.sf(abs(score))),
        level,
        "No report repeats, and no noise, key or seed is used again",
    )


def judged(name: str, p_value: float, level: float, statement: str) -> Finding:
    """The finding of a test with a random outcome: whether what is stated holds at a level."""
    passed = p_value >= level
    return Finding(name, passed, p_value, f"{statement}: {'yes' if passed else 'NO'} (p = {p_value:.3g}).")


def bonferroni(*p_values: float) -> float:
    """The p-value of several tests together, whatever their dependence (Bonferroni)."""
    return min(1.0, len(p_values) * float(min(p_values)))


def highest_rate(errors: int, samples: int, level: float) -> float:
    """Clopper-Pearson: the error rate is below this with confidence 1 - level."""
    return 1.0 if errors == samples else float(stats.beta.isf(level, errors + 1, samples - errors))


def chi_square(observed: IntArray | FloatArray, expected: float | FloatArray) -> float:
    """The p-value of counts in cells against what is expected there."""
    return float(stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), observed.size - 1))


def _poisson_fit(values: IntArray | FloatArray, mean: float) -> float:
    """The p-value of a chi-square test that these counts are Poisson of this mean."""
    observed, probabilities = _cells(values, mean)
    return chi_square(observed, probabilities * values.size)


def _mean_fit(values: IntArray, mean: float, groups: IntArray) -> float:
    """The p-value of a chi-square test that these are Poisson counts of this mean, in the sum of every group."""
    sizes = np.bincount(groups.ravel())
    excesses = np.bincount(groups.ravel(), values.ravel() - mean)[sizes > 0]
    return float(stats.chi2.sf((excesses**2 / (sizes[sizes > 0] * mean)).sum(), len(excesses)))


def _cells(values: IntArray | FloatArray, mean: float) -> tuple[IntArray, FloatArray]:
    """How many values fall into cells of about equal probability under Poisson(mean), and these probabilities."""
    wanted = min(_CELLS, values.size // 20)
    ends = np.unique(stats.poisson.ppf(np.arange(1, wanted) / wanted, mean))
    cells = np.searchsorted(ends, np.rint(values.ravel()))  # cell i holds what is above ends[i-1] and up to ends[i]
    probabilities = np.diff(stats.poisson.cdf(ends, mean), prepend=0.0, append=1.0)
    return np.bincount(cells, minlength=len(ends) + 1), probabilities
