"""The audit where the servers add the noise, from both seats, through the real objects.

The coordinator sees the tags that it opens, or the sum that it unmasks, and knows its own noise: what protects users
from it are the shuffler's dummies. The shuffler knows its dummies and sees what is published: what protects users from
it is the coordinator's noise. An auditor who has all keys and both servers' books plays neighbouring batches and holds
what each seat sees against the noise that the announcement declares. Beside that it lies: a report of two tags in a
group must be refused, and a tag of another group must count nowhere.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from shufflerl import checks
from shufflerl.arrays import FloatArray, IntArray
from shufflerl.counts import CountQuery, Trajectories
from shufflerl.errors import ShuffleRLError
from shufflerl.network.audit import Network, Run, keys_of, row, running, split, unmasked
from shufflerl.network.node.reporting import Checked
from shufflerl.network.protocol import crypto, masking, wire
from shufflerl.network.protocol.sources import Law, Servers, Source, in_words
from shufflerl.network.protocol.wire import Report, Transport, Verdict
from shufflerl.network.shuffler import dummies
from shufflerl.noise import Whole
from shufflerl.privacy.accounting import Budget, privacy_loss
from shufflerl.privacy.audit import (
    MIN_SAMPLES,
    PARTIAL_QUERIES,
    USERS,
    AuditReport,
    Bench,
    Finding,
    bonferroni,
    chi_square,
    highest_rate,
    judged,
)

# Tests with a random outcome: five at each seat, the order, and those of partial queries.
_RANDOM_TESTS = 12
_CELLS = 32


class NetworkServers:
    """The networked system with noise by the servers and one of its transports; see `Network`."""

    problem = Network.problem
    samples = 100

    def __init__(self, transport: Literal["tags", "sums"]) -> None:
        self.transport = transport
        self.path = f"servers-{transport}"
        self.epsilon = 4.0 if transport == "tags" else 1.0
        how = {"tags": "sealed tags and dummies, mixing, opening", "sums": "masked vectors, summing, unmasking"}
        self.attacked = f"from both servers' seats, nodes, shuffler and coordinator: {how[transport]}"

    def audit(
        self, budget: Budget, *, samples: int | None = None, users: int = USERS, level: float = 1e-3
    ) -> AuditReport:
        """Test the claim at both seats, on `samples` transcripts of either of two neighbouring batches."""
        started = time.perf_counter()
        samples = checks.whole("samples", self.samples if samples is None else samples, least=MIN_SAMPLES)
        users, share = checks.whole("users", users, least=USERS), level / _RANDOM_TESTS
        bench, bound = Bench(CountQuery.everything(self.problem)), 0.0
        tests = [bench.sensitivity()]
        try:
            with running(self.transport, budget, users, bench.query, "servers") as current:
                tests.append(_probes(bench, current(), users))
                played = _play(bench, current, samples, users)
            for seat in _seats(played):
                lowest, findings = seat.tests(budget, share)
                bound = max(bound, lowest)
                tests += findings
            tests += [_order(played, share)] * (self.transport == "tags")
            tests.append(self._partial_queries(budget, users, share))
            tests.append(Finding("schema", True, None, _SCHEMA))
        except (_BrokenError, ShuffleRLError) as reason:
            tests.append(Finding("schema", False, None, f"{reason} Nothing else was tested."))
        return AuditReport(
            path=self.path,
            attacked=self.attacked,
            users=users,
            claimed_epsilon=budget.epsilon,
            claimed_delta=budget.delta,
            epsilon_lower_bound=bound,
            refutable_epsilon=_refutable_epsilon(samples, budget, share),
            visible_shortfall=math.inf,
            false_alarm_rate=level,
            samples=samples,
            seconds=time.perf_counter() - started,
            tests=tuple(tests),
        )

    def _partial_queries(self, budget: Budget, users: int, level: float) -> Finding:
        """Where some steps alone are asked for: noise for these, and on every counter."""
        p_values = []
        for query in PARTIAL_QUERIES:
            bench = Bench(query)
            with running(self.transport, budget, users, query, "servers") as current:
                for seat in _seats(_play(bench, current, math.ceil(60 / query.size), users)):
                    if not seat.calibration(budget).passed:
                        return Finding("partial queries", False, None, seat.calibration(budget).explanation)
                    p_values.append(_fit(seat.noise, seat.law))
        statement = f"All noise is there in {len(PARTIAL_QUERIES)} queries for some steps"
        return judged("partial queries", bonferroni(*p_values), level, statement)


_SCHEMA = (
    "Every report is one tag of each group, all are equally long; a release is the users' tags and the dummies of the "
    "shuffler's books, and what is published is that with the noise of the coordinator's: both are drawn once."
)


class _BrokenError(Exception):
    """A transcript that breaks the rules."""


@dataclass(frozen=True, eq=False)
class _Batch:
    """One batch as an auditor sees it who has all keys and books; arrays of counters."""

    opened: IntArray
    dummies: IntArray
    published: FloatArray
    places: FloatArray  # of four users' tags of a group among all of it, between 0 and 1
    sizes: Sequence[int]
    once: Sequence[bytes]


def _one(run: Run, trajectories: Sequence[Trajectories]) -> _Batch:
    """Play a batch and read everything; says if the servers' books do not explain what comes out."""
    checked, reports = run.filled(trajectories)
    agreement, source = checked.agreement, checked.agreement.source
    bodies, own, before = run.opened(checked, reports), run.own_noise(), run.coordinator.learner.episodes_played
    release = run.released(checked)
    run.learn(release)
    key, size = run.tag_key, agreement.query.size
    places = np.zeros(4)
    if agreement.transport == Transport.sums:
        sealed = [body[: wire.SEALED_SEED_BYTES] for body in bodies]
        seeds = [crypto.unseal(key, agreement.seed_info, one) for one in sealed]
        vectors = [masking.words(body[wire.SEALED_SEED_BYTES :], agreement.word_bytes) for body in bodies]
        sent = [unmasked(agreement, vector, [seed]) for vector, seed in zip(vectors, seeds, strict=True)]
        total = masking.words(b"".join(release), agreement.word_bytes)
        opened = np.bincount(unmasked(agreement, total, seeds), minlength=size)
        books = masking.words(run.store.books.get("noise", b""), agreement.word_bytes).astype(np.int64)
        once = [*seeds, *(one[:32] for one in sealed)]
    else:
        tags = [split(body, wire.SEALED_TAG_BYTES) for body in bodies]
        sent = [_tags(run, checked, some) for some in tags]
        groups = [(group, split(bytes(some), wire.SEALED_TAG_BYTES)) for group, some in _sections(release)]
        found = [_tags(run, checked, some) for _, some in groups]
        members = [source.groups[group] for group, _ in groups]
        if any(tag not in group for group, some in zip(members, found, strict=True) for tag in some.tolist()):
            raise _BrokenError("A release holds a tag that is not of its group.")
        opened = np.bincount(np.concatenate(found), minlength=size)
        added = [run.store.books.get(dummies.name(piece), b"") for piece in range(len(dummies.slices(agreement)))]
        books = np.bincount(_tags(run, checked, split(b"".join(added), wire.SEALED_TAG_BYTES)), minlength=size)
        first = [one for group, some in groups if group == 0 for one in some]
        places = _places(first, [tags[user][0] for user in (0, 1, -2, -1)])
        once = [one[:32] for _, some in groups for one in some]
    if any(not _one_per_group(source, tags_sent) for tags_sent in sent):
        raise _BrokenError("A report is not one tag of each group.")
    true = np.bincount(np.concatenate(sent), minlength=size)
    published = run.coordinator.records[-1].values
    if books.shape != opened.shape or (opened - true != books).any():
        raise _BrokenError("A release holds other dummies than the shuffler's books: drawn twice, or left out.")
    if (published + source.noise(1).mean - opened != own).any():
        raise _BrokenError("What is published has other noise than the coordinator's books: drawn twice, or left out.")
    if run.coordinator.learner.episodes_played - before != len(reports):
        raise _BrokenError("The learner was not given the batch once.")
    sizes = [len(report.envelope) for report in reports]
    return _Batch(opened, books, published, places, sizes, [*keys_of(checked, reports), *once])


def _tags(run: Run, checked: Checked, sealed: Sequence[bytes]) -> IntArray:
    key, info = run.tag_key, checked.agreement.tag_info
    return row(int.from_bytes(crypto.unseal(key, info, one)) for one in sealed)


def _sections(release: list[bytes]) -> list[tuple[int, memoryview]]:
    return [section for chunk in release for section in wire.sections(chunk)]


def _one_per_group(source: Source, tags: IntArray) -> bool:
    return len(tags) == len(source.groups) and all(
        tag in group for tag, group in zip(tags.tolist(), source.groups, strict=True)
    )


def _places(order: list[bytes], followed: list[bytes]) -> FloatArray:
    """Where some of these tags lie, as random points of their intervals."""
    if not set(followed) <= set(order):
        raise _BrokenError("A release does not hold the users' tags.")
    where = np.array([order.index(one) for one in followed])
    return (where + np.random.default_rng().random(len(where))) / len(order)


def _probes(bench: Bench, run: Run, users: int) -> Finding:
    """Lie: two tags in a group, and in the next batch of the run tags of another group."""
    checked, _ = run.announced()
    agreement, name = checked.agreement, "lies"
    if agreement.transport == Transport.sums:
        return Finding(name, True, None, "Of masked vectors a lie is not seen; see docs/transports.md.")
    (last,) = (group.stop - 1 for group in agreement.source.groups[-1:])
    (outcome,) = run.upload([_report(run, checked, [0, *range(len(agreement.source.groups))])])
    if outcome.verdict == Verdict.accepted:
        return Finding(name, False, None, "A report with two tags in a group was accepted.")
    others = [_report(run, checked, bench.query.tags(bench.trajectories[0])[0].tolist()) for _ in range(users - 1)]
    run.upload([_report(run, checked, [last] * len(agreement.source.groups)), *others])
    own = run.own_noise()
    run.learn(run.released(checked))
    added = [run.store.books.get(dummies.name(piece), b"") for piece in range(len(dummies.slices(agreement)))]
    books = np.bincount(
        _tags(run, checked, split(b"".join(added), wire.SEALED_TAG_BYTES)), minlength=agreement.query.size
    )
    record = run.coordinator.records[-1]
    moved = record.values + agreement.source.noise(1).mean - own - books - (users - 1) * bench.counts[0]
    right = bool(moved[last] == 1 and np.abs(moved).sum() == 1 and record.invalid == len(agreement.source.groups) - 1)
    return Finding(
        name,
        right,
        None,
        f"Two tags in a group are refused; of {len(agreement.source.groups)} tags of one counter, one in each group, "
        f"{moved[last]:g} {'is' if right else 'are'} counted and {record.invalid} left out.",
    )


def _report(run: Run, checked: Checked, tags: Sequence[int]) -> Report:
    """A report of any tags."""
    agreement, token = checked.agreement, crypto.mint(run.enrolment)
    key = crypto.public_box_key(agreement.announcement.tag_key)
    sealed = [crypto.seal(key, agreement.tag_info, int(tag).to_bytes(wire.TAG_BYTES)) for tag in tags]
    report_id = crypto.report_id(agreement.announcement.task, token)
    envelope = crypto.seal(
        crypto.public_box_key(checked.envelope_key), agreement.envelope_info(report_id), b"".join([token, *sealed])
    )
    return Report(report_id=report_id, envelope=envelope)


@dataclass(frozen=True, eq=False)
class _Played:
    """What the transcripts of both batches gave, axes [sample, neighbour, ...]."""

    bench: Bench
    source: Servers
    kinds: IntArray  # trajectories, [sample, neighbour, user]
    batches: list[list[_Batch]]
    reused: bool

    @property
    def true(self) -> IntArray:
        """What users did, [sample, neighbour, counter]."""
        return np.asarray(self.bench.counts[self.kinds].sum(axis=2))


def _play(bench: Bench, current: Callable[[], Run], samples: int, users: int) -> _Played:
    kinds = np.array([[bench.batch(sample, side, users) for side in (0, 1)] for sample in range(samples)])
    batches: list[list[_Batch]] = []
    source = current().meaning.source
    assert isinstance(source, Servers)
    for sample in range(samples):
        some = [[bench.trajectories[kind] for kind in kinds[sample, side]] for side in (0, 1)]
        batches.append([_one(current(), trajectories) for trajectories in some])
    every = list(itertools.chain.from_iterable(batches))
    if len({size for batch in every for size in batch.sizes}) > 1:
        raise _BrokenError("Reports are not equally long.")
    once = [key for batch in every for key in batch.once]
    return _Played(bench, source, kinds, batches, len(set(once)) < len(once))


def _seats(played: _Played) -> tuple[_Seat, _Seat]:
    """What each server sees that knows all it can: counts with the other's noise alone."""
    source = played.source
    opened = np.array([[batch.opened for batch in both] for both in played.batches])
    added = np.array([[batch.dummies for batch in both] for both in played.batches])
    published = np.array([[batch.published for batch in both] for both in played.batches])
    return (
        _Seat("coordinator", played, source.dummies, opened - source.dummies.mean),
        _Seat("shuffler", played, source.own, published + source.dummies.mean - added),
    )


@dataclass(frozen=True, eq=False)
class _Seat:
    """An observer who sees counts with noise of one law, less its mean: sees[sample, neighbour, counter]."""

    name: str
    played: _Played
    law: Law
    sees: FloatArray

    @property
    def noise(self) -> FloatArray:
        """In the order in which batches were played, [transcript, counter]."""
        residues = self.sees - self.played.true
        return np.asarray(residues.reshape(-1, residues.shape[-1]))

    def tests(self, budget: Budget, level: float) -> tuple[float, list[Finding]]:
        """A lower bound on epsilon, and what every test finds."""
        bound, epsilon = self._epsilon(budget, level)
        found = [self.calibration(budget), epsilon, self._law(level), self._independence(level)]
        return bound, [*found, self._unbiasedness(level), self._freshness(level)]

    def calibration(self, budget: Budget) -> Finding:
        """Whether the announced law is enough alone."""
        changed = self.played.bench.changed
        delta = privacy_loss(self.law, changed).delta(budget.epsilon)
        return Finding(
            f"{self.name}: calibration",
            delta <= budget.delta,
            None,
            f"{in_words(self.law)} on {changed} changed counters has delta {delta:.3g} at epsilon {budget.epsilon:g}; "
            f"claimed is {budget.delta:g}.",
        )

    def _epsilon(self, budget: Budget, level: float) -> tuple[float, Finding]:
        """How often it errs that calls the replaced user by the counters that change, added up in their direction."""
        bench, samples = self.played.bench, len(self.sees)
        sums, changed = (self.sees - self.played.true[:, :1]) @ bench.direction, bench.changed
        errors = int((sums[:, 0] > changed / 2).sum()), int((sums[:, 1] < changed / 2).sum())
        bound = _lowest_epsilon(*errors, samples, budget.delta, level)
        return bound, Finding(
            f"{self.name}: epsilon",
            bound <= budget.epsilon,
            None,
            f"Its errors put epsilon above {bound:.3g} with confidence 1 - {level:.2g}, whatever the law of the noise; "
            f"claimed is {budget.epsilon:g}.",
        )

    def _law(self, level: float) -> Finding:
        """All counters together, and each by itself: the mean of its noise, and how often it has the likeliest."""
        noise = self.noise
        means = noise.mean(axis=0) * math.sqrt(len(noise)) / self.law.sd
        by_counter = float(stats.chi2.sf((means**2).sum(), noise.shape[1]))
        central = np.abs(noise) <= self.law.sd / 2
        chance = float(np.diff(self.law.cdf([-self.law.sd / 2, self.law.sd / 2]))[0])
        shares = (central.mean(axis=0) - chance) * math.sqrt(len(noise) / (chance * (1 - chance)))
        narrow = float(stats.chi2.sf((shares**2).sum(), noise.shape[1]))
        p_value = bonferroni(_fit(noise, self.law), by_counter, narrow)
        statement = f"On every counter there is {in_words(self.law)}, as declared"
        return judged(f"{self.name}: noise law", p_value, level, statement)

    def _independence(self, level: float) -> Finding:
        """Shared noise would widen the sums of counters, a fixed total narrow them."""
        noise = self.noise
        some = (noise, noise[:, ::2])
        fits = [_fit(part.sum(axis=1), self.law.repeated(part.shape[1])) for part in some]
        p_value = bonferroni(*fits, *(self._spread(part) for part in some))
        return judged(f"{self.name}: independence", p_value, level, "Noise on different counters is independent")

    def _spread(self, noise: FloatArray) -> float:
        """The p-value of the variance of the sums over counters: about chi-square, of fewer degrees by the kurtosis."""
        sums, counters = noise.sum(axis=1), noise.shape[1]
        values, masses = self._masses
        excess = float((values**4 * masses).sum()) / self.law.variance**2 - 3
        degrees = 2 * len(sums) / (2 + excess / counters)
        ratio = degrees * float((sums**2).mean()) / (counters * self.law.variance)
        return 2 * float(min(stats.chi2.cdf(ratio, degrees), stats.chi2.sf(ratio, degrees)))

    @property
    def _masses(self) -> tuple[FloatArray, FloatArray]:
        """Noise that may come, and how probable it is."""
        reach = math.ceil(self.law.bound(1e-12))
        counts = np.arange(math.floor(self.law.mean) - reach, math.ceil(self.law.mean) + reach + 1)
        values = counts.astype(np.float64) - self.law.mean
        return values, np.diff(self.law.cdf(values), prepend=0.0)

    def _unbiasedness(self, level: float) -> Finding:
        """Of the counters each user touched: one counted twice would raise those."""
        noise, users = self.noise, self.played.kinds.reshape(len(self.noise), -1).T
        scores = np.array([(noise * self.played.bench.counts[kinds]).sum() for kinds in users])
        scores /= math.sqrt(len(noise) * self.played.bench.query.touched_counters) * self.law.sd
        p_value = bonferroni(*(2 * stats.norm.sf(np.abs(scores))))
        return judged(f"{self.name}: unbiasedness", p_value, level, "Every user is counted once")

    def _freshness(self, level: float) -> Finding:
        """No noise comes twice, nor a key or seed, and that of successive batches is uncorrelated."""
        noise = self.noise
        score = (noise[1:] * noise[:-1]).sum() / (self.law.variance * math.sqrt((len(noise) - 1) * noise.shape[1]))
        times = np.unique(noise, axis=0, return_counts=True)[1]
        agree = float((self._masses[1] ** 2).sum()) ** noise.shape[1]
        # Pairs of batches with the same noise are rare events: about Poisson.
        repeats = float(stats.poisson.sf((times * (times - 1) // 2).sum() - 1, math.comb(len(noise), 2) * agree))
        p_value = 0.0 if self.played.reused else bonferroni(repeats, 2 * stats.norm.sf(abs(score)))
        return judged(f"{self.name}: freshness", p_value, level, "No noise, key or seed is used again")


def _lowest_epsilon(false_alarms: int, misses: int, samples: int, delta: float, level: float) -> float:
    """What so many errors show epsilon to be at least: 1 - misses <= exp(epsilon) false_alarms + delta, and swapped."""
    rates = [highest_rate(errors, samples, level / 2) for errors in (false_alarms, misses)]
    success = max((1 - one - delta) / other for one, other in (rates, reversed(rates)))
    return math.log(success) if success > 1 else 0.0


def _refutable_epsilon(samples: int, budget: Budget, level: float) -> float:
    """The least epsilon of randomized response that is found above the budget in nine of ten audits."""

    def refutes(errors: int) -> bool:
        return _lowest_epsilon(errors, errors, samples, budget.delta, level) > budget.epsilon

    if not refutes(0):
        return math.inf
    most = max(itertools.takewhile(refutes, range(samples)))
    rate = highest_rate(most, samples, 0.95)  # either kind of error stays within that number with probability 0.95
    return math.log((1 - rate - budget.delta) / rate)


def _order(played: _Played, level: float) -> Finding:
    """Where four users' tags go among all of their group: their order among themselves, and the place of the first."""
    places = np.array([batch.places for both in played.batches for batch in both])
    orders = np.unique(np.argsort(places, axis=1) @ [64, 16, 4, 1], return_counts=True)[1]
    orders = np.pad(orders, (0, math.factorial(4) - len(orders)))
    where = np.bincount((16 * places[:, 0]).astype(np.int64), minlength=16)
    p_value = bonferroni(*(chi_square(found, len(places) / len(found)) for found in (orders, where)))
    return judged("permutation", p_value, level, "Tags of users and dummies are in one uniformly random order")


def _fit(noise: FloatArray, law: Whole) -> float:
    """The p-value of a chi-square test that these are draws of a law of whole counts, less its mean."""
    values = np.rint(noise.ravel() + law.mean)
    wanted = min(_CELLS, values.size // 20)
    reach = math.ceil(law.bound(1e-9))
    grid = np.arange(math.floor(law.mean) - reach, math.ceil(law.mean) + reach + 1)
    below = law.cdf(grid - law.mean)
    ends = np.unique(np.searchsorted(below, np.arange(1, wanted) / wanted))
    cells = np.searchsorted(grid[ends], values)
    chances = np.diff(below[ends], prepend=0.0, append=1.0)
    kept = chances * values.size >= 1  # what hardly ever comes says nothing by chi-square
    observed = np.bincount(cells, minlength=len(ends) + 1)
    return chi_square(observed[kept], (chances * values.size)[kept]) if kept.sum() > 1 else 1.0
