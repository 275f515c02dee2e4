"""The audit: planted faults are caught by the test that should catch them, and the sound system passes.

Nothing here can be seeded. The sound system is tested at level 1e-5, so that it fails one run in 100,000 at most; every
fault is far beyond the level at which it is looked for.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from scipy import special, stats

from shufflerl.arrays import FloatArray, IntArray
from shufflerl.counts import CountQuery, Trajectories
from shufflerl.errors import InvalidInputError
from shufflerl.noise import GaussianNoise, PoissonNoise
from shufflerl.privacy import protocol
from shufflerl.privacy.accounting import Budget, calibrate, calibrate_gaussian, paper_noise
from shufflerl.privacy.audit import MIN_SAMPLES, USERS, AuditReport, InMemory, audit, auditing
from shufflerl.privacy.audit.bench import Bench, Played
from shufflerl.privacy.audit.observers import Observer
from shufflerl.privacy.audit.statistics import refutable_epsilon, visible_shortfall
from shufflerl.privacy.loss import privacy_loss
from shufflerl.privacy.protocol import Protocol
from tests.support.examples import mostly_slow

BUDGET = Budget(1.0, 1e-5)
CHEAP = Budget(4.0, 1e-5)  # less noise, fewer messages
DETERMINISTIC = {"sensitivity", "calibration", "schema"}
STATISTICAL = {
    "permutation",
    "epsilon",
    "privacy curve",
    "noise law",
    "crowd",
    "partial queries",
    "independence",
    "message counts",
    "unbiasedness",
    "freshness",
}


def by_generator(agreed: Protocol, trajectory: Trajectories, rng: np.random.Generator) -> IntArray:
    """A randomizer with noise of the right law from a generator, as only a faulty device would have."""
    size = agreed.query.size
    noise = rng.integers(size, size=rng.poisson(size * float(agreed.rate)))
    return np.sort(np.concatenate([agreed.query.tags(trajectory)[0], noise]))


def with_less_noise(agreed: Protocol) -> Protocol:
    return Protocol(agreed.query, agreed.users, PoissonNoise(agreed.noise.mean / 2))


def halved() -> InMemory:
    """Half the noise variance, and the analyzer subtracts accordingly: the estimates stay unbiased."""
    return InMemory(
        randomize=lambda agreed, one: protocol.randomize(with_less_noise(agreed), one),
        analyze=lambda agreed, tags, reports: protocol.analyze(with_less_noise(agreed), tags, reports),
    )


def halved_in_crowds() -> InMemory:
    """Half the noise in batches of many users alone."""

    def agreed_by(agreed: Protocol) -> Protocol:
        return with_less_noise(agreed) if agreed.users >= 1000 else agreed

    return InMemory(
        randomize=lambda agreed, one: protocol.randomize(agreed_by(agreed), one),
        analyze=lambda agreed, tags, reports: protocol.analyze(agreed_by(agreed), tags, reports),
    )


def halved_where_asked_in_part(drops: Callable[[Any], bool]) -> InMemory:
    """Half the noise in reports of queries that leave out some steps."""

    def agreed_by(agreed: Protocol) -> Protocol:
        return with_less_noise(agreed) if drops(agreed.query) else agreed

    return InMemory(randomize=lambda agreed, one: protocol.randomize(agreed_by(agreed), one))


def over_half_the_counters() -> InMemory:
    """Composition over H where a replaced user changes 2H: the noise goes with the number of counters."""
    return InMemory(calibrate=lambda budget, changed: PoissonNoise(calibrate(budget, changed).mean / 2))


def fixed_seed() -> InMemory:
    return InMemory(randomize=lambda agreed, one: by_generator(agreed, one, np.random.default_rng(0)))


def seed_shared_by_users() -> InMemory:
    """Fresh for every batch, but all of its users draw the same noise."""
    calls = itertools.count()

    def randomize(agreed: Protocol, one: Trajectories) -> IntArray:
        return by_generator(agreed, one, np.random.default_rng([7, next(calls) // agreed.users]))

    return InMemory(randomize=randomize)


def few_seeds() -> InMemory:
    """One hundred seeds in turn: successive batches differ, but noise comes back."""
    calls = itertools.count()
    return InMemory(randomize=lambda agreed, one: by_generator(agreed, one, np.random.default_rng(next(calls) % 100)))


def same_noise_on_all_counters() -> InMemory:
    def randomize(agreed: Protocol, one: Trajectories) -> IntArray:
        size = agreed.query.size
        noise = np.repeat(np.arange(size), np.random.default_rng().poisson(float(agreed.rate)))
        return np.sort(np.concatenate([agreed.query.tags(one)[0], noise]))

    return InMemory(randomize=randomize)


def report_counted_twice() -> InMemory:
    """A replayed report, which the analyzer even accounts for."""
    return InMemory(
        shuffle=lambda reports: protocol.shuffle([*reports, reports[0]]),
        analyze=lambda agreed, tags, reports: protocol.analyze(agreed, tags, reports + 1),
    )


def true_tags_sent_twice() -> InMemory:
    def randomize(agreed: Protocol, one: Trajectories) -> IntArray:
        return np.sort(np.concatenate([protocol.randomize(agreed, one), agreed.query.tags(one)[0]]))

    return InMemory(randomize=randomize)


def true_tags_instead_of_noise() -> InMemory:
    """Counted twice behind an unsuspicious number of messages: as many noise tags are left out."""

    def randomize(agreed: Protocol, one: Trajectories) -> IntArray:
        true = agreed.query.tags(one)[0]
        noise = protocol.shuffle([protocol.randomize(agreed, one)])[2 * len(true) :]
        return np.sort(np.concatenate([true, true, noise]))

    return InMemory(randomize=randomize)


def half_of_the_users_without_noise() -> InMemory:
    calls = itertools.count()

    def randomize(agreed: Protocol, one: Trajectories) -> IntArray:
        if next(calls) % 2:
            return np.sort(agreed.query.tags(one)[0])
        return protocol.randomize(agreed, one)

    return InMemory(randomize=randomize)


def more_messages_for_rewards() -> InMemory:
    """Every reward brings some more noise tags."""

    def randomize(agreed: Protocol, one: Trajectories) -> IntArray:
        extra = np.random.default_rng().integers(agreed.query.size, size=6 * int(one.rewards.sum()))
        return np.sort(np.concatenate([protocol.randomize(agreed, one), extra]))

    return InMemory(randomize=randomize)


def fixed_number_of_messages() -> InMemory:
    """Noise tags padded to the expected number: the noise of different counters is no longer independent."""

    def randomize(agreed: Protocol, one: Trajectories) -> IntArray:
        true, total = agreed.query.tags(one)[0], round(agreed.messages_per_user)
        noise = np.random.default_rng().integers(agreed.query.size, size=total - len(true))
        return np.sort(np.concatenate([true, noise]))

    return InMemory(randomize=randomize)


def fewer_messages_after_one_action() -> InMemory:
    """Messages lost after one action in one state, which the replaced user never takes."""

    def randomize(agreed: Protocol, one: Trajectories) -> IntArray:
        report = protocol.shuffle([protocol.randomize(agreed, one)])
        lost = 30 if one.states[0, 0] == 0 and one.actions[0, 0] == 1 else 0
        return np.sort(report[lost:])

    return InMemory(randomize=randomize)


def usual_numbers_of_messages_where_rewarded() -> InMemory:
    """As many on average whatever happens, and of the right law over all users; yet the number tells the rewards."""
    quartile = stats.norm.isf(0.25)

    def randomize(agreed: Protocol, one: Trajectories) -> IntArray:
        mean, rewarded = agreed.query.size * float(agreed.rate), one.rewards.sum()
        while True:
            report = protocol.randomize(agreed, one)
            usual = abs(len(report) - agreed.query.touched_counters - mean) < quartile * math.sqrt(mean)
            if usual == (rewarded > 0) or 0 < rewarded < one.rewards.size or agreed.users > USERS:
                return report

    return InMemory(randomize=randomize)


def messages_left_in_order() -> InMemory:
    return InMemory(shuffle=lambda reports: np.concatenate(list(reports)))


def messages_rotated() -> InMemory:
    """Every message may land anywhere, yet neighbours stay neighbours."""

    def shuffle(reports: Sequence[IntArray]) -> IntArray:
        tags = np.concatenate(list(reports))
        return np.roll(tags, np.random.default_rng().integers(len(tags)))

    return InMemory(shuffle=shuffle)


def true_tags_first() -> InMemory:
    def randomize(agreed: Protocol, one: Trajectories) -> IntArray:
        true = agreed.query.tags(one)[0]
        return np.concatenate([true, protocol.randomize(agreed, one)[len(true) :]])

    return InMemory(randomize=randomize)


def integers(agreed: Protocol, one: Trajectories) -> IntArray:
    """z = bit + noise for every counter, as the paper has it."""
    return np.bincount(protocol.randomize(agreed, one), minlength=agreed.query.size)


def integers_by_position() -> InMemory:
    """A report is one integer per counter; the shuffler mixes the users' reports, the analyzer adds up."""

    def shuffle(reports: Sequence[IntArray]) -> IntArray:
        return np.concatenate([reports[i] for i in np.random.default_rng().permutation(len(reports))])

    def analyze(agreed: Protocol, messages: IntArray, reports: int) -> FloatArray:
        return np.asarray(messages.reshape(reports, -1).sum(axis=0) - reports * float(agreed.rate))

    return InMemory(randomize=integers, shuffle=shuffle, analyze=analyze)


def integers_in_pairs() -> InMemory:
    """A message is a pair (counter, integer); all pairs of a batch are permuted."""

    def randomize(agreed: Protocol, one: Trajectories) -> IntArray:
        return np.stack([np.arange(agreed.query.size), integers(agreed, one)], axis=1)

    def shuffle(reports: Sequence[IntArray]) -> IntArray:
        return np.random.default_rng().permutation(np.concatenate(list(reports)))

    def analyze(agreed: Protocol, messages: IntArray, reports: int) -> FloatArray:
        counts = np.bincount(messages[:, 0], messages[:, 1], minlength=agreed.query.size)
        return np.asarray(counts - reports * float(agreed.rate))

    return InMemory(randomize=randomize, shuffle=shuffle, analyze=analyze)


def integers_in_one_number() -> InMemory:
    """The same pairs written as counter + size * integer: a row of numbers, but not of tags."""
    pairs = integers_in_pairs()

    def randomize(agreed: Protocol, one: Trajectories) -> IntArray:
        counters, values = pairs.randomize(agreed, one).T
        return np.sort(counters + agreed.query.size * values)

    return InMemory(randomize=randomize)


def narrow_where_rewarded() -> InMemory:
    """The same tags in fewer bytes after a reward: the type of a report tells."""

    def randomize(agreed: Protocol, one: Trajectories) -> Any:
        report = protocol.randomize(agreed, one)
        return report.astype(np.int32) if one.rewards.any() else report

    return InMemory(randomize=randomize)


def a_tag_of_no_counter() -> InMemory:
    """One more than there are, after a reward."""

    def randomize(agreed: Protocol, one: Trajectories) -> IntArray:
        report = protocol.randomize(agreed, one)
        return np.append(report, agreed.query.size) if one.rewards.any() else report

    def analyze(agreed: Protocol, tags: IntArray, reports: int) -> FloatArray:
        return protocol.analyze(agreed, tags[tags < agreed.query.size], reports)

    return InMemory(randomize=randomize, analyze=analyze)


def an_estimate_that_is_no_number() -> InMemory:
    def analyze(agreed: Protocol, tags: IntArray, reports: int) -> FloatArray:
        estimates = protocol.analyze(agreed, tags, reports)
        estimates[1] = math.nan
        return estimates

    return InMemory(analyze=analyze)


FAULTS: list[tuple[Callable[[], InMemory], set[str]]] = [
    (halved, {"noise law"}),
    (halved_in_crowds, {"crowd"}),
    (over_half_the_counters, {"calibration"}),
    (fixed_seed, {"noise law", "freshness"}),
    (few_seeds, {"freshness"}),
    (seed_shared_by_users, {"noise law"}),
    (same_noise_on_all_counters, {"independence", "message counts"}),
    (report_counted_twice, {"schema"}),
    (true_tags_sent_twice, {"unbiasedness"}),
    (true_tags_instead_of_noise, {"unbiasedness"}),
    (half_of_the_users_without_noise, {"noise law", "message counts", "unbiasedness"}),
    (more_messages_for_rewards, {"message counts"}),
    (fixed_number_of_messages, {"message counts", "independence"}),
    (fewer_messages_after_one_action, {"message counts"}),
    (usual_numbers_of_messages_where_rewarded, {"message counts"}),
    (messages_left_in_order, {"permutation"}),
    (messages_rotated, {"permutation"}),
    (true_tags_first, {"schema"}),
    (integers_by_position, {"schema"}),
    (integers_in_pairs, {"schema"}),
    (integers_in_one_number, {"schema"}),
    (narrow_where_rewarded, {"schema"}),
    (a_tag_of_no_counter, {"schema"}),
    (an_estimate_that_is_no_number, {"schema"}),
]


@pytest.mark.parametrize(
    ("fault", "catchers"), mostly_slow(FAULTS, 3), ids=lambda value: getattr(value, "__name__", "")
)
def test_a_planted_fault_is_caught(fault: Callable[[], InMemory], catchers: set[str]) -> None:
    report = audit(CHEAP, samples=200, level=1e-6, system=fault())
    assert not report.passed
    assert catchers <= set(report.failures), str(report)


@pytest.mark.parametrize(
    "drops",
    [
        lambda query: len(query.reward_steps) < query.horizon,
        lambda query: len(query.transition_steps) < query.horizon - 1,
        lambda query: 0 < len(query.reward_steps) < query.horizon,
        lambda query: 0 < len(query.transition_steps) < query.horizon - 1,
        lambda query: not query.reward_steps,
        lambda query: not query.transition_steps,
        lambda query: query.touched_counters == 2,
    ],
    ids=["rewards", "transitions", "some rewards", "some transitions", "all rewards", "all transitions", "most"],
)
def test_half_the_noise_of_partial_queries_alone_is_caught(drops: Callable[[CountQuery], bool]) -> None:
    report = audit(CHEAP, samples=MIN_SAMPLES, level=1e-6, system=halved_where_asked_in_part(drops))
    assert report.failures == ("partial queries",), str(report)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0, 8.0])
def test_so_many_batches_of_a_crowd_show_half_its_noise(epsilon: float) -> None:
    """The exact chance that half of their Poisson tags pass the mean's part of the test, at level 1e-6 of all tests.

    One batch at epsilon 4 on half as many counters, as the network has it, would be missed four times in a hundred.
    """
    system = InMemory()
    with system.begin(Budget(epsilon, 1e-5), auditing.CROWD, CountQuery.everything(system.problem)) as session:
        awaited = auditing.transcripts(session, 1) * session.query.size * session.protocol.noise.mean
    furthest = stats.norm.isf(1e-6 / len(STATISTICAL) / 6 / 2)  # six parts: mean, counters and spread, of both counts
    assert stats.poisson.sf(math.floor(awaited - furthest * math.sqrt(awaited)), awaited / 2) < 1e-9


def test_noise_too_small_for_a_partial_query_is_caught() -> None:
    """Announced as drawn, so that the calibration alone shows it."""
    whole = CountQuery.everything(InMemory().problem).changed_counters

    def too_little(budget: Budget, changed: int) -> PoissonNoise:
        return PoissonNoise(calibrate(budget, changed).mean * (1.0 if changed == whole else 0.9))

    report = audit(CHEAP, samples=MIN_SAMPLES, level=1e-6, system=InMemory(calibrate=too_little))
    assert report.failures == ("partial queries",), str(report)


@pytest.fixture(scope="module")
def sound() -> AuditReport:
    return audit(BUDGET, samples=1000, level=1e-5)


@pytest.mark.slow
def test_the_sound_system_passes(sound: AuditReport) -> None:
    assert sound.passed, str(sound)
    assert {finding.name for finding in sound.tests} == DETERMINISTIC | STATISTICAL
    assert 0 <= sound.epsilon_lower_bound <= sound.claimed_epsilon


@pytest.mark.slow
def test_a_report_reads_well_and_fits_into_json(sound: AuditReport) -> None:
    text, values = str(sound), json.loads(json.dumps(sound.as_dict()))
    assert text.startswith("Audit passed\nAttacked: path protocol, the protocol's randomizer, shuffler and analyzer")
    assert "probability at most 1e-05" in text
    assert all(finding.name in text and finding.explanation in text for finding in sound.tests)
    assert set(values) == {
        "path", "attacked", "users", "claimed_epsilon", "epsilon_lower_bound", "refutable_epsilon", "visible_shortfall",
        "false_alarm_rate", "passed", "tests", "delta", "samples", "seconds",
    }  # fmt: skip
    assert values["false_alarm_rate"] == 1e-5
    assert f"a true epsilon above about {values['refutable_epsilon']:.3g} and noise that is" in text
    assert (values["claimed_epsilon"], values["delta"], values["samples"]) == (1.0, 1e-5, 1000)
    assert (values["path"], values["users"]) == ("protocol", 4)
    assert all(set(test) == {"name", "passed", "p_value", "explanation"} for test in values["tests"])


def test_a_failed_report_names_the_fault() -> None:
    report = audit(CHEAP, samples=MIN_SAMPLES, system=integers_in_pairs())
    assert str(report).startswith("Audit FAILED: schema")
    assert report.failures == ("schema",)
    assert report.epsilon_lower_bound == 0.0
    assert report.as_dict()["refutable_epsilon"] is report.as_dict()["visible_shortfall"] is None
    assert "could not have found anything else" in str(report)
    assert {finding.name for finding in report.tests} == DETERMINISTIC


@pytest.mark.slow
def test_a_factor_two_in_the_composition_shows_in_the_observers_errors() -> None:
    """Without looking at the calibration: the bound is about 2.46, give or take 0.08, where 2 is claimed."""
    budget, rng = Budget(2.0, 1e-5), np.random.default_rng(3)
    too_little = dataclasses.replace(
        over_half_the_counters(),
        randomize=lambda agreed, one: by_generator(agreed, one, rng),  # of the same law, and fast
        shuffle=lambda reports: rng.permutation(np.concatenate(list(reports))),
    )
    report = audit(budget, samples=8000, level=0.1, system=too_little)
    assert report.epsilon_lower_bound > budget.epsilon
    true_epsilon = privacy_loss(PoissonNoise(calibrate(budget, 6).mean / 2), 6).epsilon(budget.delta)
    assert budget.epsilon < report.refutable_epsilon < true_epsilon
    assert {"calibration", "epsilon", "privacy curve"} <= set(report.failures)
    p_values = {finding.name: finding.p_value for finding in report.tests}
    assert (p_values["noise law"] or 0.0) > 1e-6  # the noise is as declared; it is declared too small


@pytest.fixture(scope="module")
def played() -> Played:
    """400 pairs of batches with noise from a seed."""
    rng = np.random.default_rng(8)
    system = InMemory(randomize=lambda agreed, one: by_generator(agreed, one, rng))
    bench = Bench(CountQuery.everything(system.problem))
    with system.begin(CHEAP, USERS, bench.query) as session:
        found = bench.play(session, 400)
    assert not isinstance(found, str)
    return found


def test_an_observer_errs_as_rarely_as_can_be_on_either_batch(played: Played) -> None:
    """Which of two neighbours it was, from noise of this spread: halfway between them both errors are equally rare."""
    changed = played.bench.changed
    observer = Observer(played, "")
    least = stats.norm.sf(changed / 2 / math.sqrt(changed * observer.law.variance))
    assert np.array(observer.error_rates(0.0)) / 400 == pytest.approx(least, abs=0.1)


def test_a_report_that_comes_twice_is_as_improbable_as_that(played: Played) -> None:
    """Two of one trajectory are the same if their noise is on every counter; one of three tests finds it."""
    noise = stats.poisson(Observer(played, "").law.variance / USERS).pmf(np.arange(200))
    same, pairs = (noise @ noise) ** played.bench.query.size, 2 * math.comb(400, 2)
    finding = Observer(dataclasses.replace(played, repeated=True), "").tests(CHEAP, 1e-3)[1][-1]
    assert finding.name == "freshness"
    assert finding.p_value == pytest.approx(3 * pairs * same, rel=0.01, abs=0)
    assert not finding.passed


@pytest.mark.slow
def test_the_gaussian_reading_is_no_false_alarm() -> None:
    """At the observer's threshold calibrated Poisson noise shows no more than the Gaussian mu of the claim."""
    changed = 6
    for epsilon, delta in itertools.product((0.1, 0.5, 1.0, 2.0, 5.0, 10.0), (1e-3, 1e-5, 1e-8)):
        mean = calibrate(Budget(epsilon, delta), changed).mean * changed / 2
        false_alarms, misses = stats.skellam.sf(changed / 2, mean, mean), stats.skellam.cdf(-changed / 2, mean, mean)
        mu = float(-special.ndtri(false_alarms) - special.ndtri(misses))
        assert privacy_loss(GaussianNoise(math.sqrt(2) / mu), 2).epsilon(delta) <= epsilon


@pytest.mark.parametrize(("samples", "level"), [(200, 1e-3), (2000, 1e-4), (8000, 0.01)])
def test_the_stated_power_is_the_power(samples: int, level: float) -> None:
    """A Gaussian mechanism of the stated epsilon is refuted nine times in ten, by its binomial errors."""
    stated = refutable_epsilon(samples, BUDGET, level)
    mu = math.sqrt(2) / calibrate_gaussian(Budget(stated, BUDGET.delta), 2).sd
    errors = np.random.default_rng(5).binomial(samples, special.ndtr(-mu / 2), (2, 4000))
    bounds = sum(-special.ndtri(stats.beta.isf(level / 2, kind + 1, samples - kind)) for kind in errors)
    refuted = np.mean(bounds > math.sqrt(2) / calibrate_gaussian(BUDGET, 2).sd)
    assert 0.88 < refuted < 1.0  # the two kinds of error may make up for each other: more than nine in ten
    assert stated > BUDGET.epsilon
    assert refutable_epsilon(4 * samples, BUDGET, level) < stated


def test_the_stated_shortfall_is_seen_nine_times_in_ten() -> None:
    """In the number of noise tags alone, at a fifth of the level; 4,000 draws are off by less than 0.02."""
    tags, level = 30_000.0, 1e-4
    stated = visible_shortfall(tags, level)
    sent = np.random.default_rng(6).poisson((1 - stated) * tags, 4000)
    found = np.mean(2 * stats.norm.sf(abs(sent - tags) / math.sqrt(tags)) < level / 5)
    assert 0.88 < found < 0.92


def test_the_stated_shortfall_is_of_all_noise_that_was_sent() -> None:
    rng, sent = np.random.default_rng(7), 0

    def randomize(agreed: Protocol, one: Trajectories) -> IntArray:
        nonlocal sent
        report = by_generator(agreed, one, rng)
        sent += (len(report) - agreed.query.touched_counters) * (agreed.users == USERS and agreed.query.size == 24)
        return report

    report = audit(CHEAP, samples=MIN_SAMPLES, system=InMemory(randomize=randomize))
    level = report.false_alarm_rate / len(STATISTICAL)
    assert report.visible_shortfall == pytest.approx(visible_shortfall(sent, level), rel=0.02)


def test_too_few_samples_refute_nothing() -> None:
    assert refutable_epsilon(MIN_SAMPLES, Budget(100.0, 1e-5), 1e-3) == math.inf


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"samples": MIN_SAMPLES - 1}, "samples"),
        ({"samples": 1000.5}, "samples"),
        ({"users": 3}, "users"),
        ({"level": 0.0}, "level"),
        ({"level": 1.0}, "level"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        audit(BUDGET, **options)


def test_a_shuffled_multiset_of_integers_leaks_what_the_sum_hides() -> None:
    """Correction 1, exactly: n just above tau, one bit of one user, eps' = 1.

    Every user adds one noise bit of probability p. If z = bit + noise is sent, a 2 gives away that some bit was 1, and
    appears with probability p = tau/2n. Without a 2, the number of ones is left, as in the sum.
    """
    users, tau, factor = 1500, 1380.0, math.e
    noise = paper_noise(users, tau)
    p = noise.probability
    ones = np.arange(users + 2)
    # The user's bit is 1 in the data and 0 in the neighbour; all others' bits are 0.
    sum_data, sum_neighbour = stats.binom.pmf(ones - 1, users, p), stats.binom.pmf(ones, users, p)
    of_sum = np.maximum(sum_data - factor * sum_neighbour, 0).sum()
    no_two = (1 - p) * stats.binom.pmf(ones - 1, users - 1, p)
    of_multiset = p + np.maximum(no_two - factor * sum_neighbour, 0).sum()
    assert of_multiset == pytest.approx(0.46, abs=0.005)
    assert of_sum < 1e-70
