"""The optimistic learner: its contract, its schedule, how far it looks, and what it recovers from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from shufflerl import envs, learners, planning, privatizers
from shufflerl.counts import Counts, Query, Release
from shufflerl.errors import InvalidInputError, StateMismatchError
from shufflerl.experiments.suite.definition import ENVIRONMENTS
from shufflerl.history import History
from shufflerl.learners.base import Learner
from shufflerl.learners.optimistic import Optimistic, schedule
from shufflerl.learners.optimistic.constants import CONSTANTS as C
from shufflerl.learners.optimistic.planner import plan_batch
from shufflerl.learners.optimistic.rows import information, visits_for, worth_trying
from shufflerl.loop import learn
from shufflerl.mdp import MDP, Problem, homogeneous
from shufflerl.noise import Noise, PoissonNoise
from shufflerl.population import CountPopulation
from shufflerl.privacy.certificate import Certificate
from shufflerl.privatizers.base import Privatizer
from shufflerl.testing import LearnerContract
from tests.support.examples import random_mdp

DOCS = Path(__file__).parents[3] / "docs"


class TestContract(LearnerContract):
    def make(self, problem: Problem, seed: int = 0) -> Learner:
        return Optimistic(problem, seed)


class TestPrivate(LearnerContract):
    def make(self, problem: Problem, seed: int = 0) -> Learner:
        return Optimistic(problem, seed)

    def privatizer(self) -> Privatizer:
        return privatizers.make("shuffle", self.learner(), epsilon=3.0, delta=1e-5, seed=8)


class TestKnownSupport(TestContract):
    mdp = random_mdp(21, horizon=4, states=4, actions=2, sparse=True, start=0)


class TestBandit(TestContract):
    mdp = random_mdp(21, horizon=1, states=1, actions=5)


class TestSeveralStarts(TestContract):
    mdp = random_mdp(21, horizon=3, states=3, actions=2)


class TestFirstBatch(TestContract):
    def make(self, problem: Problem, seed: int = 0) -> Learner:
        return Optimistic(problem, seed, first=30)


def _riverswim() -> MDP:
    mdp = envs.make("riverswim")
    assert isinstance(mdp, MDP)
    return mdp


def _parties(
    mdp: MDP,
    episodes: int,
    seed: int,
    epsilon: float | None = 1.0,
    name: str = "shuffle",
    first: int = 4,
    batches: int | None = None,
    delta: float = 1e-5,
) -> tuple[Optimistic, CountPopulation, Privatizer]:
    users, noise, own = np.random.SeedSequence(seed).spawn(3)
    learner = Optimistic(mdp.problem(episodes), own, batches, first)
    privatizer = (
        privatizers.make("none")
        if epsilon is None or name == "none"
        else privatizers.make(name, learner, epsilon=epsilon, delta=delta, seed=noise)
    )
    return learner, CountPopulation(mdp, users), privatizer


def _run(mdp: MDP, episodes: int, seed: int, epsilon: float | None = 1.0, name: str = "shuffle") -> History:
    return learn(*_parties(mdp, episodes, seed, epsilon, name))


# What it reaches.


@pytest.mark.parametrize(("epsilon", "most"), [(None, 25), (5.0, 160), (1.0, 520)])
def test_it_learns_riverswim(epsilon: float | None, most: float) -> None:
    """Ten seeds within 1.3 of the limit for the mean of a hundred; playing at random loses about 9,000."""
    runs = [_run(_riverswim(), 20_000, seed, epsilon) for seed in range(10)]
    assert np.mean([run.total_regret for run in runs]) < 1.3 * most
    assert all(run.switches < (40 if epsilon else 80) for run in runs)


def test_it_loses_far_less_than_elimination() -> None:
    """The limit for SDP-PE at this budget is 3,600."""
    ours, theirs = [], []
    for seed in range(2):
        _, population, _ = _parties(_riverswim(), 20_000, seed)
        rival = learners.make("sdp-pe", _riverswim().problem(20_000), seed)
        noisy = privatizers.make("shuffle", rival, epsilon=1.0, delta=1e-5, seed=seed)
        theirs.append(learn(rival, population, noisy).total_regret)
        ours.append(_run(_riverswim(), 20_000, seed).total_regret)
    assert max(ours) < 0.4 * min(theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_it_beats_playing_at_random_everywhere(name: str) -> None:
    """Of what playing at random loses, at epsilon 1: measured at most 0.6 (FrozenLake, which nobody learns)."""
    environment, options = ENVIRONMENTS[name]
    mdp = envs.make(environment, 1, **options)
    assert isinstance(mdp, MDP)
    aimless = MDP(
        mdp.transitions.mean(axis=2, keepdims=True), mdp.rewards.mean(axis=2, keepdims=True), mdp.start
    ).optimal_value
    assert _run(mdp, 20_000, 0).total_regret < 0.7 * 20_000 * (mdp.optimal_value - aimless)


@pytest.mark.parametrize("name", [name for name, _ in privatizers.PRIVATIZERS])
def test_it_works_with_every_privatizer(name: str) -> None:
    mdp = _riverswim()
    first, again = (_run(mdp, 2000, 0, 8.0, name) for _ in range(2))
    assert first.users.sum() == 2000
    np.testing.assert_array_equal(first.regret, again.regret)


# The schedule.


@settings(max_examples=300, deadline=None)
@given(episodes=st.integers(1, 10**18), noise=st.floats(0, 1e6))
def test_every_episode_is_in_the_schedule(episodes: int, noise: float) -> None:
    sizes = schedule(episodes, noise, 40)
    assert sizes.sum() == episodes
    assert sizes.min() >= 1
    assert len(sizes) <= 40 <= Optimistic(Problem(1, 1, 1, 1), 0).max_batches


@pytest.mark.parametrize("noise", [0.0, 10.0])
def test_batches_grow_from_what_can_be_heard_through_the_noise(noise: float) -> None:
    """The growth of their logarithm is even: its own differences are all the same, where sizes are hardly rounded."""
    sizes = schedule(10**6, noise, 40)
    assert len(sizes) == 40
    assert sizes[0] == pytest.approx(max(2, 6 * noise), abs=1)
    growth = np.diff(np.log(sizes[sizes > 500]))
    np.testing.assert_allclose(np.diff(growth), np.diff(growth).mean(), atol=5e-3)


@pytest.mark.parametrize("page", ["optimistic.md", "reproduce-rules.md", "suite.md"])
def test_pages_say_how_many_constants_there_are(page: str) -> None:
    assert f"{len(C)} constants" in (DOCS / page).read_text("utf-8")


@pytest.mark.parametrize(
    ("batches", "power"), [(3, 2.2), (5, 2.0), (8, 1.7), (10, 1.5), (12, 1.3), (40, 1.25), (80, 1.25)]
)
def test_the_fewer_batches_the_later_they_grow(batches: int, power: float) -> None:
    sizes = np.log(schedule(10**15, 1000.0, batches))
    places = np.arange(batches) / (batches - 1)
    np.testing.assert_allclose((sizes - sizes[0]) / (sizes[-1] - sizes[0]), places**power, atol=1e-4)


@settings(max_examples=100, deadline=None)
@given(episodes=st.integers(10**4, 10**9), noise=st.floats(0, 50), batches=st.integers(3, 39))
def test_the_fewer_batches_the_larger_is_the_first(episodes: int, noise: float, batches: int) -> None:
    fewer, more = (schedule(episodes, noise, count) for count in (batches, batches + 1))
    assert fewer[0] >= more[0]
    assert (np.diff(fewer) >= -1).all()  # but for rounding


def test_all_batches_are_sized_by_the_noise_that_is_expected() -> None:
    """The first too: whoever drives a learner without telling it gets a few users first, to hear of the noise."""
    problem, noise = _riverswim().problem(20_000), PoissonNoise(400.0)
    told, untold = Optimistic(problem, 0, 5), Optimistic(problem, 0, 5)
    told.expect(noise)
    assert told.sizes.tolist() == schedule(20_000, 20.0, 5).tolist()
    assert untold.sizes.tolist() == [4]
    told.next_batch()
    told.expect(PoissonNoise(1.0))  # too late
    assert told.sizes.tolist() == schedule(20_000, 20.0, 5).tolist()


@pytest.mark.slow(1.5)
@pytest.mark.parametrize(("batches", "most"), [(3, 1250), (5, 760), (12, 520)])
def test_few_batches_are_enough(batches: int, most: float) -> None:
    """Ten seeds within 1.3 of the limit for the mean of a hundred."""
    runs = [learn(*_parties(_riverswim(), 20_000, seed, batches=batches)) for seed in range(10)]
    assert all(len(run) == batches for run in runs)
    assert np.mean([run.total_regret for run in runs]) < 1.3 * most


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What every batch is planned with."""
    seen = []

    def spy(*arguments: Any) -> Any:
        seen.append(arguments)
        return plan_batch(*arguments)

    monkeypatch.setattr("shufflerl.learners.optimistic.learner.plan_batch", spy)
    return seen


def test_where_users_begin_is_learned_if_nobody_tells(plans: list[Any]) -> None:
    """Of 20,000 users 0.02 is more than four standard errors, those of the noise included."""
    mdp = random_mdp(21, horizon=3, states=3, actions=2)
    learner = Optimistic(Problem(3, 3, 2, 20_000), 0)
    privatizer = privatizers.make("shuffle", learner, epsilon=5.0, delta=1e-5, seed=1)
    learn(learner, CountPopulation(mdp, seed=1), privatizer)
    np.testing.assert_array_equal(plans[0][1], np.full(3, 1 / 3))
    np.testing.assert_allclose(plans[-1][1], mdp.start, atol=0.02)


def test_where_there_is_no_room_there_is_one_batch() -> None:
    assert schedule(100, 1000.0, 40).tolist() == [100]


@settings(max_examples=300, deadline=None)
@given(
    episodes=st.integers(5, 10**18),
    noise=st.floats(0, 1e6),
    batches=st.integers(1, 100),
    least=st.integers(5, 10**4),
)
def test_no_batch_is_smaller_than_a_network_mixes(episodes: int, noise: float, batches: int, least: int) -> None:
    """A shuffler refuses smaller ones, and the run would stand still."""
    (first,) = Optimistic(Problem(1, 1, 1, episodes), 0, batches, least).sizes
    assert first >= min(least, episodes)
    if first < episodes:
        sizes = schedule(episodes - int(first), noise, batches, least)
        assert len(sizes) <= batches
        assert sizes.sum() == episodes - first
        assert sizes.min() >= least


@pytest.mark.parametrize(("episodes", "epsilon"), [(20_000, 5.0), (20_000, None), (150, 1.0)])
def test_no_batch_of_a_run_is_smaller_than_the_first_that_was_asked_for(episodes: int, epsilon: float | None) -> None:
    history = learn(*_parties(_riverswim(), episodes, 0, epsilon, first=100, batches=20))
    assert history.users.min() >= 100
    assert history.users.sum() == episodes


def test_a_network_may_ask_for_few_batches() -> None:
    history = learn(*_parties(_riverswim(), 5000, 0, batches=6))
    assert len(history) <= 6


@pytest.mark.parametrize("episodes", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("epsilon", [None, 1.0, 0.01])
def test_a_handful_of_episodes_is_enough(episodes: int, epsilon: float | None) -> None:
    """Down to one user, and with noise of many times all users."""
    for mdp in (_riverswim(), random_mdp(0, 1, 1, 3), random_mdp(0, 3, 3, 2, sparse=True)):
        history = _run(mdp, episodes, 0, epsilon)
        assert history.users.sum() == episodes


def test_the_first_batch_can_be_larger() -> None:
    learner, population, privatizer = _parties(_riverswim(), 1000, 0, epsilon=5.0, first=100)
    assert learn(learner, population, privatizer).users[0] == 100
    with pytest.raises(InvalidInputError, match="first is 0"):
        Optimistic(_riverswim().problem(10), 0, first=0)
    with pytest.raises(StateMismatchError, match="parameters"):
        Optimistic(_riverswim().problem(1000), 0).restore(learner.save())


# How optimistic.


@settings(deadline=None)
@given(users=st.floats(1, 1e9), left=st.floats(1, 1e18))
def test_what_is_worth_trying_solves_its_equation(users: float, left: float) -> None:
    """What a try costs, n z, is what it gains, R psi(z)."""
    z = worth_trying(users, left)

    def net(z: float) -> float:
        return float(left * (stats.norm.pdf(z) - z * stats.norm.sf(z)) - users * z)

    assert net(max(0.0, z - 2e-3)) > 0 > net(z + 2e-3)


@settings(deadline=None)
@given(visits=st.floats(1, 1e9), noise=st.floats(0, 1e12))
def test_so_many_visits_tell_so_much(visits: float, noise: float) -> None:
    """The mean of m users' rewards, of variance C.typical, and of one counter's noise."""
    assert 1 / information(visits, noise) == pytest.approx(C.typical / visits + noise / visits**2)
    assert visits_for(information(visits, noise), noise) == pytest.approx(visits)


def test_nothing_is_worth_trying_in_the_end_and_little_in_large_batches() -> None:
    assert worth_trying(10.0, 0.0) == 0
    tries = [worth_trying(float(n), 1e4) for n in (1, 10, 100, 1000, 10**4)]
    assert np.all(np.diff(tries) < 0)


@pytest.mark.parametrize(("epsilon", "episodes"), [(None, 60), (0.5, 1000)])
@pytest.mark.parametrize("seed", range(6))
def test_the_last_batch_commits_to_the_best_policy_of_the_posterior(
    epsilon: float | None, episodes: int, seed: int
) -> None:
    """However little is known by then."""
    for mdp in (_riverswim(), random_mdp(3, 4, 4, 3), random_mdp(3, 4, 4, 3, sparse=True)):
        learner, population, privatizer = _parties(mdp, episodes, seed, epsilon)
        while (batch := learner.next_batch()) is not None and batch.users < learner.episodes_left:
            learner.observe(privatizer.release(population.play(batch)))
        assert batch is not None
        assert len(batch.mixture.policies) == 1
        transitions, rewards = mdp.layout.table(learner.model.probabilities), learner.model.rows.rewards
        best = MDP(transitions, rewards, mdp.start).optimal_value
        played = planning.policy_values(transitions, rewards, mdp.start, batch.mixture.policies)
        assert played[0] == pytest.approx(best)


def test_before_any_data_every_action_is_as_likely() -> None:
    """400 first decisions among four: the chi-square test fails by chance with probability 1e-4."""
    problem = Problem(4, 10, 4, 100)
    chosen = np.zeros(4)
    for seed in range(10):
        batch = Optimistic(problem, seed).next_batch()
        assert batch is not None
        chosen += np.bincount(batch.mixture.policies.ravel(), minlength=4)
    assert stats.chisquare(chosen).pvalue > 1e-4


def test_before_the_last_batch_it_tries_what_is_not_known() -> None:
    """Ten arms that nobody has seen are all tried, one after the other, before any is committed to."""
    bandit = MDP(np.empty((0, 1, 10, 1)), [[np.linspace(0.1, 0.9, 10)]], [1.0])
    history = _run(bandit, 20_000, 0)
    assert len({int(policy[0, 0]) for b in range(15) for policy in history.mixture(b).policies}) >= 8


@pytest.mark.parametrize("sizes", [[], [4], [4, -5, 2001], [4, 140, 10_000]])
def test_a_saved_schedule_that_does_not_fit_is_refused(sizes: list[int]) -> None:
    learner, population, privatizer = _parties(_riverswim(), 2000, 0)
    learn(learner, population, privatizer, batches=2)
    values, arrays = learner._state()
    with pytest.raises(StateMismatchError, match="no fitting sizes"):
        learner._load_state(values | {"sizes": sizes}, arrays)


@pytest.mark.parametrize("epsilon", [None, 5.0])
def test_the_shares_of_a_batch_are_whole_users(epsilon: float | None) -> None:
    learner, population, privatizer = _parties(_riverswim(), 20_000, 0, epsilon)
    mixed = 0
    while (batch := learner.next_batch()) is not None:
        shares = batch.mixture.weights * batch.users
        np.testing.assert_allclose(shares, np.rint(shares), atol=1e-6)
        assert shares.min() >= 1
        mixed += len(shares) > 1
        learner.observe(privatizer.release(population.play(batch)))
    assert mixed > 10


# What it survives.


def test_a_first_batch_of_one_user_that_is_all_noise_is_survived() -> None:
    regrets = [learn(*_parties(_riverswim(), 20_000, seed, first=1)).total_regret for seed in range(5)]
    assert np.mean(regrets) < 1.5 * 520


@pytest.mark.slow(5)
def test_hardly_visited_states_do_not_underflow() -> None:
    """Half of the users leave a state for good at every step; after 600 the square of those left is zero."""
    leaving = homogeneous(
        [[[1.0, 0.0]] * 2, [[0.5, 0.5]] * 2], [[0.1, 0.2], [0.9, 0.5]], 600, [0.0, 1.0], known_support=True
    )
    learner, population, privatizer = _parties(leaving, 10**6, 0, epsilon=8.0, batches=3, delta=1e-7)
    learn(learner, population, privatizer)
    visits = learner.model.visits[:, 1].sum(axis=-1)
    np.testing.assert_allclose(visits[:8], 10**6 * 0.5 ** np.arange(8), rtol=0.05)
    assert visits[-1] < 1e-100


class Unlucky(Privatizer):
    """Honest, but for the first batch after the very first that plays the best of one state's actions.

    That one makes it look worse by `deviations` standard errors, at all steps that played it and asked for rewards.
    """

    name = "unlucky"

    def __init__(self, honest: Privatizer, mdp: MDP, deviations: float) -> None:
        self.honest, self.mdp, self.deviations = honest, mdp, deviations
        self.planted = False

    def release(self, counts: Counts) -> Release:
        release, batch = self.honest.release(counts), counts.batch
        best = self.mdp.rewards[0, 0].argmax()
        users = batch.users * (batch.mixture.weights @ (batch.mixture.policies[..., 0] == best))  # at every step
        users *= batch.table_query.asked[1]
        if self.planted or batch.index == 0 or not users.any():
            return release
        self.planted = True
        mean = self.mdp.rewards[0, 0, best]
        error = self.deviations * np.sqrt(release.noise.variance / 2 + users * mean * (1 - mean))
        moves, pays = batch.table_query.scatter(release.values.copy())
        pays[:, 0, best] = np.where(users > 0, [users * (1 - mean) + error, users * mean - error], pays[:, 0, best].T).T
        return replace(release, values=batch.table_query.gather(moves, pays))

    def expected_noise(self, query: Query) -> Noise | None:
        return self.honest.expected_noise(query)

    def certificate(self, query: Query) -> Certificate | None:
        return None


def _after_bad_luck(means: list[float], horizon: int, deviations: float, seed: int) -> tuple[bool, float]:
    """Whether the best action is played at every step in the end, and the share of the most regret there could be."""
    mdp = homogeneous(np.ones((1, len(means), 1)), [means], horizon, [1.0])
    learner, population, honest = _parties(mdp, 200_000, seed, delta=1e-6)
    unlucky = Unlucky(honest, mdp, deviations)
    history = learn(learner, population, unlucky)
    assert unlucky.planted
    second, best = np.sort(means)[-2:]
    assert learner.deployed is not None
    won = bool((learner.deployed.policies == np.argmax(means)).all())  # the last batch is not mixed
    return won, history.total_regret / (200_000 * horizon * (best - second))


@pytest.mark.parametrize(
    ("means", "horizon", "deviations"),
    [
        ([0.8, 0.9], 1, 2.0),
        ([0.8, 0.9], 3, 2.0),
        ([0.3, 0.5, 0.6, 0.2, 0.7], 1, 2.0),
        ([0.8, 0.9], 1, 3.0),
        ([0.3, 0.5, 0.6, 0.2, 0.7], 1, 3.0),
    ],
)
def test_a_planted_unlucky_batch_for_the_optimal_action_is_recovered_from(
    means: list[float], horizon: int, deviations: float
) -> None:
    """Its first release makes the best action look some standard errors worse, honest ones follow.

    Never trying it again would lose all of the difference to the second best. Of such bad luck as one release in 700
    has, three errors, 3 of 240 runs did not recover.
    """
    outcomes = [_after_bad_luck(means, horizon, deviations, seed) for seed in range(10)]
    lost = [lost for won, lost in outcomes if won]
    assert len(lost) >= (9 if deviations > 2 else 10)
    assert max(lost) < 0.3
