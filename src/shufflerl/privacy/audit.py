"""A test bench for the privacy claim: plays neighbouring batches through the real transcript and looks for a leak.

Nothing here is simulated and nothing can be seeded: users' reports come from the randomizer with the operating system's
randomness, go through the shuffler and reach the analyzer. Two batches differ in one user's whole trajectory, so that
every counter that can change does. What an observer who knows everybody else can tell about that user is measured and
held against the claim; the noise, the messages and their order are held against their declared laws.

An audit finds faults; it proves no privacy. That is the accountant's part, and what it assumes is what is tested here.

>>> report = audit(Budget(8.0, 1e-3), samples=200, level=1e-6)
>>> report.passed, report.epsilon_lower_bound < report.claimed_epsilon
(True, True)
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import special, stats

from shufflerl import checks
from shufflerl.checks import FloatArray, IntArray
from shufflerl.counts import CountQuery, Trajectories
from shufflerl.mdp import Problem
from shufflerl.privacy import accounting, protocol
from shufflerl.privacy.accounting import Budget, PrivacyLoss, calibrate_gaussian, privacy_loss
from shufflerl.privacy.noise import GaussianNoise, PoissonNoise
from shufflerl.privacy.protocol import Protocol

#: Fewer transcripts than this of either batch, and the laws of the test statistics would be too far from their limits.
FEWEST_SAMPLES = 200

# The noise per counter does not depend on the number of users: two are enough, one replaced and one bystander.
_HORIZON, _USERS = 2, 2
# Tests with a random outcome; each may raise a false alarm with this part of the level.
_RANDOM_TESTS = 8
_CELLS = 32


@dataclass(frozen=True)
class System:
    """What is audited: the three pieces of the protocol and the calibration of their noise."""

    randomize: Callable[[Protocol, Trajectories], IntArray] = protocol.randomize
    shuffle: Callable[[Sequence[IntArray]], IntArray] = protocol.shuffle
    analyze: Callable[[Protocol, IntArray, int], FloatArray] = protocol.analyze
    calibrate: Callable[[Budget, int], PoissonNoise] = accounting.calibrate


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
    infinite if they are too few to refute anything.
    """

    claimed_epsilon: float
    claimed_delta: float
    epsilon_lower_bound: float
    refutable_epsilon: float
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
            "claimed_epsilon": self.claimed_epsilon,
            "delta": self.claimed_delta,
            "epsilon_lower_bound": self.epsilon_lower_bound,
            "refutable_epsilon": self.refutable_epsilon if math.isfinite(self.refutable_epsilon) else None,
            "false_alarm_rate": self.false_alarm_rate,
            "passed": self.passed,
            "samples": self.samples,
            "seconds": self.seconds,
            "tests": [asdict(finding) for finding in self.tests],
        }

    def __str__(self) -> str:
        power = (
            f"So many would have refuted a true epsilon above about {self.refutable_epsilon:.3g}, nine times in ten."
            if math.isfinite(self.refutable_epsilon)
            else "An observer's errors could not have refuted any epsilon."
        )
        width = max(len(finding.name) for finding in self.tests)
        return "\n".join(
            [
                f"Audit {'passed' if self.passed else 'FAILED: ' + ', '.join(self.failures)}",
                f"Claimed: epsilon {self.claimed_epsilon:g} at delta {self.claimed_delta:g}. "
                f"Measured: epsilon at least {self.epsilon_lower_bound:.3g}.",
                *(
                    f"  {'pass' if finding.passed else 'FAIL'}  {finding.name:{width}}  {finding.explanation}"
                    for finding in self.tests
                ),
                f"{self.samples} transcripts of each of two neighbouring batches in {self.seconds:.1f} s; "
                f"a sound system fails with probability at most {self.false_alarm_rate:g}.",
                power,
            ]
        )


def audit(budget: Budget, *, samples: int = 8000, level: float = 1e-3, system: System | None = None) -> AuditReport:
    """Test the claim that a release calibrated to the budget is private, on `samples` transcripts of either batch.

    `level` is the false-alarm rate of all tests together. Time grows with the samples and, like the number of noise
    messages, as 1/epsilon^2. To audit another implementation than ours, give it as `system`.
    """
    started = time.perf_counter()
    samples = checks.whole("samples", samples, least=FEWEST_SAMPLES)
    level = checks.real("level", level, above=0, below=1)
    system = System() if system is None else system
    share = level / _RANDOM_TESTS

    bench = _Bench()
    noise = system.calibrate(budget, bench.query.changed_counters)
    agreed = Protocol(bench.query, _USERS, noise)
    tests = [bench.sensitivity(), _calibration(budget, noise, bench.changed)]
    bound, refutable = 0.0, math.inf
    played = _play(bench, agreed, system, samples)
    if isinstance(played, str):
        tests.append(Finding("schema", False, None, f"{played} Nothing else was tested."))
    else:
        claimed = privacy_loss(accounting.calibrate(budget, bench.changed), bench.changed)
        bound, finding = _epsilon(played, budget, share)
        refutable = refutable_epsilon(samples, budget, share)
        tests += [
            Finding("schema", True, None, "Every message is one tag, reports are sorted, batches lose and add none."),
            _permutation(system, samples, share),
            finding,
            _curve(played, claimed, budget, share),
            _noise_law(played, share),
            _independence(played, share),
            _message_counts(played, share),
            _unbiasedness(played, share),
            _freshness(played, share),
        ]
    return AuditReport(
        claimed_epsilon=budget.epsilon,
        claimed_delta=budget.delta,
        epsilon_lower_bound=bound,
        refutable_epsilon=refutable,
        false_alarm_rate=level,
        samples=samples,
        seconds=time.perf_counter() - started,
        tests=tuple(tests),
    )


class _Bench:
    """A problem so small that all trajectories can be listed: the first is all zeros, the last all ones."""

    def __init__(self) -> None:
        self.query = CountQuery.everything(Problem(_HORIZON, n_states=2, n_actions=2, episodes=1))
        bits = np.array(list(itertools.product((0, 1), repeat=3 * _HORIZON))).reshape(-1, 3, 1, _HORIZON)
        self.trajectories = [Trajectories(*parts) for parts in bits]
        #: counts[m, c]: what trajectory m adds to counter c.
        self.counts = np.stack(
            [np.bincount(self.query.tags(one)[0], minlength=self.query.size) for one in self.trajectories]
        )
        moves = self.counts[:, None] - self.counts
        #: The most counters that differ between any two users, by looking at all pairs.
        self.changed = int(np.abs(moves).sum(axis=-1).max())
        #: direction[c]: how counter c moves when the user of the first trajectory is replaced by that of the last.
        self.direction = self.counts[-1] - self.counts[0]

    def users(self, sample: int, neighbour: int) -> tuple[int, int]:
        """Trajectories of the replaced user, first or last, and of the bystander, who goes through all in turn."""
        return -neighbour, sample % len(self.trajectories)

    def sensitivity(self) -> Finding:
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

    bench: _Bench
    protocol: Protocol
    trajectories: IntArray  # [sample, neighbour, user]
    lengths: IntArray  # messages of each report, [sample, neighbour, user]
    estimates: FloatArray  # what the analyzer gave, [sample, neighbour, counter]
    repeated: bool  # whether the replaced user sent the very same report twice

    @property
    def noise(self) -> FloatArray:
        """Estimates less true counts, in the order in which the transcripts were played: [transcript, counter]."""
        true = self.bench.counts[self.trajectories].sum(axis=2)
        residues: FloatArray = (self.estimates - true).reshape(-1, true.shape[-1])
        return residues

    @property
    def mean(self) -> float:
        """Mean and variance of the noise tags on a counter."""
        return self.protocol.noise.variance

    def error_rates(self, quantile: float) -> tuple[int, int]:
        """How often an observer errs who calls the replaced user by a fixed threshold, on either batch.

        The observer knows the bystander and adds up the counters in the direction of the change: this sum is about 0
        on the first batch and the number of changed counters on the second. The threshold lies `quantile` deviations
        beyond the middle, between two values the sum can take.
        """
        first = self.bench.counts[self.trajectories[:, :1]].sum(axis=2)
        sums = (self.estimates - first) @ self.bench.direction
        changed = int(np.abs(self.bench.direction).sum())
        threshold = math.floor(changed / 2 + quantile * math.sqrt(changed * self.mean)) + 0.5
        return int((sums[:, 0] > threshold).sum()), int((sums[:, 1] < threshold).sum())


def _play(bench: _Bench, agreed: Protocol, system: System, samples: int) -> _Played | str:
    """Play all transcripts; where one breaks the rules, say how."""
    trajectories = np.array([[bench.users(sample, side) for side in (0, 1)] for sample in range(samples)])
    lengths = np.empty((samples, 2, _USERS), dtype=np.int64)
    estimates = np.empty((samples, 2, bench.query.size))
    seen = set()
    for sample, side in itertools.product(range(samples), (0, 1)):
        reports = [system.randomize(agreed, bench.trajectories[m]) for m in trajectories[sample, side]]
        batch = system.shuffle(reports)
        problem = _malformed(reports, batch, bench.query.size)
        if problem:
            return problem
        estimate = system.analyze(agreed, batch, _USERS)
        if np.shape(estimate) != (bench.query.size,) or not np.isfinite(estimate).all():
            return f"The analyzer did not give one number for each of {bench.query.size} counters."
        estimates[sample, side] = estimate
        lengths[sample, side] = [len(report) for report in reports]
        seen.add((side, hashlib.blake2b(reports[0].tobytes(), digest_size=16).digest()))
    return _Played(bench, agreed, trajectories, lengths, estimates, len(seen) < 2 * samples)


def _malformed(reports: Sequence[Any], batch: Any, size: int) -> str | None:
    for name, messages in (*(("report", report) for report in reports), ("batch", batch)):
        if not isinstance(messages, np.ndarray) or messages.ndim != 1 or not np.issubdtype(messages.dtype, np.integer):
            return f"A {name} is not a row of tags: some message is more than the number of one counter."
        if messages.dtype != np.int64:
            return f"A {name} has type {messages.dtype}, not int64: how tags are written may tell what they are."
        if messages.size and not 0 <= messages.min() <= messages.max() < size:
            return f"A {name} holds a message that is not the tag of a counter."
    if any((report[1:] < report[:-1]).any() for report in reports):
        return "A report is not sorted: its order may tell true tags from noise."
    if (np.bincount(batch, minlength=size) != np.bincount(np.concatenate(reports), minlength=size)).any():
        return "A batch is not its reports' messages in another order."
    return None


def _calibration(budget: Budget, noise: PoissonNoise, changed: int) -> Finding:
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
    return _gaussian_epsilon(-2 * float(special.ndtri(_highest_rate(most, samples, 0.95))), budget.delta)


def _lowest_mu(false_alarms: int, misses: int, samples: int, level: float) -> float:
    """The mu that so many errors show a Gaussian mechanism to have at least, with confidence 1 - level."""
    rates = (_highest_rate(errors, samples, level / 2) for errors in (false_alarms, misses))
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
        rates = [_highest_rate(n, samples, level / 2 / len(quantiles)) for n in played.error_rates(quantile)]
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


def _permutation(system: System, samples: int, level: float) -> Finding:
    """Follow four of 64 numbered messages: their order among themselves, and where the first one goes."""
    reports = [np.arange(32), np.arange(32, 64)]
    orders, places = np.zeros(24), np.zeros(16)
    ranks = {order: i for i, order in enumerate(itertools.permutations(range(4)))}
    for _ in range(samples):
        where = np.argsort(system.shuffle(reports))[[0, 31, 32, 63]]
        orders[ranks[tuple(np.argsort(where).tolist())]] += 1
        places[where[0] // 4] += 1
    p_value = _least(_chi_square(orders, samples / 24), _chi_square(places, samples / 16))
    return _judged("permutation", p_value, level, "All orders of a batch's messages are equally likely")


def _noise_law(played: _Played, level: float) -> Finding:
    p_value = _poisson_fit(played.noise + played.mean, played.mean)
    return _judged("noise law", p_value, level, f"Noise on a counter is Poisson of mean {played.mean:.5g}, as declared")


def _independence(played: _Played, level: float) -> Finding:
    """Sums of independent Poisson counts are Poisson; shared noise would widen them, a fixed total narrow them."""
    tags = played.noise + played.mean
    groups = (tags, tags[:, ::2])
    p_value = _least(*(_poisson_fit(group.sum(axis=1), group.shape[1] * played.mean) for group in groups))
    return _judged("independence", p_value, level, "Noise on different counters is independent")


def _message_counts(played: _Played, level: float) -> Finding:
    """Noise messages of a report: law, mean overall and by trajectory, and whether opposite trajectories differ."""
    query, rate = played.protocol.query, float(played.protocol.rate)
    mean, kinds = query.size * rate, len(played.bench.trajectories)
    extra = played.lengths - query.touched_counters
    overall = 2 * stats.norm.sf(abs(extra.sum() - extra.size * mean) / math.sqrt(extra.size * mean))
    kind = (played.trajectories % kinds).ravel()
    reports = np.bincount(kind, minlength=kinds)
    excesses = np.bincount(kind, extra.ravel() - mean, minlength=kinds)
    by_trajectory = stats.chi2.sf((excesses**2 / (reports * mean)).sum(), kinds)
    replaced = np.stack([_cells(extra[:, side, 0], mean)[0] for side in (0, 1)])
    filled = replaced.sum(axis=0) > 0
    opposite = stats.chi2_contingency(replaced[:, filled])[1] if filled.sum() > 1 else 1.0
    p_value = _least(_poisson_fit(extra, mean), overall, by_trajectory, opposite)
    return _judged(
        "message counts",
        p_value,
        level,
        f"A user sends {query.touched_counters} + Poisson({mean:.5g}) messages, whatever its trajectory",
    )


def _unbiasedness(played: _Played, level: float) -> Finding:
    """Mean error of every counter, and of the counters each user touched: one counted twice would raise those."""
    noise, query = played.noise, played.protocol.query
    by_counter = stats.chi2.sf((noise.sum(axis=0) ** 2).sum() / (len(noise) * played.mean), query.size)
    touched = played.bench.counts[played.trajectories].reshape(len(noise), _USERS, query.size)
    scores = np.einsum("tc,tuc->u", noise, touched) / math.sqrt(len(noise) * query.touched_counters * played.mean)
    by_user = 2 * stats.norm.sf(np.abs(scores))
    return _judged(
        "unbiasedness", _least(by_counter, *by_user), level, "Estimates are right on average, users counted once"
    )


def _freshness(played: _Played, level: float) -> Finding:
    """No report comes twice, and noise of successive transcripts is uncorrelated."""
    noise, size = played.noise, played.protocol.query.size
    score = (noise[1:] * noise[:-1]).sum() / (played.mean * math.sqrt((len(noise) - 1) * size))
    # Two Poisson(r) counts agree with probability exp(-2r) I_0(2r), two reports with its C-th power.
    agree = float(special.i0e(2 * float(played.protocol.rate))) ** size
    repeats = min(1.0, len(noise) ** 2 / 4 * agree) if played.repeated else 1.0
    return _judged(
        "freshness",
        _least(repeats, 2 * stats.norm.sf(abs(score))),
        level,
        "No report repeats and no noise is used again",
    )


def _judged(name: str, p_value: float, level: float, statement: str) -> Finding:
    passed = p_value >= level
    return Finding(name, passed, p_value, f"{statement}: {'yes' if passed else 'NO'} (p = {p_value:.3g}).")


def _least(*p_values: float) -> float:
    """The p-value of several tests together, whatever their dependence (Bonferroni)."""
    return min(1.0, len(p_values) * float(min(p_values)))


def _highest_rate(errors: int, samples: int, level: float) -> float:
    """Clopper-Pearson: the error rate is below this with confidence 1 - level."""
    return 1.0 if errors == samples else float(stats.beta.isf(level, errors + 1, samples - errors))


def _chi_square(observed: IntArray | FloatArray, expected: float | FloatArray) -> float:
    return float(stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), observed.size - 1))


def _poisson_fit(values: IntArray | FloatArray, mean: float) -> float:
    """The p-value of a chi-square test that these counts are Poisson of this mean."""
    observed, probabilities = _cells(values, mean)
    return _chi_square(observed, probabilities * values.size)


def _cells(values: IntArray | FloatArray, mean: float) -> tuple[IntArray, FloatArray]:
    """How many values fall into cells of about equal probability under Poisson(mean), and these probabilities."""
    wanted = min(_CELLS, values.size // 20)
    ends = np.unique(stats.poisson.ppf(np.arange(1, wanted) / wanted, mean))
    cells = np.searchsorted(ends, np.rint(values.ravel()))  # cell i holds what is above ends[i-1] and up to ends[i]
    probabilities = np.diff(stats.poisson.cdf(ends, mean), prepend=0.0, append=1.0)
    return np.bincount(cells, minlength=len(ends) + 1), probabilities
