"""The protocol: its real transcript has the law of true counts plus the declared noise, and takes no seed.

Nothing here can be seeded; every statistical test fails a right protocol with probability 1e-7.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from shufflerl.arrays import FloatArray, IntArray
from shufflerl.counts import Counter, CountQuery, Trajectories
from shufflerl.errors import InvalidInputError
from shufflerl.mdp import MDP, Problem
from shufflerl.noise import BinomialNoise, GaussianNoise, NoNoise, PoissonNoise, UnaryNoise
from shufflerl.population import TrajectoryPopulation
from shufflerl.privacy import protocol
from shufflerl.privacy.accounting import paper_noise
from shufflerl.privacy.protocol import Protocol, analyze, randomize, shuffle
from tests.support.examples import full_batch, mdps

LEVEL = 1e-7
USERS = 4
QUERY = CountQuery.everything(Problem(horizon=2, n_states=2, n_actions=2, episodes=1))
#: What three users did; the fourth did as the first.
PLAYED = [
    Trajectories([[0, 0]], [[0, 1]], [[0, 1]]),
    Trajectories([[0, 1]], [[1, 1]], [[1, 1]]),
    Trajectories([[1, 0]], [[0, 0]], [[0, 0]]),
    Trajectories([[0, 0]], [[0, 1]], [[0, 1]]),
]
TRUE = np.bincount(np.concatenate([QUERY.tags(one)[0] for one in PLAYED]), minlength=QUERY.size)

NOISES: dict[str, PoissonNoise | BinomialNoise] = {
    "poisson": PoissonNoise(9.7),
    "poisson, rare": PoissonNoise(0.4),
    "binomial, fair bits": paper_noise(USERS, tau=21.0),
    "binomial, rare bits": paper_noise(USERS, tau=1.5),
}


def transcript(agreed: Protocol, users: Sequence[Trajectories]) -> FloatArray:
    return analyze(agreed, shuffle([randomize(agreed, one) for one in users]), len(users))


@pytest.mark.slow
@pytest.mark.parametrize("name", NOISES)
def test_the_transcript_has_the_law_of_the_simulation(name: str) -> None:
    """Counter by counter: what the analyzer gives, less the true counts, follows the law that `Noise.sample` draws."""
    noise, runs = NOISES[name], 2500
    agreed = Protocol(QUERY, USERS, noise)
    errors = np.stack([transcript(agreed, PLAYED) for _ in range(runs)]) - TRUE
    counts = np.rint(errors + noise.mean).astype(np.int64)
    assert np.abs(counts - noise.mean - errors).max() < 1e-9

    law = stats.poisson(noise.mean) if isinstance(noise, PoissonNoise) else stats.binom(noise.trials, noise.probability)
    simulated = np.rint(noise.sample(np.random.default_rng(0), (runs, QUERY.size)) + noise.mean).astype(np.int64)
    ends = np.unique(law.ppf(np.arange(1, 12) / 12))
    expected = runs * np.diff(law.cdf(ends), prepend=0.0, append=1.0)
    assert (expected > 50).all()
    for drawn in (counts, simulated):
        cells = np.searchsorted(ends, drawn)
        for counter in range(QUERY.size):
            observed = np.bincount(cells[:, counter], minlength=len(expected))
            statistic = ((observed - expected) ** 2 / expected).sum()
            assert stats.chi2.sf(statistic, len(expected) - 1) > LEVEL / QUERY.size

    # Independent counters: their sum has the law of as many more noise bits.
    whole = noise.repeated(QUERY.size)
    sums = errors.sum(axis=1)
    assert abs(sums.mean()) < 5.5 * whole.sd / np.sqrt(runs)
    assert stats.chi2.sf((sums**2).sum() / whole.variance, runs) > LEVEL
    assert stats.chi2.cdf((sums**2).sum() / whole.variance, runs) > LEVEL


def assert_declared(drawn: IntArray, noise: PoissonNoise | BinomialNoise) -> None:
    """How often each counter was raised by noise, by mean and spread, which tell of few draws as well."""
    size = drawn.size
    assert abs(drawn.mean() - noise.mean) < 5.4 * noise.sd / np.sqrt(size)
    spread = ((drawn - noise.mean) ** 2).sum() / noise.variance
    assert min(stats.chi2.sf(spread, size), stats.chi2.cdf(spread, size)) > LEVEL / 2


@pytest.mark.parametrize(
    ("users", "noise"),
    [
        (users, noise)
        for users in (1, 999, 1000, 10_000)
        for noise in (PoissonNoise(307.1), paper_noise(users, 2.5 * users), paper_noise(users, 0.3 * users))
        if users in (999, 1000) or isinstance(noise, PoissonNoise)
    ],
    ids=str,
)
def test_the_noise_of_a_crowd_is_what_is_declared(users: int, noise: PoissonNoise | BinomialNoise) -> None:
    """All users' on one counter together, whatever their number, in what they send and in what is made of it."""
    agreed, played = Protocol(QUERY, users, noise), [PLAYED[user % len(PLAYED)] for user in range(users)]
    true = np.bincount(np.concatenate([QUERY.tags(one)[0] for one in played]), minlength=QUERY.size)
    for _ in range(20 if users == 1 else 1):
        tags = shuffle([randomize(agreed, one) for one in played])
        assert_declared(np.bincount(tags, minlength=QUERY.size) - true, noise)
        estimates = analyze(agreed, tags, users)
        np.testing.assert_allclose(estimates, np.bincount(tags, minlength=QUERY.size) - noise.mean, rtol=1e-9)


@pytest.mark.parametrize(
    "noise", [PoissonNoise(307.1), paper_noise(600, 301.0), paper_noise(1, 25_000.0)], ids=["poisson", "rare", "fair"]
)
def test_the_noise_is_what_is_declared_whatever_steps_are_asked_for(noise: PoissonNoise | BinomialNoise) -> None:
    """In each of the 31 queries for some of three steps, on its counters alone; all together fail in 3e-6."""
    problem = Problem(horizon=3, n_states=2, n_actions=1, episodes=1)
    users = noise.trials if isinstance(noise, BinomialNoise) and noise.probability != 0.5 else 1
    episode = Trajectories([[0, 1, 1]], [[0, 0, 0]], [[1, 0, 1]])
    for moves, pays in itertools.product(itertools.product((0, 1), repeat=2), itertools.product((0, 1), repeat=3)):
        if any(moves + pays):
            query = CountQuery(problem, np.flatnonzero(moves), np.flatnonzero(pays))
            agreed, true = Protocol(query, users, noise), np.bincount(query.tags(episode)[0], minlength=query.size)
            reports = [randomize(agreed, episode) for _ in range(users)]
            assert_declared(np.bincount(np.concatenate(reports), minlength=query.size) - users * true, noise)


@pytest.mark.parametrize("total", [4999.0, 5001.0, 12_000.0, 1e6])
def test_a_report_of_much_noise_has_all_of_it(total: float) -> None:
    """Of one user, whose noise is drawn at once for all counters."""
    noise = PoissonNoise(total / QUERY.size)
    agreed, true = Protocol(QUERY, 1, noise), np.bincount(QUERY.tags(PLAYED[0])[0], minlength=QUERY.size)
    runs = max(4, min(60, int(2e6 / total)))
    drawn = np.stack([np.bincount(randomize(agreed, PLAYED[0]), minlength=QUERY.size) - true for _ in range(runs)])
    assert_declared(drawn, noise)
    assert_declared(drawn.sum(axis=1), PoissonNoise(total))


@pytest.mark.slow
@pytest.mark.parametrize("name", NOISES)
def test_estimates_are_unbiased(name: str) -> None:
    noise, runs = NOISES[name], 1500
    agreed = Protocol(QUERY, USERS, noise)
    total = sum(transcript(agreed, PLAYED) for _ in range(runs))
    scores = (total - runs * TRUE) / (noise.sd * np.sqrt(runs))
    assert stats.chi2.sf((scores**2).sum(), QUERY.size) > LEVEL


@given(mdp=mdps, users=st.integers(1, 5), mean=st.floats(0.01, 20))
@settings(max_examples=25, deadline=None)
def test_a_report_is_the_true_tags_and_more_in_increasing_order(mdp: MDP, users: int, mean: float) -> None:
    """Sorted tags are a function of how often each was sent, so the order tells nothing more."""
    batch = full_batch(mdp, users)
    played = TrajectoryPopulation(mdp, 0).trajectories(batch)
    agreed = Protocol(batch.query, users, PoissonNoise(mean))
    one = Trajectories(played.states[:1], played.actions[:1], played.rewards[:1])
    report = randomize(agreed, one)
    assert report.ndim == 1
    assert np.issubdtype(report.dtype, np.integer)
    assert (np.diff(report) >= 0).all()
    counts = np.bincount(report, minlength=batch.query.size)
    assert len(counts) == batch.query.size
    assert (counts[batch.query.tags(one)[0]] >= 1).all()


@given(reports=st.lists(st.lists(st.integers(0, 30), max_size=20), max_size=5))
@settings(deadline=None)
def test_a_shuffled_batch_is_its_reports_messages(reports: list[list[int]]) -> None:
    batch = shuffle(np.array(report, dtype=np.int64) for report in reports)
    assert batch.dtype == np.int64
    assert sorted(batch.tolist()) == sorted(tag for report in reports for tag in report)


def test_a_shuffled_batch_forgets_who_sent_what() -> None:
    """Of ten numbered messages each lands on each place equally often."""
    runs, size = 6000, 10
    places = np.zeros((size, size))
    for _ in range(runs):
        places[np.arange(size), np.argsort(shuffle([np.arange(4), np.arange(4, size)]))] += 1
    # Entries of a uniform permutation matrix have covariance (I - 1/m) x (I - 1/m) / (m - 1).
    statistic = (size - 1) * ((places - runs / size) ** 2).sum() / runs
    assert stats.chi2.sf(statistic, (size - 1) ** 2) > LEVEL


@pytest.mark.slow
@pytest.mark.parametrize("name", NOISES)
def test_the_number_of_messages_is_as_stated_and_depends_on_no_data(name: str) -> None:
    noise, runs = NOISES[name], 4000
    agreed = Protocol(QUERY, USERS, noise)
    expected = agreed.messages_per_user
    assert expected == pytest.approx(QUERY.touched_counters + QUERY.size * noise.mean / USERS)
    deviation = np.sqrt(QUERY.size * noise.variance / USERS / runs)
    for one in PLAYED[:2]:
        mean = np.mean([len(randomize(agreed, one)) for _ in range(runs)])
        assert abs(mean - expected) < 5.5 * deviation


def test_messages_per_user_by_hand() -> None:
    """Three counters touched, 24 counters, 9.6 noise tags on each shared by 4 users."""
    assert Protocol(QUERY, 4, PoissonNoise(9.6)).messages_per_user == pytest.approx(3 + 24 * 2.4)
    assert Protocol(QUERY, 4, BinomialNoise(40, 0.5)).messages_per_user == 3 + 24 * 5


def test_two_runs_on_the_same_data_differ() -> None:
    """Reports of 500 noise tags on 24 counters agree with probability below 1e-25."""
    agreed = Protocol(QUERY, 1, PoissonNoise(500 / 24))
    first, second = (randomize(agreed, PLAYED[0]).tolist() for _ in range(2))
    assert first != second


def test_a_counter_is_raised_by_who_touched_it() -> None:
    """With hardly any noise (none at all but for one run in 1e8), the estimates are the true counts."""
    agreed = Protocol(QUERY, USERS, PoissonNoise(1e-8 / QUERY.size))
    estimates = transcript(agreed, PLAYED)
    np.testing.assert_allclose(estimates, TRUE, atol=1e-6)
    assert estimates[QUERY.tag(Counter("transition", 0, 0, 0, 0))] == pytest.approx(2)
    assert estimates[QUERY.tag(Counter("reward", 1, 1, 1, 1))] == pytest.approx(1)


def test_the_analyzer_subtracts_the_noise_of_the_reports_that_came() -> None:
    agreed = Protocol(QUERY, 10, PoissonNoise(20.0), honest_fraction=0.1)
    np.testing.assert_allclose(analyze(agreed, np.empty(0, dtype=np.int64), 1), -2.0)
    np.testing.assert_allclose(analyze(agreed, [], 10), -20.0)


@pytest.mark.parametrize(
    ("users", "fraction", "fewest"),
    [(10, 1.0, 10), (10, 0.5, 5), (10, 0.1, 1), (10, 0.7, 7), (6, 5 / 6, 5), (10, 0.41, 5), (3, 0.01, 1)],
)
def test_fewer_reports_than_the_noise_was_sized_for_release_nothing(users: int, fraction: float, fewest: int) -> None:
    agreed = Protocol(QUERY, users, PoissonNoise(20.0), fraction)
    assert agreed.min_reports == fewest
    for enough in (fewest, users):
        assert analyze(agreed, [0], enough).shape == (QUERY.size,)
    for wrong in {fewest - 1, users + 1} - {0}:
        with pytest.raises(InvalidInputError, match=f"reports is {wrong}; expected at least {fewest}"):
            analyze(agreed, [0], wrong)


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.5, np.nan, True, None])
def test_a_senseless_honest_fraction_is_refused(fraction: float) -> None:
    with pytest.raises(InvalidInputError, match=r"honest_fraction is .* in \(0, 1\]\."):
        Protocol(QUERY, USERS, PoissonNoise(1.0), fraction)


@pytest.mark.parametrize("noise", [GaussianNoise(2.0), NoNoise(), UnaryNoise(USERS, 3, 0.2), None])
def test_noise_that_is_not_made_of_bits_is_refused(noise: Any) -> None:
    with pytest.raises(InvalidInputError, match="cannot be sent as bits; expected PoissonNoise or BinomialNoise"):
        Protocol(QUERY, USERS, noise)


@pytest.mark.parametrize(
    ("tags", "said"),
    [
        (np.array([0, QUERY.size]), "outside"),
        (np.array([-1, 3]), "outside"),
        (np.array([0.0, 1.0]), "row of integers"),
        (np.array([True, False]), "row of integers"),
        (np.array([[0, 1]]), "row of integers"),
        (np.array(3), "row of integers"),
        (np.array(["1"]), "row of integers"),
    ],
    ids=["too large", "negative", "floats", "booleans", "pairs", "no row", "text"],
)
def test_the_analyzer_refuses_what_is_no_tag(tags: IntArray, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        analyze(Protocol(QUERY, USERS, PoissonNoise(1.0)), tags, USERS)


@pytest.mark.parametrize("reports", [0, -1, 1.5, True])
def test_the_analyzer_refuses_a_senseless_number_of_reports(reports: int) -> None:
    with pytest.raises(InvalidInputError, match="reports"):
        analyze(Protocol(QUERY, USERS, PoissonNoise(1.0), 0.1), [0], reports)


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        (Trajectories([[0, 0], [1, 1]], [[0, 0], [1, 1]], [[0, 0], [1, 1]]), "2 trajectories; expected one"),
        (Trajectories(*np.zeros((3, 0, 2), dtype=int)), "0 trajectories; expected one"),
        (Trajectories([[0, 2]], [[0, 0]], [[0, 0]]), "do not fit"),
        (Trajectories([[0, 0]], [[0, 5]], [[0, 0]]), "do not fit"),
        (Trajectories([[0, 0, 0]], [[0, 0, 0]], [[0, 0, 0]]), "do not fit"),
    ],
    ids=["two users", "nobody", "state", "action", "steps"],
)
def test_the_randomizer_refuses_what_is_no_users_trajectory(given_: Trajectories, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        randomize(Protocol(QUERY, USERS, PoissonNoise(1.0)), given_)


def test_the_randomizer_refuses_a_transition_outside_the_support() -> None:
    support = np.array([[[[True, False]], [[True, True]]]])
    query = CountQuery.everything(Problem(horizon=2, n_states=2, n_actions=1, episodes=1, support=support))
    one = Trajectories([[0, 1]], [[0, 0]], [[0, 0]])
    with pytest.raises(InvalidInputError, match="support"):
        randomize(Protocol(query, 1, PoissonNoise(1.0)), one)


@pytest.mark.parametrize(
    ("noise", "users"),
    [(BinomialNoise(10, 0.5), 4), (BinomialNoise(8, 0.3), 4), (BinomialNoise(3, 0.3), 4)],
    ids=["not a multiple", "several rare bits", "fewer bits than users"],
)
def test_binomial_noise_that_cannot_be_shared_is_refused(noise: BinomialNoise, users: int) -> None:
    with pytest.raises(InvalidInputError, match="cannot be shared"):
        Protocol(QUERY, users, noise)


def test_a_protocol_needs_users() -> None:
    with pytest.raises(InvalidInputError, match="users"):
        Protocol(QUERY, 0, PoissonNoise(1.0))


def test_no_piece_takes_a_seed_or_a_generator() -> None:
    """Whatever a caller passes, deployed noise cannot come from a generator: there is no argument for one."""
    parameters = {
        piece.__name__: list(inspect.signature(piece).parameters) for piece in (Protocol, randomize, shuffle, analyze)
    }
    assert parameters == {
        "Protocol": ["query", "users", "noise", "honest_fraction"],
        "randomize": ["protocol", "episode"],
        "shuffle": ["reports"],
        "analyze": ["protocol", "tags", "reports"],
    }
    assert not {"random", "Generator", "default_rng"} & set(vars(protocol))


def test_there_is_no_integer_message() -> None:
    """Correction 1: a user who raises a counter by several sends its tag as often; no message carries a number."""
    agreed = Protocol(QUERY, 1, PoissonNoise(50.0))
    report = randomize(agreed, PLAYED[0])
    assert report.max() < QUERY.size
    assert len(report) > 5 * QUERY.size  # 1200 noise tags expected: far more messages than counters
    pairs = np.stack(np.unique(report, return_counts=True), axis=1)
    with pytest.raises(InvalidInputError, match="row of integers"):
        analyze(agreed, pairs, 1)


@pytest.mark.parametrize("states", [2, 8, 20])
def test_noise_does_not_depend_on_how_many_counters_there_are(states: int) -> None:
    """Of up to 3,680 counters: tags in all are Poisson, outside six deviations with probability 2e-9."""
    query = CountQuery.everything(Problem(3, states, 4, 1))
    agreed = Protocol(query, 5, PoissonNoise(20.0))
    episode = Trajectories(*np.zeros((3, 1, 3), dtype=np.int64))
    drawn = sum(len(randomize(agreed, episode)) - query.touched_counters for _ in range(5))
    expected = query.size * 20.0
    assert abs(drawn - expected) < 6 * np.sqrt(expected)
